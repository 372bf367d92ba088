//! Objects of one kind, the history of their changes, and the clients that wait for the next one.
//!
//! The API server's versions order the history. A new list of the API server becomes the events that lead to it, so
//! that clients go on where they are. If its data has gone back to an earlier state, versions mean nothing any more:
//! the history is given up, and clients list anew.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use bytes::Bytes;

use crate::{
    event::Event,
    filter::Filter,
    kind::Kind,
    object::{Meta, Object, with_version},
    objects::{Entry, Objects},
    watchers::{Topics, Watchers},
    wire::{Change, Format},
};

/// Bytes of events that are sent at once, at least one event. It bounds what a client that does not read keeps alive.
const BATCH_BYTES: usize = 16 << 10;

/// Events that are looked at at once for a client that does not see all.
const CONSIDERED_MAX: usize = 1024;

/// Lists after which watches can be resumed from before and after the list, but not from between.
const GAPS_MAX: usize = 64;

/// Bytes of a namespace's events below which nothing is gained by compacting them.
const COMPACTED_MIN: usize = 64 << 10;

/// Batches that clients at the same position share.
const BATCHES_KEPT: usize = 4;

/// Changes that a list that is under way may miss: bytes of the events, and of what snapshots do not share. It bounds
/// what all clients together keep alive that read slowly.
const LAG_BYTES_MAX: usize = 16 << 20;

/// Bytes of one chunk of objects, which a change copies, about.
const CHUNK_BYTES: usize = 4 << 10;

/// Namespace and name of an object.
type Key = (Box<str>, Box<str>);

fn key_of(meta: &Meta) -> Key {
    (meta.namespace.clone(), meta.name.clone())
}

/// Input of a collection.
#[derive(Debug)]
pub enum Update {
    /// A list begins.
    ListStarted,
    /// Object of the list.
    Listed(Object),
    /// Object of the list that cannot be read: its last state stays. The first list is not complete without one.
    ListedUnreadable(Box<str>, Box<str>),
    /// The list is complete, at this version.
    ListDone(u64),
    /// Object that was added or changed.
    Applied(Object),
    /// Object that was deleted, with the version of its deletion.
    Deleted(Object),
    /// Object that was deleted and cannot be read: namespace, name, and version of the deletion.
    DeletedUnreadable(Box<str>, Box<str>, u64),
    /// All changes up to this version have been sent.
    Bookmark(u64),
}

/// Effect of an update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Number of events that were added to the history.
    pub events: usize,
    /// The history was given up: the API server's data has gone back.
    pub is_reset: bool,
}

/// Objects of one kind at a version.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Kind of the objects.
    pub kind: Kind,
    /// Version.
    pub version: u64,
    /// Number of times that the history was given up before.
    pub epoch: u64,
    /// Sequence number of the first later event.
    pub(crate) next_sequence: u64,
    held: Arc<Held>,
}

/// Objects of a snapshot, as long as not too much has changed since.
#[derive(Debug, Default)]
struct Held(Mutex<Option<Arc<Objects>>>);

impl Held {
    fn lock(&self) -> MutexGuard<'_, Option<Arc<Objects>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Snapshot {
    /// Its position in the history alone.
    #[must_use]
    pub fn without_objects(self) -> Self {
        Self { held: Arc::default(), ..self }
    }

    /// The objects; `None` once too much has changed since.
    pub(crate) fn objects(&self) -> Option<Arc<Objects>> {
        self.held.lock().clone()
    }
}

/// Start of a watch.
pub enum WatchStart {
    /// After the changes up to this version.
    After(u64),
    /// With an ADDED event for each object, and a bookmark after them if `sends_end`.
    Initial {
        /// The objects.
        snapshot: Snapshot,
        /// The client asked for a bookmark that ends the initial events.
        sends_end: bool,
    },
}

/// State of a collection in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// All changes up to this version are known.
    pub version: u64,
    /// Oldest version from which a watch can be resumed.
    pub oldest_version: u64,
    /// Number of times that the history was given up.
    pub epoch: u64,
    /// Number of objects.
    pub objects: usize,
    /// Number of events in the history.
    pub events: usize,
    /// Bytes of the history.
    pub history_bytes: usize,
    /// Number of clients that watch.
    pub watchers: usize,
}

