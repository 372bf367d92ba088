//! Background task that frees TCP places whose sockets are closed; see
//! [`cproxy_datapath::sockets::find_missing_owners`].
//!
//! Nothing wakes the agent for it. The task that owns the table looks at the places when it is awake anyway, and starts
//! a search when they become scarce.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cproxy_datapath::{
    TCP_PLACES,
    bpf::{PinDir, TcpPlacesUsage},
    sockets::{self, GoneOwners, MissingOwners, SocketsError},
};
use tokio::{sync::Notify, time::Instant};

use crate::mailbox::{Command, Mailbox};

/// Least time between two searches.
const INTERVAL_MIN: Duration = Duration::from_secs(10);
/// Time between two searches, as a multiple of the CPU time of the first: they use a third of a percent of one CPU.
const INTERVAL_FACTOR: u32 = 300;

/// Decision when to search.
#[derive(Debug, Default)]
struct Pace {
    is_searching: bool,
    not_before: Option<Instant>,
    /// Use of the places when the last search began.
    usage: TcpPlacesUsage,
    /// Places that the last search has left taken.
    kept: u32,
}

impl Pace {
    /// Whether to search: half of the places that the last search left free are taken, or a socket has found none
    /// since.
    fn is_due(&self, usage: TcpPlacesUsage, now: Instant) -> bool {
        let is_time = !self.is_searching && self.not_before.is_none_or(|at| at <= now);
        let is_scarce = usage.taken.saturating_sub(self.kept) > TCP_PLACES.saturating_sub(self.kept) / 2;
        is_time && usage.taken > 0 && (is_scarce || usage.without_place != self.usage.without_place)
    }

    fn begin(&mut self, usage: TcpPlacesUsage) {
        (self.is_searching, self.usage) = (true, usage);
    }

    fn end(&mut self, kept: Option<u32>, cpu: Duration, now: Instant) {
        self.is_searching = false;
        self.not_before = Some(now + (cpu * INTERVAL_FACTOR).max(INTERVAL_MIN));
        // After a failure the same places are no reason to search again.
        self.kept = kept.unwrap_or(self.usage.taken);
    }
}

/// The places as the task that owns the table watches them.
#[derive(Debug, Default)]
pub(in crate::agent) struct TcpPlaceWatch {
    pace: Mutex<Pace>,
    /// Notified when a search is due.
    due: Notify,
    searches: AtomicU64,
    /// Network namespaces and processes that the last search could not inspect.
    unseen: AtomicU64,
}

impl TcpPlaceWatch {
    /// Starts a search if one is due.
    pub(in crate::agent) fn check(&self, usage: TcpPlacesUsage) {
        self.with_pace(|pace| {
            if pace.is_due(usage, Instant::now()) {
                pace.begin(usage);
                self.due.notify_one();
            }
        });
    }

    /// Names and values, as `cproxy get counters` prints them.
    pub(in crate::agent) fn gauges(&self) -> [(&'static str, u64); 2] {
        let read = |gauge: &AtomicU64| gauge.load(Ordering::Relaxed);
        [("tcp_places_searches", read(&self.searches)), ("tcp_places_unseen", read(&self.unseen))]
    }

    fn with_pace<R>(&self, work: impl FnOnce(&mut Pace) -> R) -> R {
        work(&mut self.pace.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn end(&self, kept: Option<u32>, cpu: Duration) {
        self.searches.fetch_add(1, Ordering::Relaxed);
        self.with_pace(|pace| pace.end(kept, cpu, Instant::now()));
    }
}

/// Background task that searches.
pub(in crate::agent) struct TcpPlaceSweeper {
    pins: PinDir,
    watch: Arc<TcpPlaceWatch>,
    /// Way to the task that owns the table, and frees the places.
    mailbox: Mailbox,
}

impl TcpPlaceSweeper {
    pub(in crate::agent) fn new(pins: PinDir, watch: Arc<TcpPlaceWatch>, mailbox: Mailbox) -> Self {
        Self { pins, watch, mailbox }
    }

    /// Runs for ever.
    pub(in crate::agent) async fn run(self) {
        // A kernel that cannot list sockets fails each time.
        let mut last_failure = None;
        loop {
            self.watch.due.notified().await;
            match self.sweep().await {
                Ok(found) => {
                    last_failure = None;
                    self.watch.end(Some(found.kept), found.cpu);
                }
                Err(failure) => {
                    self.watch.end(None, Duration::ZERO);
                    if last_failure.as_ref() != Some(&failure) {
                        tracing::warn!("places of TCP sockets that have gone stay taken: {failure}");
                        last_failure = Some(failure);
                    }
                }
            }
        }
    }

    async fn sweep(&self) -> Result<GoneOwners, String> {
        let pins = self.pins.clone();
        let missing = blocking(move || sockets::find_missing_owners(&pins)).await?;
        if !missing.is_empty() {
            tokio::time::sleep(MissingOwners::PAUSE).await;
        }
        let mut found = blocking(move || missing.search_again()).await?;
        self.watch.unseen.store(found.unseen.into(), Ordering::Relaxed);
        let gone = std::mem::take(&mut found.places);
        tracing::debug!("{} TCP sockets with a place have gone, {} have not", gone.len(), found.kept);
        if !gone.is_empty() {
            let command = |sender| Command::FreeTcpPlaces(gone, sender);
            self.mailbox.order(command).await.map_err(|error| error.to_string())??;
        }
        Ok(found)
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SocketsError> + Send + 'static,
) -> Result<T, String> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(taken: u32, without_place: u64) -> TcpPlacesUsage {
        TcpPlacesUsage { taken, without_place }
    }

    #[test]
    fn a_search_is_due_when_half_of_the_free_places_are_taken_or_a_socket_has_found_none() {
        let now = Instant::now();
        let half = TCP_PLACES / 2;
        let mut pace = Pace::default();
        for (taken, without_place, is_due) in
            [(0, 0, false), (half, 0, false), (half + 1, 0, true), (1, 1, true), (0, 1, false)]
        {
            assert_eq!(pace.is_due(usage(taken, without_place), now), is_due, "{taken} {without_place}");
        }
        pace.kept = half;
        assert!(!pace.is_due(usage(half + half / 2, 0), now) && pace.is_due(usage(half + half / 2 + 1, 0), now));
        pace.kept = TCP_PLACES;
        assert!(!pace.is_due(usage(TCP_PLACES, 0), now), "all of them live");
    }

    #[test]
    fn searches_follow_one_another_at_a_distance_that_depends_on_their_cost() {
        let (start, full) = (Instant::now(), usage(TCP_PLACES, 7));
        let mut pace = Pace::default();
        pace.begin(full);
        assert!(!pace.is_due(full, start), "a search is under way");
        pace.end(Some(0), Duration::from_millis(1), start);
        assert!(!pace.is_due(full, start) && pace.is_due(full, start + INTERVAL_MIN));
        pace.begin(full);
        pace.end(Some(0), Duration::from_secs(1), start);
        let later = start + Duration::from_secs(300);
        assert!(!pace.is_due(full, later - Duration::from_millis(1)) && pace.is_due(full, later));
        pace.begin(full);
        pace.end(None, Duration::ZERO, start);
        assert!(!pace.is_due(full, later), "it would fail again");
        assert!(pace.is_due(usage(TCP_PLACES, 8), later));
    }
}
