//! Event of the history, encoded once for all clients.

use std::{
    sync::{Arc, OnceLock},
    time::Instant,
};

use bytes::Bytes;
use cproxy_protobuf::fields;

use crate::{
    filter::Filter,
    json::object_json,
    object::{METADATA, Meta, Object, with_version},
    wire::{Change, Format, event_frame, event_line},
};

/// Bytes after the object in a frame: the end of its envelope.
const FRAME_TAIL_BYTES: usize = 4;

/// Objects that are longer lose their state in an event that a later one follows.
const LARGE_BYTES: usize = 64 << 10;

/// Change of an object.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) change: Change,
    /// Version of the change, which the object has. An object that vanished unseen has the last version before.
    pub(crate) version: u64,
    /// First version at which a client has the event.
    pub(crate) known_from: u64,
    pub(crate) object: Arc<Object>,
    before: Before,
    pub(crate) at: Instant,
    frame: Bytes,
    /// The same in JSON, once a client has needed it, as long as no later event follows.
    line: OnceLock<Bytes>,
    /// A later event has a newer state of the object.
    is_superseded: bool,
    /// No client needs it: it has no state of the object.
    is_void: bool,
}

/// State of the object before a change, as far as clients that do not see all need it.
#[derive(Clone, Debug)]
enum Before {
    /// It was not there, or was seen by those who see it now.
    Same,
    /// Others may have seen it.
    Differs(Arc<Object>),
    /// Others may have seen it. An event before has taken it away from those that do not see it now.
    Removed(Arc<Object>),
    /// Only those that will not see this later state are concerned.
    OutOfSight(Meta),
}

impl Event {
    /// Event of a change. `listed`: version of the list from which alone the change is known.
    pub(crate) fn new(
        change: Change,
        object: Object,
        previous: Option<Arc<Object>>,
        listed: Option<u64>,
        at: Instant,
    ) -> Self {
        let before = match previous.filter(|previous| !previous.meta.is_seen_like(&object.meta)) {
            None => Before::Same,
            Some(previous) if listed.is_some() => Before::Removed(previous),
            Some(previous) => Before::Differs(previous),
        };
        Self::with(change, object, before, listed, at)
    }

    /// Event that takes an object away from those that do not see its later state. Their next event is the change.
    pub(crate) fn out_of_sight(object: Object, later: Meta, listed: u64, at: Instant) -> Self {
        Self::with(Change::Deleted, object, Before::OutOfSight(later), Some(listed), at)
    }

    /// The object shares the memory of its frame.
    fn with(change: Change, mut object: Object, before: Before, listed: Option<u64>, at: Instant) -> Self {
        let frame = event_frame(change, object.kind, &object.protobuf);
        let end = frame.len().saturating_sub(FRAME_TAIL_BYTES);
        object.protobuf = frame.slice(end.saturating_sub(object.protobuf.len())..end);
        Self {
            change,
            version: object.meta.version,
            known_from: listed.unwrap_or(object.meta.version),
            object: Arc::new(object),
            before,
            at,
            frame,
            line: OnceLock::new(),
            is_superseded: false,
            is_void: false,
        }
    }

    /// Bytes that the event takes, roughly, without those of a state that the collection has anyway.
    pub(crate) fn size_bytes(&self) -> usize {
        let before = match &self.before {
            Before::Same => 0,
            Before::Differs(object) | Before::Removed(object) => object.size_bytes(),
            Before::OutOfSight(meta) => meta.size_bytes(),
        };
        let is_present = self.change != Change::Deleted && !self.is_superseded;
        // Its state is the cache's, names and labels included.
        let state = if is_present { 0 } else { self.frame.len() + self.object.meta.size_bytes() };
        state + before + size_of::<Self>()
    }

    /// Type of the event for a client that may see only some objects; `None` if it does not concern the client
    /// (apiserver/pkg/storage/cacher/cache_watcher.go 1.36).
    pub(crate) fn seen_through(&self, filter: &Filter) -> Option<Change> {
        let is_there = self.change != Change::Deleted;
        let (was_visible, is_visible) = match &self.before {
            Before::Same => {
                let is_visible = filter.has(&self.object);
                (is_visible && self.change != Change::Added, is_visible && is_there)
            }
            Before::Differs(previous) => (filter.has(previous), is_there && filter.has(&self.object)),
            Before::Removed(previous) => {
                let is_visible = is_there && filter.has(&self.object);
                (is_visible && filter.has(previous), is_visible)
            }
            Before::OutOfSight(later) => (filter.has(&self.object) && !filter.has_meta(self.object.kind, later), false),
        };
        match (was_visible, is_visible) {
            (true, true) => Some(Change::Modified),
            (false, true) => Some(Change::Added),
            (true, false) => Some(Change::Deleted),
            (false, false) => None,
        }
    }

    /// The event as it is sent. Empty if the object has no JSON.
    fn encoded(&self, format: Format) -> Bytes {
        match format {
            Format::Protobuf => self.frame.clone(),
            // Of an event that a later one follows, few clients need it.
            Format::Json if self.is_superseded => encode(self.change, &self.object, format),
            Format::Json => self.line.get_or_init(|| encode(self.change, &self.object, format)).clone(),
        }
    }

