//! Collections of all kinds, what is known of their progress, and the bounds of their history.

use std::{
    future::poll_fn,
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};

use cproxy_core::printable;
use cproxy_relay_core::{Collection, KINDS, Kind, Outcome, Policies, Status, Summary, Update};
use tokio::{
    sync::{Notify, watch},
    time::timeout,
};

/// Age of the oldest event.
const HISTORY_AGE_MAX: Duration = Duration::from_secs(15 * 60);

/// Share of the history above which the events of one namespace are compacted: one in this many.
const NAMESPACE_SHARE: usize = 8;

/// Shortest time between two watches that are opened for a bookmark, whatever clients wait for: the time that such a
/// watch lasts. The bookmark comes a second after its beginning, and one that is ended before has been in vain.
pub(crate) const BOOKMARK_INTERVAL: Duration = cproxy_wire::BOOKMARK_WATCH_TIME;

/// Time for which a request waits for a version that the relay does not have yet: until the next watch that is opened
/// for a bookmark, and the two seconds until that comes.
pub(crate) const WAIT_MAX: Duration = BOOKMARK_INTERVAL.saturating_add(Duration::from_secs(2));

/// Collections of all kinds.
#[derive(Debug)]
pub(crate) struct Cache {
    kinds: [KindCache; KINDS.len()],
    /// Slices of address sets. Policies of pods are written when they are asked for.
    policies: KindCache,
    history_bytes_max: usize,
    /// Notified when clients have to be woken.
    changed: Notify,
}

/// Collection of one kind, and its source.
#[derive(Debug)]
struct KindCache {
    collection: Arc<Collection>,
    /// Version up to which all changes are known; `None` before the first list is complete.
    version: watch::Sender<Option<u64>>,
    /// Notified when a client waits for a version.
    wanted: Arc<Notify>,
    counts: Counts,
    contact: std::sync::Mutex<Option<Instant>>,
}

/// Numbers of what has happened.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) events: AtomicU64,
    pub(crate) resets: AtomicU64,
    pub(crate) lists: AtomicU64,
    pub(crate) unreadable: AtomicU64,
}

impl Cache {
    /// Empty collections, whose histories have at most this many bytes together.
    pub(crate) fn new(history_bytes_max: usize) -> Self {
        let kind = |kind| KindCache {
            collection: Arc::new(Collection::new(kind)),
            version: watch::Sender::new(None),
            wanted: Arc::new(Notify::new()),
            counts: Counts::default(),
            contact: std::sync::Mutex::new(None),
        };
        Self { kinds: KINDS.map(kind), policies: kind(Kind::AddressSlices), history_bytes_max, changed: Notify::new() }
    }

    fn kind(&self, kind: Kind) -> &KindCache {
        let [services, slices, nodes] = &self.kinds;
        match kind {
            Kind::Services => services,
            Kind::EndpointSlices => slices,
            Kind::Nodes => nodes,
            Kind::PodPolicies | Kind::AddressSlices => &self.policies,
        }
    }

    fn caches(&self) -> impl Iterator<Item = &KindCache> {
        self.kinds.iter().chain([&self.policies])
    }

    pub(crate) fn collection(&self, kind: Kind) -> &Arc<Collection> {
        &self.kind(kind).collection
    }

    pub(crate) fn counts(&self, kind: Kind) -> &Counts {
        &self.kind(kind).counts
    }

    pub(crate) fn wanted(&self, kind: Kind) -> Arc<Notify> {
        self.kind(kind).wanted.clone()
    }

    pub(crate) fn summary(&self, kind: Kind) -> Option<Summary> {
        self.collection(kind).summary()
    }

    /// Kinds whose first list is not complete, with the reason if it has ended.
    pub(crate) fn pending(&self) -> Vec<String> {
        let pending = KINDS.into_iter().filter(|kind| self.summary(*kind).is_none());
        let described = pending.map(|kind| {
            let name = kind.plural();
            match self.collection(kind).unread() {
                Some((1, object)) => format!("{name} ({} cannot be read)", printable(&object)),
                Some((count, object)) => {
                    format!("{name} ({count} objects cannot be read, one of them {})", printable(&object))
                }
                None => name.to_owned(),
            }
        });
        described.collect()
    }

    /// Seconds since the API server last confirmed what is known; `None` before the first time.
    pub(crate) fn silent_seconds(&self, kind: Kind) -> Option<f64> {
        let contact = *self.kind(kind).contact.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        contact.map(|contact| contact.elapsed().as_secs_f64())
    }

