//! Closes stale sockets whenever backends have retired; see [`cproxy_datapath::sockets`].

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cproxy_core::Retired;
use cproxy_datapath::{
    bpf::PinDir,
    sockets::{self, Mode, Outcome},
};
use tokio::sync::Notify;

/// Delay of a pass: a socket that has just got its backend must have reached the kernel's list, and one pass serves all
/// backends that retire meanwhile.
const DELAY: Duration = Duration::from_millis(50);
/// Pause after a failed pass.
const RETRY: Duration = Duration::from_secs(5);
/// The next pass waits this many times as long as the last one was on a CPU: of one CPU, passes take a third of a
/// percent. The cost of finding network namespaces and owners grows with processes and descriptors, which cannot be
/// known before.
const REST: u32 = 299;
/// Longest pause, however long the last pass was: with 50 ms, that is one percent.
const REST_MAX: Duration = Duration::from_secs(5);

/// Retired backends for the task that closes their sockets.
pub(super) struct Handover {
    mode: Mode,
    retired: Mutex<Retired>,
    news: Notify,
}

impl Handover {
    pub(super) fn new(mode: Mode) -> Self {
        Self { mode, retired: Mutex::default(), news: Notify::new() }
    }

    /// Adds retired backends of the protocols whose sockets are closed.
    pub(super) fn add(&self, mut retired: Retired) {
        retired.retain(|protocol| self.mode.closes(protocol));
        if !retired.is_empty() {
            self.retired.lock().unwrap_or_else(PoisonError::into_inner).add_all(retired);
            self.news.notify_one();
        }
    }

    fn take(&self) -> Retired {
        std::mem::take(&mut self.retired.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Gauges of stale sockets.
#[derive(Debug, Default)]
pub(super) struct Gauges {
    closed: AtomicU64,
    left: AtomicU64,
    /// Passes that have ended.
    passes: AtomicU64,
    /// Network namespaces and processes that the last pass could not inspect.
    unseen: AtomicU64,
}

impl Gauges {
    /// Names and values, as `cproxy get counters` prints them.
    pub(super) fn read(&self) -> [(&'static str, u64); 4] {
        let read = |gauge: &AtomicU64| gauge.load(Ordering::Relaxed);
        [
            ("sockets_closed", read(&self.closed)),
            ("sockets_left", read(&self.left)),
            ("sockets_unseen", read(&self.unseen)),
            ("sockets_passes", read(&self.passes)),
        ]
    }
}

/// Background task that closes stale sockets.
pub(super) struct SocketTerminator {
    pub(super) pins: PinDir,
    pub(super) handover: Arc<Handover>,
    pub(super) gauges: Arc<Gauges>,
}

impl SocketTerminator {
    /// Runs for ever.
    pub(super) async fn run(self) {
        // Backends to search again, so that sockets reported as open are still open.
        let mut unfinished = Retired::default();
        loop {
            self.handover.news.notified().await;
            tokio::time::sleep(DELAY).await;
            let mut retired = self.handover.take();
            retired.add_all(unfinished);
            let pass = self.terminate(retired.clone()).await;
            unfinished = if pass.is_finished() { Retired::default() } else { retired };
            tokio::time::sleep(pass.rest()).await;
            if pass.is_to_be_repeated() {
                self.handover.news.notify_one();
            }
        }
    }

    async fn terminate(&self, retired: Retired) -> Passed {
        let pins = self.pins.clone();
        let outcome = match tokio::task::spawn_blocking(move || sockets::terminate_stale(&pins, &retired)).await {
            Ok(Ok(outcome)) => {
                self.note(outcome);
                Some(outcome)
            }
            Ok(Err(error)) => {
                tracing::warn!("{error}; tried again in {RETRY:?}");
                None
            }
            Err(error) => {
                tracing::warn!("closing stale sockets: {error}; tried again in {RETRY:?}");
                None
            }
        };
        self.gauges.passes.fetch_add(1, Ordering::Relaxed);
        Passed(outcome)
    }

    fn note(&self, Outcome { closed, left, unseen, namespaces, .. }: Outcome) {
        self.gauges.closed.fetch_add(closed, Ordering::Relaxed);
        let left_before = self.gauges.left.swap(left, Ordering::Relaxed);
        let unseen_before = self.gauges.unseen.swap(unseen.into(), Ordering::Relaxed);
        if closed != 0 {
            tracing::info!("sockets closed whose backends serve no more: {closed}");
        }
        if unseen_before != u64::from(unseen) {
            tracing::debug!(
                "network namespaces and processes that may not be looked into: {unseen}, of namespaces: {namespaces}"
            );
        }
        if left != left_before && left != 0 {
            tracing::warn!("{left} sockets whose backends serve no more are left open: see `cproxy check`");
        }
    }
}

/// Outcome of a pass; none if it failed.
struct Passed(Option<Outcome>);

impl Passed {
    fn is_finished(&self) -> bool {
        self.0.is_some_and(|outcome| outcome.left == 0)
    }

    /// Whether to search again soon: sockets that a pass closed may have hidden those that it left open.
    fn is_to_be_repeated(&self) -> bool {
        self.0.is_none_or(|outcome| outcome.closed != 0 && outcome.left != 0)
    }

    /// Pause before the next pass.
    fn rest(&self) -> Duration {
        match self.0 {
            Some(outcome) if !self.is_to_be_repeated() => (outcome.cpu * REST).min(REST_MAX),
            _ => RETRY,
        }
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::{Backend, Protocol, parse_address};

    use super::*;

    #[test]
    fn what_is_not_closed_wakes_nobody() {
        let backend = Backend { address: parse_address("10.0.0.1").unwrap(), port: 80 };
        let of = |protocol| {
            let mut retired = Retired::default();
            retired.add(protocol, [backend]);
            retired
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let is_woken = |handover: &Handover| {
            runtime.block_on(async {
                tokio::select! {
                    biased;
                    () = handover.news.notified() => true,
                    () = std::future::ready(()) => false,
                }
            })
        };
        for (mode, protocol, is_closed) in [
            (Mode::None, Protocol::Udp, false),
            (Mode::Udp, Protocol::Tcp, false),
            (Mode::Udp, Protocol::Udp, true),
            (Mode::All, Protocol::Tcp, true),
        ] {
            let handover = Handover::new(mode);
            handover.add(of(protocol));
            assert_eq!(is_woken(&handover), is_closed, "{mode:?} {protocol}");
            assert_eq!(handover.take() == of(protocol), is_closed, "{mode:?} {protocol}");
            assert!(handover.take().is_empty() && !is_woken(&handover), "once");
        }
        let handover = Handover::new(Mode::Udp);
        handover.add(Retired::any());
        handover.add(of(Protocol::Tcp));
        let taken = handover.take();
        assert!(taken.of(Protocol::Tcp).is_empty() && taken.of(Protocol::Udp).has(&backend));
    }

    #[test]
    fn passes_rest_in_proportion_and_five_seconds_at_most() {
        let rest = |cpu, closed, left| Passed(Some(Outcome { cpu, closed, left, ..Outcome::default() })).rest();
        let ms = Duration::from_millis;
        assert_eq!(rest(ms(1), 0, 0), ms(299));
        assert_eq!(rest(ms(1), 7, 0), ms(299));
        assert_eq!(rest(ms(1), 0, 7), ms(299), "nothing more can be done about them");
        assert_eq!(rest(ms(1), 7, 7), RETRY);
        assert_eq!(rest(ms(17), 0, 0), REST_MAX);
        assert_eq!(Passed(None).rest(), RETRY);
    }
}