/// Position of a watch in the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HistoryPosition {
    pub(crate) sequence: u64,
    pub(crate) epoch: u64,
}

/// Objects of one kind, with their history.
#[derive(Debug)]
pub struct Collection {
    kind: Kind,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// A list has ended.
    is_listed: bool,
    /// Objects of the list that cannot be read and have no last state, until each is read or deleted. The list is not
    /// complete before: a client that comes from another server with it would lose them.
    unread: BTreeSet<Key>,
    objects: Objects,
    /// Objects of the list that is under way.
    listing: Option<Vec<Listed>>,
    history: VecDeque<Arc<Event>>,
    history_bytes: usize,
    /// Bytes of the history by namespace.
    namespace_bytes: HashMap<Box<str>, NamespaceBytes>,
    /// Bytes of all events so far, and of what snapshots do not share.
    pushed_bytes: usize,
    /// Snapshots that clients may still read, and `pushed_bytes` at the time of each.
    snapshots: VecDeque<(usize, Weak<Held>)>,
    /// Sequence number of the first event of the history.
    first_sequence: u64,
    oldest_version: u64,
    /// Versions before and after the changes that are known from a list only.
    gaps: VecDeque<(u64, u64)>,
    /// All changes up to this version are known.
    version: u64,
    /// Number of times that the API server has confirmed the version without a change.
    confirmations: u64,
    epoch: u64,
    watchers: Watchers,
    batches: VecDeque<Batch>,
    snapshot: Option<Snapshot>,
}

/// Bytes of one namespace's events.
#[derive(Debug, Default)]
struct NamespaceBytes {
    bytes: usize,
    /// Bytes that were left when they were compacted last.
    compacted: usize,
}

#[derive(Debug)]
enum Listed {
    Object(Object),
    Unreadable(Key),
}

/// Events that clients at one position get, encoded.
#[derive(Clone, Debug)]
struct Batch {
    format: Format,
    from: u64,
    to: u64,
    bytes: Bytes,
}

/// Part of a watch.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Events. All up to a new position and version were considered; empty if none is for the client.
    Events(Bytes, HistoryPosition, u64),
    /// There are no events. The API server has confirmed this version since.
    Confirmed(u64, u64),
    /// There are no events, and the client waits.
    Waiting,
    /// The position is no longer in the history.
    Expired,
}

impl Collection {
    /// An empty collection.
    #[must_use]
    pub fn new(kind: Kind) -> Self {
        Self { kind, state: Mutex::default() }
    }

    /// Kind of its objects.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies an update at a time. Clients that wait do not learn of it before [`Self::wake_due`].
    pub fn apply(&self, update: Update, now: Instant) -> Outcome {
        self.state().apply(update, now)
    }

    /// The state in numbers; `None` before the first list is complete.
    #[must_use]
    pub fn summary(&self) -> Option<Summary> {
        let state = self.state();
        state.is_synced().then(|| state.summary())
    }

    /// Number of objects for lack of which the first list is not complete, and one of them as `NAMESPACE/NAME`; `None`
    /// without any.
    #[must_use]
    pub fn unread(&self) -> Option<(usize, String)> {
        let state = self.state();
        let first = state.unread.first()?;
        Some((state.unread.len(), format!("{}/{}", first.0, first.1).trim_start_matches('/').to_owned()))
    }

    /// The present objects; `None` before the first list is complete.
    #[must_use]
    pub fn snapshot(&self) -> Option<Snapshot> {
        let mut state = self.state();
        state.is_synced().then(|| state.snapshot(self.kind))
    }

    /// An object.
    #[must_use]
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<Object>> {
        self.state().objects.get(namespace, name).map(|entry| entry.object.clone())
    }

    /// Number of events after the snapshot; `None` if no watch can be resumed from it.
    #[must_use]
    pub fn events_since(&self, snapshot: &Snapshot) -> Option<u64> {
        let state = self.state();
        let is_there = snapshot.epoch == state.epoch
            && snapshot.next_sequence >= state.first_sequence
            // A watch from there would be refused otherwise.
            && snapshot.version >= state.oldest_version;
        is_there.then(|| state.next_sequence().saturating_sub(snapshot.next_sequence))
    }