    /// Records that the API server has confirmed what is known.
    pub(crate) fn record_contact(&self, kind: Kind) {
        *self.kind(kind).contact.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(Instant::now());
    }

    /// Applies an update.
    pub(crate) fn apply(&self, kind: Kind, update: Update) -> Outcome {
        let of_kind = self.kind(kind);
        if matches!(update, Update::ListDone(_)) {
            of_kind.counts.lists.fetch_add(1, Ordering::Relaxed);
        }
        let outcome = of_kind.collection.apply(update, Instant::now());
        of_kind.counts.events.fetch_add(outcome.events as u64, Ordering::Relaxed);
        of_kind.counts.resets.fetch_add(outcome.is_reset.into(), Ordering::Relaxed);
        of_kind.version.send_replace(of_kind.collection.summary().map(|summary| summary.version));
        self.bound_history();
        self.changed.notify_one();
        outcome
    }

    /// Has the clients woken, after the policies were published.
    pub(crate) fn bound_and_wake(&self) {
        self.bound_history();
        self.changed.notify_one();
    }

    /// Wakes clients after updates, for ever; to be run where their connections are.
    ///
    /// It waits until those that were woken before have had their turn, first their watches and then their connections.
    /// When there is more to do than time, each turn takes all changes so far, and no client falls behind.
    pub(crate) async fn wake_clients(&self, policies: Option<&Policies>) {
        loop {
            self.changed.notified().await;
            for _ in 0..2 {
                after_others().await;
            }
            self.caches().for_each(|kind| kind.collection.wake_due());
            if let Some(policies) = policies {
                policies.wake_due();
            }
        }
    }

    /// Compacts the events of namespaces with more than their share, and forgets the oldest events of all kinds until
    /// the histories are within their bound.
    fn bound_history(&self) {
        while self.history_bytes() > self.history_bytes_max {
            let collections = self.caches().map(|kind| &kind.collection);
            let largest = collections.filter_map(|collection| Some((collection.largest_namespace()?, collection)));
            if let Some(((namespace, bytes), collection)) = largest.max_by_key(|((_, bytes), _)| *bytes)
                && bytes > self.history_bytes_max / NAMESPACE_SHARE
            {
                collection.compact(&namespace);
                continue;
            }
            let collections = self.caches().map(|kind| &kind.collection);
            let oldest = collections.filter_map(|collection| Some((collection.oldest_event()?, collection)));
            let Some((_, collection)) = oldest.min_by_key(|(at, _)| *at) else { return };
            collection.forget_oldest();
        }
    }

    fn history_bytes(&self) -> usize {
        self.caches().map(|kind| kind.collection.history_bytes()).sum()
    }

    /// Forgets events that are too old.
    pub(crate) fn forget_old(&self) {
        for kind in self.caches() {
            kind.collection.forget_older_than(HISTORY_AGE_MAX, Instant::now());
        }
    }

    /// Waits until all changes up to a version are known.
    ///
    /// # Errors
    /// They are not, after some seconds.
    pub(crate) async fn wait_for(&self, kind: Kind, version: u64) -> Result<(), Status> {
        let of_kind = self.kind(kind);
        let mut known = of_kind.version.subscribe();
        let has_version = |known: &Option<u64>| known.is_some_and(|known| known >= version);
        if has_version(&known.borrow()) {
            return Ok(());
        }
        of_kind.wanted.notify_one();
        if timeout(WAIT_MAX, known.wait_for(has_version)).await.is_ok_and(|waited| waited.is_ok()) {
            return Ok(());
        }
        let now = *known.borrow();
        Err(now.map_or_else(|| not_synced(kind), |now| too_large(version, now)))
    }
}

/// Waits until all tasks that are ready now have run.
async fn after_others() {
    let mut has_waited = false;
    poll_fn(|context| {
        if mem::replace(&mut has_waited, true) {
            return Poll::Ready(());
        }
        // The runtime puts a task that wakes itself behind all others.
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Error of a version that the relay does not have (apiserver/pkg/storage/errors.go 1.36).
pub(crate) fn too_large(version: u64, now: u64) -> Status {
    Status {
        retry_after_seconds: 1,
        cause: Some(("ResourceVersionTooLarge", "Too large resource version")),
        ..Status::new(504, "Timeout", format!("Timeout: Too large resource version: {version}, current: {now}"))
    }
}

/// Error of a relay whose first list is not complete.
pub(crate) fn not_synced(kind: Kind) -> Status {
    let message = format!("the relay has not listed {} yet", kind.plural());
    Status { retry_after_seconds: 1, ..Status::new(503, "ServiceUnavailable", message) }
}