    /// The event as another type of change, for a client that sees an object appear or vanish. The state in which it
    /// vanishes is the last one that the client saw.
    pub(crate) fn encoded_as(&self, change: Change, format: Format) -> Bytes {
        match &self.before {
            _ if change == self.change => self.encoded(format),
            Before::Differs(previous) if change == Change::Deleted => {
                encode(change, &with_version(previous, self.version), format)
            }
            _ => encode(change, &self.object, format),
        }
    }

    /// The event once a later one has a newer state of the object. A mere change is void then.
    pub(crate) fn superseded(&self) -> Self {
        let superseded = Self { is_superseded: true, line: OnceLock::new(), ..self.clone() };
        let is_void = self.change == Change::Modified && matches!(self.before, Before::Same);
        if is_void { superseded.voided() } else { superseded }
    }

    /// The event without what most clients can do without; `None` if it stays as it is. `is_followed`: a later event is
    /// about the same object.
    ///
    /// An object that appears and then changes appears later ([`Self::as_appearance`]), one that appears and vanishes
    /// does not appear, and an object vanishes with its metadata alone. Clients that were in between get an addition or
    /// a deletion twice.
    pub(crate) fn compacted(&self, is_followed: bool) -> Option<Self> {
        let stub = |object: &Arc<Object>| Arc::new(stub(object));
        match (self.change, &self.before) {
            (Change::Added, Before::Same) if is_followed => Some(self.clone().voided()),
            (Change::Deleted, Before::Same | Before::OutOfSight(_)) => {
                Some(self.clone().with_object(stub(&self.object)))
            }
            (_, Before::Differs(previous)) => {
                Some(Self { before: Before::Differs(stub(previous)), ..self.clone() }.reduced(is_followed))
            }
            (_, Before::Removed(previous)) => {
                Some(Self { before: Before::Removed(stub(previous)), ..self.clone() }.reduced(is_followed))
            }
            _ => None,
        }
    }

    /// The event of a change as that of an addition; `None` if it is none that all clients see.
    pub(crate) fn as_appearance(&self) -> Option<Self> {
        let is_change = self.change == Change::Modified && matches!(self.before, Before::Same);
        is_change.then(|| {
            let appearance = Self { change: Change::Added, ..self.clone() };
            let object = appearance.object.clone();
            appearance.with_object(object)
        })
    }

    pub(crate) fn is_void(&self) -> bool {
        self.is_void
    }

    fn reduced(self, is_followed: bool) -> Self {
        // To clients that did not see it before, the object appears: one of ordinary size stays whole.
        let is_large = self.object.protobuf.len() > LARGE_BYTES;
        let object = Arc::new(stub(&self.object));
        if is_followed && is_large { self.with_object(object) } else { self }
    }

    fn voided(self) -> Self {
        let Meta { namespace, name, version, .. } = self.object.meta.clone();
        let meta = Meta { namespace, name, version, ..Meta::default() };
        let object = Object { kind: self.object.kind, meta, protobuf: Bytes::new() };
        Self { object: Arc::new(object), frame: Bytes::new(), line: OnceLock::new(), is_void: true, ..self }
    }

    fn with_object(self, object: Arc<Object>) -> Self {
        let frame = event_frame(self.change, object.kind, &object.protobuf);
        Self { object, frame, line: OnceLock::new(), ..self }
    }

    /// Whether a client to which the event is this type of change can do without it, since it gets the later event.
    /// Only a change can be left out: without an addition or deletion, the client would not know which objects there
    /// are.
    pub(crate) fn can_be_left_out(&self, change: Change) -> bool {
        self.is_void || change == Change::Modified && self.is_superseded
    }
}

/// Names and version of an object in JSON.
fn names_json(object: &Object) -> Vec<u8> {
    let Meta { namespace, name, version, .. } = &object.meta;
    let metadata = serde_json::json!({"name": name, "namespace": namespace, "resourceVersion": version.to_string()});
    let kind = object.kind.singular();
    let json = serde_json::json!({"kind": kind, "apiVersion": object.kind.api_version(), "metadata": metadata});
    json.to_string().into_bytes()
}

/// An object with its metadata alone.
fn stub(object: &Object) -> Object {
    let mut protobuf = Vec::new();
    for field in fields(&object.protobuf).filter_map(Result::ok).filter(|field| field.number == METADATA) {
        protobuf.extend_from_slice(field.encoded);
    }
    Object { protobuf: protobuf.into(), ..object.clone() }
}

/// An object as an event.
pub(crate) fn encode(change: Change, object: &Object, format: Format) -> Bytes {
    match format {
        Format::Protobuf => event_frame(change, object.kind, &object.protobuf),
        // One that cannot be read is named: a deletion must reach each client.
        Format::Json => event_line(change, &object_json(object, true).unwrap_or_else(|| names_json(object))),
    }
}