    /// Time of the oldest event.
    #[must_use]
    pub fn oldest_event(&self) -> Option<Instant> {
        self.state().history.front().map(|event| event.at)
    }

    /// Bytes of the history.
    #[must_use]
    pub fn history_bytes(&self) -> usize {
        self.state().history_bytes
    }

    /// Namespace with most bytes in the history, of those that compacting may make smaller.
    #[must_use]
    pub fn largest_namespace(&self) -> Option<(Box<str>, usize)> {
        let state = self.state();
        let is_worth = |of: &NamespaceBytes| of.bytes > 2 * of.compacted + COMPACTED_MIN;
        let largest = state.namespace_bytes.iter().filter(|(_, of)| is_worth(of)).max_by_key(|(_, of)| of.bytes);
        largest.map(|(namespace, of)| (namespace.clone(), of.bytes))
    }

    /// Makes the events of a namespace smaller: of those that a later one about the same object follows, only what a
    /// client has to know stays.
    pub fn compact(&self, namespace: &str) {
        self.state().compact(namespace);
    }

    /// Forgets the oldest event.
    pub fn forget_oldest(&self) {
        self.state().forget_oldest();
    }

    /// Forgets events that are older than this.
    pub fn forget_older_than(&self, age: Duration, now: Instant) {
        let mut state = self.state();
        while state.history.front().is_some_and(|event| now.saturating_duration_since(event.at) > age) {
            state.forget_oldest();
        }
    }

    /// Adds a client that waits for events about some topics.
    pub(crate) fn add_watcher(&self, topics: Topics, start: &WatchStart) -> Added {
        let mut state = self.state();
        let is_by_topic = topics.is_some();
        let slot = state.watchers.add(topics);
        let position = match start {
            WatchStart::After(version) => state.position_after(*version),
            WatchStart::Initial { snapshot, .. } => {
                Some(HistoryPosition { sequence: snapshot.next_sequence, epoch: snapshot.epoch })
            }
        };
        if let Some(position) = position.filter(|position| is_by_topic && position.sequence < state.next_sequence()) {
            // Any of the events before it came may be about its topics.
            state.watchers.set_first_event(slot, position.sequence);
        }
        Added { slot, position, confirmations: state.confirmations }
    }

    /// Whether a watch can be resumed from a version.
    pub(crate) fn knows(&self, version: u64) -> bool {
        self.state().position_after(version).is_some()
    }

    /// Events that a watch looks at which is resumed from a version; 0 if it cannot be.
    #[must_use]
    pub fn events_after(&self, version: u64) -> usize {
        let state = self.state();
        let events = state.position_after(version).map_or(0, |position| state.next_sequence() - position.sequence);
        usize::try_from(events).unwrap_or(usize::MAX)
    }

    pub(crate) fn remove_watcher(&self, slot: usize) {
        self.state().watchers.remove(slot);
    }

    /// The next part of a watch. If there is none, [`Self::wake_due`] calls its waker once there is.
    pub(crate) fn next(&self, watch: &WatchCursor<'_>, waker: &std::task::Waker) -> Part {
        self.state().next(watch, waker)
    }

    /// Wakes the clients that the updates since the last call concern. It is fast on the thread that polls their
    /// watches; on another one each would take a system call.
    pub fn wake_due(&self) {
        self.state().watchers.wake_due();
    }
}

/// Client that was added.
pub(crate) struct Added {
    pub(crate) slot: usize,
    /// Its position; `None` if the history lacks later events.
    pub(crate) position: Option<HistoryPosition>,
    /// Confirmations so far.
    pub(crate) confirmations: u64,
}

/// Position and interests of a watch.
pub(crate) struct WatchCursor<'a> {
    pub(crate) slot: usize,
    pub(crate) position: HistoryPosition,
    pub(crate) filter: &'a Filter,
    pub(crate) is_by_topic: bool,
    pub(crate) format: Format,
    /// Confirmations that the client knows of; `None` if it wants none.
    pub(crate) confirmations: Option<u64>,
}

