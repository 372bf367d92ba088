//! Closes stale sockets whenever backends have gone; see [`crate::sockets`].

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::Notify;

use crate::{
    bpf::PinDir,
    sockets::{self, Mode, Outcome},
};

/// A connect that has just got its backend must have reached the kernel's list of sockets; and one pass serves for all
/// that goes meanwhile.
const DELAY: Duration = Duration::from_millis(50);
/// A pass that failed is tried again after this.
const RETRY: Duration = Duration::from_secs(5);

/// What has become of stale sockets.
#[derive(Debug, Default)]
pub(super) struct Gauges {
    closed: AtomicU64,
    left: AtomicU64,
    /// Network namespaces and processes that could not be looked into by the last pass.
    unseen: AtomicU64,
}

impl Gauges {
    /// Names and values, as `cproxy get counters` prints them.
    pub(super) fn read(&self) -> [(&'static str, u64); 3] {
        let read = |gauge: &AtomicU64| gauge.load(Ordering::Relaxed);
        [
            ("sockets_closed", read(&self.closed)),
            ("sockets_left", read(&self.left)),
            ("sockets_unseen", read(&self.unseen)),
        ]
    }
}

/// Whoever closes them.
pub(super) struct Closer {
    pub(super) pins: PinDir,
    pub(super) mode: Mode,
    /// Told whenever backends have gone, and once the table is complete.
    pub(super) retired: Arc<Notify>,
    pub(super) gauges: Arc<Gauges>,
}

impl Closer {
    /// Works for ever.
    pub(super) async fn run(self) {
        if self.mode == Mode::None {
            return;
        }
        loop {
            self.retired.notified().await;
            tokio::time::sleep(DELAY).await;
            if !self.pass().await {
                tokio::time::sleep(RETRY).await;
                self.retired.notify_one();
            }
        }
    }

    /// False if it is to be repeated.
    async fn pass(&self) -> bool {
        let (pins, mode) = (self.pins.clone(), self.mode);
        match tokio::task::spawn_blocking(move || sockets::pass(&pins, mode)).await {
            Ok(Ok(outcome)) => {
                self.note(outcome);
                // Where some could be closed and some not, those were hidden behind others.
                return outcome.closed == 0 || outcome.left == 0;
            }
            Ok(Err(error)) => tracing::warn!("{error}; tried again in {RETRY:?}"),
            Err(error) => tracing::warn!("closing stale sockets: {error}; tried again in {RETRY:?}"),
        }
        false
    }

    fn note(&self, Outcome { closed, left, unseen, namespaces }: Outcome) {
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
