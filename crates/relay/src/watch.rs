//! Watch of one client: initial events, events, bookmarks and its end, as bytes.

use std::{
    sync::Arc,
    task::{Poll, Waker},
};

use bytes::Bytes;

use crate::{
    collection::{Added, Collection, HistoryPosition, Part, Snapshot, WatchCursor, WatchStart},
    event::encode,
    filter::Filter,
    objects::Cursor,
    wire::{Change, Format, Status, bookmark},
};

/// Bytes of initial events that are encoded at once.
const INITIAL_BYTES: usize = 16 << 10;
/// Objects that are looked at once.
const INITIAL_OBJECTS_MAX: usize = 512;

/// Options of a watch.
#[derive(Clone, Default)]
pub struct WatchOptions {
    /// Objects that the client sees.
    pub filter: Filter,
    /// The client wants bookmarks.
    pub wants_bookmarks: bool,
}

/// Watch of one client. It holds a position in the history and no events.
pub struct Watch {
    collection: Arc<Collection>,
    options: WatchOptions,
    /// It skips events that are not about its topics.
    is_by_topic: bool,
    format: Format,
    slot: usize,
    position: Option<HistoryPosition>,
    /// Version up to which the client has everything.
    version: u64,
    confirmations: u64,
    initial: Option<Initial>,
    is_over: bool,
}

/// Initial events that are still to be sent.
struct Initial {
    snapshot: Snapshot,
    next: Cursor,
    sends_end: bool,
}

impl Watch {
    /// Starts a watch.
    #[must_use]
    pub fn new(collection: Arc<Collection>, options: WatchOptions, format: Format, start: WatchStart) -> Self {
        let topics = options.filter.topics();
        let is_by_topic = topics.is_some();
        let Added { slot, position, confirmations } = collection.add_watcher(topics, &start);
        // A client that resumes learns at once that its version is one that the relay knows, also while the API server
        // confirms nothing: it doubts a watch that shows nothing.
        let confirmations = match start {
            WatchStart::After(_) => confirmations.wrapping_sub(1),
            WatchStart::Initial { .. } => confirmations,
        };
        let (version, initial) = match start {
            WatchStart::After(version) => (version, None),
            WatchStart::Initial { snapshot, sends_end } => {
                (snapshot.version, Some(Initial { snapshot, next: Cursor::default(), sends_end }))
            }
        };
        let is_over = false;
        Self { collection, options, is_by_topic, format, slot, position, version, confirmations, initial, is_over }
    }

    /// Version up to which the client has everything.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// True while it holds the objects that come first.
    #[must_use]
    pub fn holds_objects(&self) -> bool {
        self.initial.is_some()
    }

    /// The next bytes; `None` at the end. If there are none yet, [`Collection::wake_due`] calls
    /// the waker once there are.
    pub fn poll_next(&mut self, waker: &Waker) -> Poll<Option<Bytes>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        if self.initial.is_some() {
            match self.next_initial() {
                Some(bytes) if !bytes.is_empty() => return Poll::Ready(Some(bytes)),
                Some(_) if self.initial.is_some() => return let_others_go_first(waker),
                Some(_) => {}
                // Too much has changed meanwhile.
                None => {
                    self.initial = None;
                    return Poll::Ready(self.expire());
                }
            }
        }
        match self.next_part(waker) {
            Part::Waiting => Poll::Pending,
            Part::Expired => {
                self.is_over = true;
                Poll::Ready(Some(expired(self.version).event(self.format)))
            }
            Part::Events(bytes, position, version) => {
                (self.position, self.version) = (Some(position), version.max(self.version));
                if bytes.is_empty() { let_others_go_first(waker) } else { Poll::Ready(Some(bytes)) }
            }
            Part::Confirmed(version, confirmations) => {
                (self.version, self.confirmations) = (version.max(self.version), confirmations);
                Poll::Ready(Some(self.bookmark(false)))
            }
        }
    }

    fn next_part(&self, waker: &Waker) -> Part {
        let Some(position) = self.position else { return Part::Expired };
        let confirmations = self.options.wants_bookmarks.then_some(self.confirmations);
        let watch = WatchCursor {
            slot: self.slot,
            position,
            filter: &self.options.filter,
            is_by_topic: self.is_by_topic,
            format: self.format,
            confirmations,
        };
        self.collection.next(&watch, waker)
    }

    /// Whether the client can go on from where it is with another watch. Between the changes that are known from a list
    /// only it cannot: more events come at once.
    #[must_use]
    pub fn can_end(&self) -> bool {
        // A watch of some topics skips events, and its version stays behind.
        self.initial.is_some() || self.position.is_none() || self.is_by_topic || self.collection.knows(self.version)
    }

    /// Ends the watch in an orderly way. Returns a last bookmark, from which the client resumes.
    pub fn end(&mut self) -> Option<Bytes> {
        let is_open = !std::mem::replace(&mut self.is_over, true);
        let is_complete = self.initial.is_none() && self.position.is_some();
        (is_open && is_complete && self.options.wants_bookmarks).then(|| self.bookmark(false))
    }

    /// Ends the watch with an error after which the client lists anew.
    pub fn expire(&mut self) -> Option<Bytes> {
        let is_open = !std::mem::replace(&mut self.is_over, true);
        is_open.then(|| expired(self.version).event(self.format))
    }

    fn bookmark(&self, ends_initial_events: bool) -> Bytes {
        bookmark(self.format, self.collection.kind(), self.version, ends_initial_events)
    }

    /// The next initial events; empty if the client sees none of the objects that were looked at, `None` if they are
    /// gone.
    fn next_initial(&mut self) -> Option<Bytes> {
        let Some(initial) = self.initial.as_mut() else { return Some(Bytes::new()) };
        let objects = initial.snapshot.objects()?;
        let (mut bytes, mut considered) = (Vec::new(), 0);
        while bytes.len() < INITIAL_BYTES && considered < INITIAL_OBJECTS_MAX {
            let Some(object) = objects.next(&mut initial.next) else {
                let sends_end = initial.sends_end;
                self.initial = None;
                if sends_end {
                    bytes.extend_from_slice(&self.bookmark(true));
                }
                break;
            };
            considered += 1;
            if self.options.filter.has(object) {
                bytes.extend_from_slice(&encode(Change::Added, object, self.format));
            }
        }
        Some(bytes.into())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.collection.remove_watcher(self.slot);
    }
}

/// Comes back after other clients.
fn let_others_go_first(waker: &Waker) -> Poll<Option<Bytes>> {
    waker.wake_by_ref();
    Poll::Pending
}

/// Error of a watch whose version the history no longer has (apiserver/pkg/storage/cacher/watch_cache.go 1.36).
pub(crate) fn expired(version: u64) -> Status {
    Status::new(410, "Expired", format!("too old resource version: {version}"))
}