impl State {
    fn next_sequence(&self) -> u64 {
        self.first_sequence + self.history.len() as u64
    }

    /// A list was complete.
    fn is_synced(&self) -> bool {
        self.is_listed && self.unread.is_empty()
    }

    fn summary(&self) -> Summary {
        Summary {
            version: self.version,
            oldest_version: self.oldest_version,
            epoch: self.epoch,
            objects: self.objects.len(),
            events: self.history.len(),
            history_bytes: self.history_bytes,
            watchers: self.watchers.len(),
        }
    }

    fn snapshot(&mut self, kind: Kind) -> Snapshot {
        if let Some(snapshot) = &self.snapshot {
            return Snapshot { version: self.version, ..snapshot.clone() };
        }
        let held = Arc::new(Held(Mutex::new(Some(Arc::new(self.objects.clone())))));
        self.pushed_bytes += self.objects.clone_bytes() + CHUNK_BYTES;
        self.snapshots.push_back((self.pushed_bytes, Arc::downgrade(&held)));
        let (version, epoch, next_sequence) = (self.version, self.epoch, self.next_sequence());
        self.snapshot.insert(Snapshot { kind, version, epoch, next_sequence, held }).clone()
    }

    fn apply(&mut self, update: Update, now: Instant) -> Outcome {
        match &update {
            Update::Applied(object) | Update::Deleted(object) => drop(self.unread.remove(&key_of(&object.meta))),
            Update::DeletedUnreadable(namespace, name, _) => {
                self.unread.remove(&(namespace.clone(), name.clone()));
            }
            _ => {}
        }
        match update {
            Update::ListStarted => self.listing = Some(Vec::new()),
            Update::Listed(object) => self.listing.get_or_insert_default().push(Listed::Object(object)),
            Update::ListedUnreadable(namespace, name) => {
                self.listing.get_or_insert_default().push(Listed::Unreadable((namespace, name)));
            }
            Update::ListDone(version) => return self.end_list(version, now),
            Update::Applied(object) => return self.apply_change(object, false, now),
            Update::Deleted(object) => return self.apply_change(object, true, now),
            Update::DeletedUnreadable(namespace, name, version) => {
                if let Some(entry) = self.objects.get(&namespace, &name) {
                    return self.apply_change(with_version(&entry.object, version), true, now);
                }
                self.confirm(version);
            }
            Update::Bookmark(version) => self.confirm(version),
        }
        Outcome::default()
    }

    /// Records that all changes up to a version are known.
    fn confirm(&mut self, version: u64) {
        self.version = self.version.max(version);
        self.confirmations += 1;
        self.watchers.record_for_all();
    }

    fn apply_change(&mut self, object: Object, is_deletion: bool, now: Instant) -> Outcome {
        let version = object.meta.version;
        if version <= self.version {
            // A change from before what is known contradicts the order of versions.
            self.reset(version);
            self.replace(object, is_deletion);
            return Outcome { events: 0, is_reset: true };
        }
        let events = usize::from(self.add_event(object, is_deletion, None, now));
        self.version = version;
        Outcome { events, is_reset: false }
    }

    /// Position after the changes up to a version; `None` if the history lacks later ones. A version after which the
    /// data has gone back, or between two whose difference is known from a list only, means nothing here.
    fn position_after(&self, version: u64) -> Option<HistoryPosition> {
        let is_between = |(from, to): &(u64, u64)| *from < version && version < *to;
        if version < self.oldest_version || version > self.version || self.gaps.iter().any(is_between) {
            return None;
        }
        let index = self.history.partition_point(|event| event.known_from <= version);
        Some(HistoryPosition { sequence: self.first_sequence + index as u64, epoch: self.epoch })
    }

    /// Replaces or removes an object without an event.
    fn replace(&mut self, object: Object, is_deletion: bool) {
        if is_deletion {
            self.objects.remove(&object.meta.namespace, &object.meta.name);
        } else {
            self.objects.insert(Entry { object: Arc::new(object), sequence: None });
        }
    }

