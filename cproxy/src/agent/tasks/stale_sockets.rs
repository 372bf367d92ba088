//! Background task that closes stale sockets whenever backends have retired; see [`cproxy_datapath::sockets`].

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cproxy_core::{Backend, Protocol, Retired, counted};
use cproxy_datapath::{
    bpf::PinDir,
    sockets::{self, Outcome, TerminateSockets},
};
use tokio::sync::Notify;

/// Delay of a pass: a socket that has just got its backend must have reached the kernel's list, and one pass serves all
/// backends that retire meanwhile.
const DELAY: Duration = Duration::from_millis(50);
/// Pause after a pass that failed, or that another one must follow.
const RETRY_PAUSE: Duration = Duration::from_secs(5);
/// Pause after a pass, as a multiple of its CPU time: passes use a third of a percent of one CPU. The cost of finding
/// network namespaces and owners grows with processes and descriptors, which cannot be known before.
const PAUSE_FACTOR: u32 = 299;
/// Longest such pause: after a pass of 50 ms, that is one percent.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Retired backends for the task that closes their sockets.
pub(in crate::agent) struct RetiredQueue {
    mode: Mutex<TerminateSockets>,
    retired: Mutex<Retired>,
    /// Notified when backends were added.
    added: Notify,
}

impl RetiredQueue {
    pub(in crate::agent) fn new(mode: TerminateSockets) -> Self {
        Self { mode: Mutex::new(mode), retired: Mutex::default(), added: Notify::new() }
    }

    /// Changes the protocols whose sockets are closed. Sockets that were left open are looked for again.
    pub(in crate::agent) fn set_mode(&self, mode: TerminateSockets) {
        if std::mem::replace(&mut *self.mode.lock().unwrap_or_else(PoisonError::into_inner), mode) != mode {
            self.add(Retired::any());
        }
    }

    /// Adds retired backends of the protocols whose sockets are closed.
    pub(in crate::agent) fn add(&self, mut retired: Retired) {
        self.retain_closed(&mut retired);
        if !retired.is_empty() {
            self.retired.lock().unwrap_or_else(PoisonError::into_inner).add_all(retired);
            self.added.notify_one();
        }
    }

    /// Has the sockets looked for whose datagrams were refused, and may no longer be.
    pub(in crate::agent) fn add_refused(&self) {
        let mut retired = Retired::default();
        retired.add(Protocol::Udp, [Backend::NOBODY]);
        self.add(retired);
    }

    /// Removes the backends that were added, and returns them with those of an unfinished pass.
    fn drain(&self, unfinished: Retired) -> Retired {
        let mut retired = std::mem::take(&mut *self.retired.lock().unwrap_or_else(PoisonError::into_inner));
        retired.add_all(unfinished);
        // The mode may have changed since they were added.
        self.retain_closed(&mut retired);
        retired
    }

    fn retain_closed(&self, retired: &mut Retired) {
        let mode = *self.mode.lock().unwrap_or_else(PoisonError::into_inner);
        retired.retain(|protocol| mode.closes(protocol));
    }
}

/// Gauges of stale sockets.
#[derive(Debug, Default)]
pub(in crate::agent) struct SocketGauges {
    closed: AtomicU64,
    left: AtomicU64,
    /// Passes that have ended.
    passes: AtomicU64,
    /// Network namespaces and processes that the last pass could not inspect.
    unseen: AtomicU64,
}

