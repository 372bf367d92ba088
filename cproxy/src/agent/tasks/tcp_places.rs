//! Background task that frees TCP places whose sockets are closed; see
//! [`cproxy_datapath::sockets::find_missing_owners`]. It also has places added while there are many connections, and
//! removed afterwards.
//!
//! Two things lead to a search. When the task that owns the table is awake anyway, it looks whether places become
//! scarce. And the programs send a message when a socket has found no place, which costs nothing until then. At rest
//! nothing wakes the agent. While there is a further level of places, it looks each half minute whether fewer are
//! enough.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cproxy_datapath::{
    bpf::{PinDir, TCP_PLACES_MAX, TableError, TcpFull, TcpPlacesUsage},
    sockets::{self, GoneOwners, MissingOwners, SocketsError},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Notify,
    time::{Instant, sleep, sleep_until},
};

use crate::mailbox::{Command, Mailbox, TcpPlaceDemand};

/// Least time between two searches.
const INTERVAL_MIN: Duration = Duration::from_secs(10);
/// Time between two searches, as a multiple of the CPU time of the first: they use a third of a percent of one CPU.
const INTERVAL_FACTOR: u32 = 300;
/// Time from a search that has added places to the next one: there may be far more connections.
const GROWTH_INTERVAL: Duration = Duration::from_secs(1);
/// Least time between two searches because a socket has found no place while few are taken: both places of a socket are
/// taken now and then.
const IDLE_INTERVAL_MIN: Duration = Duration::from_secs(60);
/// Least time between two messages of the programs that count.
const MESSAGE_INTERVAL: Duration = Duration::from_secs(1);
/// Time from a message of the programs to the search: connects that come in a storm are then seen together.
const GATHERING: Duration = Duration::from_millis(250);
/// Time from the start to the first look whether fewer places are enough.
const FIRST_LOOK: Duration = Duration::from_secs(5);
/// Time between two looks whether fewer places are enough.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);
/// Time from a failure to add or remove places to the next attempt.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// End of a search.
#[derive(Clone, Copy, Debug)]
struct Ended {
    at: Instant,
    /// CPU time of the search; of one that has failed, nothing.
    cpu: Duration,
    has_grown: bool,
}

impl Ended {
    /// Least time from there to the next search, with this use of the places: a storm may have come meanwhile.
    fn interval(&self, usage: TcpPlacesUsage) -> Duration {
        if self.has_grown {
            return GROWTH_INTERVAL;
        }
        let may_grow = are_many(usage) && usage.room() < TCP_PLACES_MAX;
        if may_grow { INTERVAL_MIN } else { (self.cpu * INTERVAL_FACTOR).max(INTERVAL_MIN) }
    }
}

/// Decision when to search.
#[derive(Debug, Default)]
struct Pace {
    is_searching: bool,
    last: Option<Ended>,
    /// Number of further levels at the last look.
    further_levels: u32,
    /// Use of the places when the last search began.
    usage: TcpPlacesUsage,
    /// Whether a socket had found no place since the search before.
    is_full: bool,
    /// Places that the last search has left taken.
    kept: u32,
    /// Whether a level may go if owners that have gone are found.
    may_shrink: bool,
}

impl Pace {
    /// Whether to search: half of the places that the last search left free are taken, or a socket has found none
    /// since. While few are taken, no connections need more, so the second reason can wait.
    fn is_due(&self, usage: TcpPlacesUsage, now: Instant) -> bool {
        let is_over = |interval| self.last.is_none_or(|last| last.at + interval <= now);
        let is_time = !self.is_searching && is_over(self.last.map_or(Duration::ZERO, |last| last.interval(usage)));
        let is_scarce = usage.taken.saturating_sub(self.kept) > usage.room().saturating_sub(self.kept) / 2;
        let is_full =
            usage.without_place != self.usage.without_place && (are_many(usage) || is_over(IDLE_INTERVAL_MIN));
        is_time && usage.taken > 0 && (is_scarce || is_full || self.may_shrink && usage.taken > self.kept)
    }

    fn begin(&mut self, usage: TcpPlacesUsage) {
        self.is_full = usage.without_place != self.usage.without_place;
        (self.is_searching, self.may_shrink, self.usage) = (true, false, usage);
    }

    fn end(&mut self, found: Option<&Found>, now: Instant) {
        self.is_searching = false;
        let Found { cpu, has_grown, .. } = found.copied().unwrap_or_default();
        self.last = Some(Ended { at: now, cpu, has_grown });
        // After a failure the same places are no reason to search again.
        self.kept = found.map_or(self.usage.taken, |found| found.kept);
    }
}

/// Whether so many places are taken that others may be needed.
fn are_many(usage: TcpPlacesUsage) -> bool {
    usage.taken >= usage.room() / 4
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
            pace.further_levels = usage.further_levels;
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

    /// Has the places searched again at the next look.
    fn search_again(&self) {
        self.with_pace(|pace| pace.usage = TcpPlacesUsage::default());
    }

    /// Ends a search.
    fn end(&self, found: Option<&Found>) {
        self.searches.fetch_add(1, Ordering::Relaxed);
        self.with_pace(|pace| pace.end(found, Instant::now()));
    }
}