    /// Adds the event of a change. `listed`: version of the list from which alone it is known. Returns false if there
    /// is nothing to tell: an object is deleted that is not known.
    fn add_event(&mut self, object: Object, is_deletion: bool, listed: Option<u64>, now: Instant) -> bool {
        self.snapshot = None;
        let previous = self.objects.get(&object.meta.namespace, &object.meta.name).cloned();
        let change = match (&previous, is_deletion) {
            (None, true) => return false,
            (Some(_), true) => Change::Deleted,
            (None, false) => Change::Added,
            (Some(_), false) => Change::Modified,
        };
        if let Some(sequence) = previous.as_ref().and_then(|entry| entry.sequence) {
            self.supersede(sequence);
        }
        let event = Event::new(change, object, previous.map(|entry| entry.object), listed, now);
        if is_deletion {
            self.objects.remove(&event.object.meta.namespace, &event.object.meta.name);
        } else {
            let sequence = Some(self.next_sequence());
            self.objects.insert(Entry { object: event.object.clone(), sequence });
        }
        self.push(event);
        true
    }

    /// Records that a later event has a newer state of an event's object.
    fn supersede(&mut self, sequence: u64) {
        let index = sequence.checked_sub(self.first_sequence).and_then(|index| usize::try_from(index).ok());
        if let Some(index) = index
            && let Some(event) = self.history.get(index)
        {
            self.replace_event(index, event.superseded());
        }
    }

    fn replace_event(&mut self, index: usize, event: Event) {
        let Some(stored) = self.history.get_mut(index) else { return };
        let before = mem::replace(stored, Arc::new(event)).size_bytes();
        let (after, namespace) = (stored.size_bytes(), stored.object.meta.namespace.clone());
        self.count_bytes(&namespace, after, before);
    }

    /// Adds bytes of a namespace's events and takes others off.
    fn count_bytes(&mut self, namespace: &str, more: usize, less: usize) {
        self.history_bytes = (self.history_bytes + more).saturating_sub(less);
        if !self.namespace_bytes.contains_key(namespace) {
            self.namespace_bytes.insert(namespace.into(), NamespaceBytes::default());
        }
        if let Some(of_namespace) = self.namespace_bytes.get_mut(namespace) {
            of_namespace.bytes = (of_namespace.bytes + more).saturating_sub(less);
            if of_namespace.bytes == 0 {
                self.namespace_bytes.remove(namespace);
            }
        }
    }

    fn push(&mut self, event: Event) {
        let sequence = self.next_sequence();
        self.watchers.record(event.object.topic(), sequence);
        self.pushed_bytes += event.object.size_bytes();
        self.count_bytes(&event.object.meta.namespace.clone(), event.size_bytes(), 0);
        self.history.push_back(Arc::new(event));
        self.forget_snapshots(LAG_BYTES_MAX);
    }

    /// Frees the objects of snapshots before the last changes of this many bytes: clients that still read them list
    /// anew.
    fn forget_snapshots(&mut self, lag_bytes_max: usize) {
        while let Some((at, held)) = self.snapshots.front() {
            match held.upgrade() {
                Some(held) if self.pushed_bytes - at > lag_bytes_max => *held.lock() = None,
                Some(_) => break,
                None => {}
            }
            self.snapshots.pop_front();
        }
    }

    /// See [`Collection::compact`].
    fn compact(&mut self, namespace: &str) {
        // Index of the next event about each object.
        let mut next = HashMap::<Box<str>, usize>::new();
        for index in (0..self.history.len()).rev() {
            let is_due = |event: &&Arc<Event>| *event.object.meta.namespace == *namespace && !event.is_void();
            let Some(event) = self.history.get(index).filter(is_due).cloned() else { continue };
            let later = next.insert(event.object.meta.name.clone(), index);
            let Some(compacted) = event.compacted(later.is_some()) else { continue };
            if let Some(later) = later
                && event.change == Change::Added
                && let Some(appearance) = self.history.get(later).and_then(|later| later.as_appearance())
            {
                self.replace_event(later, appearance);
            }
            self.replace_event(index, compacted);
        }
        if let Some(of_namespace) = self.namespace_bytes.get_mut(namespace) {
            of_namespace.compacted = of_namespace.bytes;
        }
    }