impl SocketGauges {
    /// Names and values, as `cproxy get counters` prints them.
    pub(in crate::agent) fn read(&self) -> [(&'static str, u64); 4] {
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
pub(in crate::agent) struct SocketTerminator {
    pins: PinDir,
    retired_queue: Arc<RetiredQueue>,
    gauges: Arc<SocketGauges>,
}

impl SocketTerminator {
    pub(in crate::agent) fn new(pins: PinDir, retired_queue: Arc<RetiredQueue>, gauges: Arc<SocketGauges>) -> Self {
        Self { pins, retired_queue, gauges }
    }

    /// Runs for ever.
    pub(in crate::agent) async fn run(self) {
        // Backends to search again, so that sockets reported as open are still open.
        let mut unfinished = Retired::default();
        loop {
            self.retired_queue.added.notified().await;
            tokio::time::sleep(DELAY).await;
            let retired = self.retired_queue.drain(unfinished);
            let pass = self.terminate(retired.clone()).await;
            unfinished = if pass.is_finished() { Retired::default() } else { retired };
            tokio::time::sleep(pass.pause()).await;
            if pass.must_repeat() {
                self.retired_queue.added.notify_one();
            }
        }
    }

    async fn terminate(&self, retired: Retired) -> Pass {
        let pins = self.pins.clone();
        let outcome = match tokio::task::spawn_blocking(move || sockets::terminate_stale(&pins, &retired)).await {
            Ok(Ok(outcome)) => {
                self.record(outcome);
                Some(outcome)
            }
            Ok(Err(error)) => {
                tracing::warn!(name: "sockets_failed", "{error}; tried again in {RETRY_PAUSE:?}");
                None
            }
            Err(error) => {
                tracing::warn!(
                    name: "sockets_failed",
                    "closing stale sockets: {error}; tried again in {RETRY_PAUSE:?}"
                );
                None
            }
        };
        self.gauges.passes.fetch_add(1, Ordering::Relaxed);
        Pass(outcome)
    }

    fn record(&self, Outcome { closed, left, unseen, namespaces, frontends, .. }: Outcome) {
        self.gauges.closed.fetch_add(closed, Ordering::Relaxed);
        let left_before = self.gauges.left.swap(left, Ordering::Relaxed);
        let unseen_before = self.gauges.unseen.swap(unseen.into(), Ordering::Relaxed);
        if closed != 0 {
            let [named @ .., more] = frontends;
            let named: Vec<_> = named.into_iter().flatten().map(|frontend| frontend.to_string()).collect();
            let others = if more.is_some() { " and others" } else { "" };
            let sockets = counted(closed, "stale socket", "stale sockets");
            tracing::info!(name: "sockets_closed", "closed {sockets} of {}{others}", named.join(", "));
        }
        if unseen_before != u64::from(unseen) {
            tracing::debug!(
                "could not inspect {unseen} of the network namespaces and processes; inspected {namespaces} namespaces"
            );
        }
        if left != left_before && left != 0 {
            let sockets = counted(left, "stale socket", "stale sockets");
            tracing::warn!(name: "sockets_left", "left {sockets} open: see `cproxy check`");
        }
    }
}

/// Pass that has ended; without an outcome if it failed.
struct Pass(Option<Outcome>);

impl Pass {
    fn is_finished(&self) -> bool {
        self.0.is_some_and(|outcome| outcome.left == 0)
    }

    /// Whether to search again soon: sockets that a pass closed may have hidden those that it left open.
    fn must_repeat(&self) -> bool {
        self.0.is_none_or(|outcome| outcome.closed != 0 && outcome.left != 0)
    }

    /// Pause before the next pass.
    fn pause(&self) -> Duration {
        match self.0 {
            Some(outcome) if !self.must_repeat() => (outcome.cpu * PAUSE_FACTOR).min(PAUSE_MAX),
            _ => RETRY_PAUSE,
        }
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::parse_address;

    use super::*;

    #[test]
    fn only_backends_whose_sockets_are_closed_start_a_pass() {
        let backend = Backend { address: parse_address("10.0.0.1").unwrap(), port: 80 };
        let of = |protocol| {
            let mut retired = Retired::default();
            retired.add(protocol, [backend]);
            retired
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let is_woken = |retired_queue: &RetiredQueue| {
            runtime.block_on(async {
                tokio::select! {
                    biased;
                    () = retired_queue.added.notified() => true,
                    () = std::future::ready(()) => false,
                }
            })
        };
        for (mode, protocol, is_closed) in [
            (TerminateSockets::None, Protocol::Udp, false),
            (TerminateSockets::Udp, Protocol::Tcp, false),
            (TerminateSockets::Udp, Protocol::Udp, true),
            (TerminateSockets::All, Protocol::Tcp, true),
        ] {
            let retired_queue = RetiredQueue::new(mode);
            retired_queue.add(of(protocol));
            assert_eq!(is_woken(&retired_queue), is_closed, "{mode:?} {protocol}");
            assert_eq!(retired_queue.drain(Retired::default()) == of(protocol), is_closed, "{mode:?} {protocol}");
            assert!(retired_queue.drain(Retired::default()).is_empty() && !is_woken(&retired_queue), "once");
        }
        let retired_queue = RetiredQueue::new(TerminateSockets::Udp);
        retired_queue.add(Retired::any());
        retired_queue.add(of(Protocol::Tcp));
        let drained = retired_queue.drain(Retired::default());
        assert!(drained.of(Protocol::Tcp).is_empty() && drained.of(Protocol::Udp).has(&backend));

        retired_queue.set_mode(TerminateSockets::Udp);
        assert!(retired_queue.drain(Retired::default()).is_empty(), "no change");
        retired_queue.set_mode(TerminateSockets::All);
        let drained = retired_queue.drain(Retired::default());
        assert!(drained.of(Protocol::Tcp).has(&backend), "sockets were left open");
        retired_queue.set_mode(TerminateSockets::None);
        assert!(retired_queue.drain(drained).is_empty(), "an unfinished pass ends");
    }

    #[test]
    fn pauses_are_proportional_to_cpu_time_and_at_most_five_seconds() {
        let pause = |cpu, closed, left| Pass(Some(Outcome { cpu, closed, left, ..Outcome::default() })).pause();
        let ms = Duration::from_millis;
        assert_eq!(pause(ms(1), 0, 0), ms(299));
        assert_eq!(pause(ms(1), 7, 0), ms(299));
        assert_eq!(pause(ms(1), 0, 7), ms(299), "nothing more can be done about them");
        assert_eq!(pause(ms(1), 7, 7), RETRY_PAUSE);
        assert_eq!(pause(ms(17), 0, 0), PAUSE_MAX);
        assert_eq!(Pass(None).pause(), RETRY_PAUSE);
    }
}