/// Result of a search.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    kept: u32,
    cpu: Duration,
    /// Whether it has added places.
    has_grown: bool,
}

/// Background task that searches.
pub(in crate::agent) struct TcpPlaceSweeper {
    pins: PinDir,
    watch: Arc<TcpPlaceWatch>,
    /// Way to the task that owns the table, and writes the places.
    mailbox: Mailbox,
    /// When the next message of the programs counts. Until then it stays where it is, so they send no other.
    heeds_message_from: Instant,
    /// When to look whether fewer places are enough, or what has failed works now.
    looks_at: Option<Instant>,
    /// Number of living sockets for which places could not be added.
    unmet: Option<u32>,
    /// A kernel that cannot list sockets fails each time.
    last_failure: Option<String>,
    /// Without memory, each attempt to add places fails.
    last_growth_failure: Option<String>,
}

impl TcpPlaceSweeper {
    pub(in crate::agent) fn new(pins: PinDir, watch: Arc<TcpPlaceWatch>, mailbox: Mailbox) -> Self {
        let now = Instant::now();
        // An earlier agent may have added places.
        let looks_at = Some(now + FIRST_LOOK);
        Self {
            pins,
            watch,
            mailbox,
            heeds_message_from: now,
            looks_at,
            unmet: None,
            last_failure: None,
            last_growth_failure: None,
        }
    }

    /// Runs for ever.
    pub(in crate::agent) async fn run(mut self) {
        let mut full = self.open_message().inspect_err(|error| {
            tracing::warn!("nothing tells when TCP sockets find no place: {error}");
        });
        loop {
            tokio::select! {
                () = self.watch.due.notified() => self.search().await,
                () = message(full.as_mut().ok(), self.heeds_message_from) => {
                    self.heeds_message_from = Instant::now() + MESSAGE_INTERVAL;
                    // The loop looks at the places after each command.
                    self.mailbox.tell(Command::LookAtTcpPlaces).await.ok();
                }
                () = sleep_until_some(self.looks_at) => {
                    self.looks_at = None;
                    match self.unmet.take() {
                        Some(living) => drop(self.grow(living).await),
                        None => self.shrink().await,
                    }
                }
            }
        }
    }

    fn open_message(&self) -> Result<AsyncFd<TcpFull>, TableError> {
        let full = TcpFull::open(&self.pins)?;
        // SAFETY: its descriptor stays the same one, and open, as long as the message exists.
        let full = unsafe { AsyncFd::register_with_interest(full, Interest::READABLE) };
        full.map_err(|error| TableError::Descriptor(error.into()))
    }

    async fn search(&mut self) {
        let found = self.sweep().await;
        self.watch.end(found.as_ref().ok());
        let has_grown = found.as_ref().is_ok_and(|found| found.has_grown);
        self.heeds_message_from = Instant::now() + if has_grown { GROWTH_INTERVAL } else { INTERVAL_MIN };
        let failure = found.err();
        if let Some(failure) = failure.as_ref().filter(|failure| self.last_failure.as_ref() != Some(failure)) {
            tracing::warn!("places of TCP sockets that have gone stay taken: {failure}");
            self.watch.search_again();
            self.looks_at = Some(Instant::now() + LOOK_INTERVAL);
        }
        self.last_failure = failure;
    }

    async fn sweep(&mut self) -> Result<Found, String> {
        let pins = self.pins.clone();
        let missing = blocking(move || sockets::find_missing_owners(&pins)).await?;
        let has_grown = self.watch.with_pace(|pace| pace.is_full) && self.grow(missing.kept()).await;
        if !missing.is_empty() {
            sleep(MissingOwners::PAUSE).await;
        }
        let GoneOwners { places, kept, unseen, cpu } = blocking(move || missing.search_again()).await?;
        self.watch.unseen.store(unseen.into(), Ordering::Relaxed);
        tracing::debug!("{} TCP sockets with a place have gone, {kept} have not", places.len());
        if !places.is_empty() {
            let command = |sender| Command::FreeTcpPlaces(places, sender);
            self.mailbox.order(command).await.map_err(|error| error.to_string())??;
        }
        Ok(Found { kept, cpu, has_grown })
    }

    /// Has places added if so many connections live that others may find none. Returns whether there are more.
    async fn grow(&mut self, living: u32) -> bool {
        let before = self.watch.with_pace(|pace| pace.usage.room());
        match self.resize(TcpPlaceDemand::More { living }).await {
            Ok(usage) => {
                self.last_growth_failure = None;
                if usage.further_levels > 0 {
                    self.looks_at.get_or_insert_with(|| Instant::now() + LOOK_INTERVAL);
                }
                usage.room() > before
            }
            Err(error) => {
                if self.last_growth_failure.as_ref() != Some(&error) {
                    tracing::warn!("TCP sockets get no more places: {error}");
                }
                self.last_growth_failure = Some(error);
                self.unmet = Some(living);
                self.looks_at = Some(Instant::now() + RETRY_INTERVAL);
                false
            }
        }
    }