    fn forget_oldest(&mut self) {
        let Some(event) = self.history.pop_front() else { return };
        self.count_bytes(&event.object.meta.namespace, 0, event.size_bytes());
        self.first_sequence += 1;
        self.oldest_version = self.oldest_version.max(event.known_from);
    }

    /// Gives up the history and begins a new one at a version. Objects that are left from the old one and are newer get
    /// this version: clients take no object to be newer than the list that has it.
    fn reset(&mut self, version: u64) {
        self.objects.for_each(|entry| {
            entry.sequence = None;
            if entry.object.meta.version > version {
                entry.object = Arc::new(with_version(&entry.object, version));
            }
        });
        self.forget_snapshots(0);
        self.namespace_bytes.clear();
        self.first_sequence = self.next_sequence();
        self.history.clear();
        self.batches.clear();
        self.gaps.clear();
        (self.history_bytes, self.snapshot) = (0, None);
        (self.version, self.oldest_version) = (version, version);
        self.epoch += 1;
        self.watchers.record_for_all();
    }

    /// Replaces the objects by those of a complete list.
    fn end_list(&mut self, version: u64, now: Instant) -> Outcome {
        let listed = mem::take(&mut self.listing).unwrap_or_default();
        if self.is_synced() && version >= self.version && !self.contradicts(&listed, version) {
            let events = self.apply_list(listed, version, now);
            self.confirm(version);
            return Outcome { events, is_reset: false };
        }
        let is_reset = self.is_synced();
        self.is_listed = true;
        self.unread.clear();
        let mut kept = mem::take(&mut self.objects);
        for listed in listed {
            match listed {
                Listed::Object(object) => self.replace(object, false),
                Listed::Unreadable(key) => match kept.remove(&key.0, &key.1) {
                    Some(Entry { object, .. }) => drop(self.objects.insert(Entry { object, sequence: None })),
                    None => drop(self.unread.insert(key)),
                },
            }
        }
        self.reset(version);
        Outcome { events: 0, is_reset }
    }

    /// Whether a list has an object in a state that would be known if the API server's history were the same, or lacks
    /// one although nothing has happened.
    fn contradicts(&self, listed: &[Listed], version: u64) -> bool {
        let is_known = |listed: &Listed| match listed {
            Listed::Object(object) if object.meta.version <= self.version => {
                let known = self.objects.get(&object.meta.namespace, &object.meta.name);
                known.is_some_and(|entry| entry.object.meta.version == object.meta.version)
            }
            Listed::Object(_) | Listed::Unreadable(_) => true,
        };
        !listed.iter().all(is_known) || version == self.version && listed.len() < self.objects.len()
    }

    /// Adds the events that lead to a list. First come those that take objects away, at the version that was known
    /// before, since the versions at which it happened are not known; then changes in the order of their versions. So a
    /// client that is cut off in between has no object that is gone, wherever it resumes.
    fn apply_list(&mut self, listed: Vec<Listed>, version: u64, now: Instant) -> usize {
        let (known, events_before) = (self.version, self.next_sequence());
        let (mut changed, missing) = self.differences(listed);
        changed.sort_by_key(|object| object.meta.version);
        let version = changed.last().map_or(version, |object| object.meta.version.max(version));
        for object in missing {
            self.add_event(with_version(&object, known), true, Some(version), now);
        }
        for object in &changed {
            let previous = self.objects.get(&object.meta.namespace, &object.meta.name).map(|entry| &entry.object);
            if let Some(previous) = previous.filter(|previous| !previous.meta.is_seen_like(&object.meta)) {
                let gone = with_version(previous, known);
                self.push(Event::out_of_sight(gone, object.meta.clone(), version, now));
            }
        }
        for object in changed {
            self.add_event(object, false, Some(version), now);
        }
        self.version = version;
        self.add_gap(known, version);
        usize::try_from(self.next_sequence() - events_before).unwrap_or(usize::MAX)
    }

    /// Objects of a list that have changed, and known ones that it lacks.
    fn differences(&self, listed: Vec<Listed>) -> (Vec<Object>, Vec<Arc<Object>>) {
        let mut missing: BTreeMap<Key, Arc<Object>> =
            self.objects.iter().map(|entry| (key_of(&entry.object.meta), entry.object.clone())).collect();
        let mut changed = Vec::new();
        for listed in listed {
            match listed {
                Listed::Object(object) => {
                    missing.remove(&key_of(&object.meta));
                    if object.meta.version > self.version {
                        changed.push(object);
                    }
                }
                Listed::Unreadable(key) => drop(missing.remove(&key)),
            }
        }
        (changed, missing.into_values().collect())
    }

    /// Records versions whose difference is known from a list only. A client that comes from elsewhere with a version
    /// between them may have an object that came and went meanwhile.
    fn add_gap(&mut self, from: u64, to: u64) {
        if to - from < 2 {
            return;
        }
        self.gaps.push_back((from, to));
        let oldest_version = self.oldest_version;
        self.gaps.retain(|(_, to)| *to > oldest_version);
        if self.gaps.len() > GAPS_MAX
            && let Some((_, to)) = self.gaps.pop_front()
        {
            self.oldest_version = to;
        }
    }

    fn next(&mut self, watch: &WatchCursor<'_>, waker: &std::task::Waker) -> Part {
        if watch.position.epoch != self.epoch {
            return Part::Expired;
        }
        let (head, mut from) = (self.next_sequence(), watch.position.sequence);
        if watch.is_by_topic {
            // No event before the one that woke the client is about its topics.
            from = from.max(self.watchers.take_first_event(watch.slot).unwrap_or(head));
        }
        if from < self.first_sequence {
            return Part::Expired;
        }
        if from < head {
            let (bytes, to) = self.batch(watch, from);
            if watch.is_by_topic && to < head {
                self.watchers.set_first_event(watch.slot, to);
            }
            let version = if to == head { self.version } else { self.version_before(to) };
            return Part::Events(bytes, HistoryPosition { sequence: to, epoch: self.epoch }, version);
        }
        self.watchers.wait(watch.slot, waker);
        match watch.confirmations {
            Some(known) if known != self.confirmations => Part::Confirmed(self.version, self.confirmations),
            _ => Part::Waiting,
        }
    }

    /// Version of a client that has all events before this one.
    fn version_before(&self, sequence: u64) -> u64 {
        let index = sequence.checked_sub(self.first_sequence + 1).and_then(|index| usize::try_from(index).ok());
        index.and_then(|index| self.history.get(index)).map_or(self.oldest_version, |event| event.version)
    }

    /// Events from a position on, and the position after them.
    fn batch(&mut self, watch: &WatchCursor<'_>, from: u64) -> (Bytes, u64) {
        let is_shared = watch.filter.is_everything();
        let head = self.next_sequence();
        if is_shared {
            let is_same = |batch: &&Batch| {
                let is_full = batch.to == head || batch.bytes.len() >= BATCH_BYTES;
                batch.format == watch.format && batch.from == from && is_full
            };
            if let Some(batch) = self.batches.iter().find(is_same) {
                return (batch.bytes.clone(), batch.to);
            }
        }
        let (bytes, to) = self.encode(watch, from);
        if is_shared {
            self.batches.truncate(BATCHES_KEPT - 1);
            self.batches.push_front(Batch { format: watch.format, from, to, bytes: bytes.clone() });
        }
        (bytes, to)
    }

    fn encode(&self, watch: &WatchCursor<'_>, from: u64) -> (Bytes, u64) {
        let start = usize::try_from(from.saturating_sub(self.first_sequence)).unwrap_or(usize::MAX);
        let considered_max = if watch.filter.is_everything() { usize::MAX } else { CONSIDERED_MAX };
        let (mut bytes, mut parts, mut to) = (0, Vec::new(), from);
        for event in self.history.iter().skip(start).take(considered_max) {
            to += 1;
            let Some(change) = event.seen_through(watch.filter).filter(|change| !event.can_be_left_out(*change)) else {
                continue;
            };
            let part = event.encoded_as(change, watch.format);
            bytes += part.len();
            parts.push(part);
            if bytes >= BATCH_BYTES {
                break;
            }
        }
        match parts.as_slice() {
            [part] => (part.clone(), to),
            parts => (parts.concat().into(), to),
        }
    }
}