    /// Has places removed if fewer are enough.
    async fn shrink(&mut self) {
        // Owners that have gone may keep a level. The loop looks after this order whether a search is due.
        self.watch.with_pace(|pace| pace.may_shrink = pace.further_levels > 0);
        let mut before = None;
        loop {
            let usage = match self.resize(TcpPlaceDemand::None).await {
                Ok(usage) => usage,
                Err(error) => {
                    tracing::warn!("places of TCP sockets that are not needed stay: {error}");
                    self.looks_at = Some(Instant::now() + RETRY_INTERVAL);
                    return;
                }
            };
            // It goes on while peers move, and with the level below.
            let progress = (usage.further_levels, usage.is_shrinking, usage.taken_in_last);
            if usage.further_levels == 0 || before.replace(progress) == Some(progress) {
                self.looks_at = (usage.further_levels > 0).then(|| Instant::now() + LOOK_INTERVAL);
                return;
            }
        }
    }

    async fn resize(&self, demand: TcpPlaceDemand) -> Result<TcpPlacesUsage, String> {
        let command = |sender| Command::ResizeTcpPlaces(demand, sender);
        self.mailbox.order(command).await.map_err(|error| error.to_string())?
    }
}

/// Waits for a message of the programs that counts, and takes it.
async fn message(full: Option<&mut AsyncFd<TcpFull>>, from: Instant) {
    let Some(full) = full else { return std::future::pending().await };
    sleep_until(from).await;
    let Ok(mut ready) = full.readable_mut().await else { return std::future::pending().await };
    sleep(GATHERING).await;
    ready.get_inner_mut().take();
    ready.clear_ready();
}

async fn sleep_until_some(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
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
    use cproxy_datapath::TCP_PLACES;

    use super::*;

    fn usage(taken: u32, without_place: u64) -> TcpPlacesUsage {
        TcpPlacesUsage { taken, without_place, ..TcpPlacesUsage::default() }
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
        pace.may_shrink = true;
        assert!(
            !pace.is_due(usage(TCP_PLACES, 0), now) && pace.is_due(usage(TCP_PLACES + 1, 0), now),
            "one may have gone"
        );
        pace.begin(usage(TCP_PLACES + 1, 0));
        assert!(!pace.may_shrink);
    }

    #[test]
    fn searches_follow_one_another_at_a_distance_that_depends_on_their_cost() {
        let start = Instant::now();
        // All levels exist.
        let full = TcpPlacesUsage { further_levels: 2, ..usage(TCP_PLACES_MAX, 7) };
        let mut pace = Pace::default();
        let found = |cpu_ms| Found { cpu: Duration::from_millis(cpu_ms), ..Found::default() };
        pace.begin(full);
        assert!(!pace.is_due(full, start), "a search is under way");
        pace.end(Some(&found(1)), start);
        assert!(!pace.is_due(full, start) && pace.is_due(full, start + INTERVAL_MIN));
        pace.begin(full);
        pace.end(Some(&found(1_000)), start);
        let later = start + Duration::from_secs(300);
        assert!(!pace.is_due(full, later - Duration::from_millis(1)) && pace.is_due(full, later));
        let (few, more) = (usage(TCP_PLACES / 4 - 1, 8), usage(TCP_PLACES / 4, 9));
        pace.begin(few);
        pace.end(Some(&found(1_000)), start);
        let soon = start + INTERVAL_MIN;
        assert!(!pace.is_due(few, soon), "as before");
        assert!(pace.is_due(more, soon), "a storm has come meanwhile");
        pace.begin(full);
        pace.end(Some(&Found { has_grown: true, ..found(1_000) }), start);
        assert!(!pace.is_due(full, start) && pace.is_due(full, start + GROWTH_INTERVAL), "there may be more to come");
        pace.begin(full);
        pace.end(None, start);
        assert!(!pace.is_due(full, later), "it would fail again");
        assert!(pace.is_due(TcpPlacesUsage { without_place: 8, ..full }, later));
    }

    #[test]
    fn few_places_that_are_taken_wait_a_minute_and_many_do_not() {
        let start = Instant::now();
        let (few, many) = (TCP_PLACES / 4 - 1, TCP_PLACES / 4);
        let mut pace = Pace::default();
        assert!(pace.is_due(usage(few, 1), start), "the first search");
        pace.begin(usage(few, 1));
        pace.end(Some(&Found { kept: few, ..Found::default() }), start);
        let soon = start + INTERVAL_MIN;
        assert!(!pace.is_due(usage(few, 2), soon) && pace.is_due(usage(few, 2), start + IDLE_INTERVAL_MIN));
        assert!(pace.is_due(usage(many, 2), soon), "more places may be needed");
        assert!(!pace.is_due(usage(many, 1), soon), "each socket has found one");
    }
}
