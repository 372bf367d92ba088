//! Event of the history, encoded once for all clients.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use bytes::Bytes;

use crate::{
    json::object_json,
    object::{Meta, Object},
    wire::{Change, Format, event_frame, event_line},
};

/// Bytes after the object in a frame: the end of its envelope.
const FRAME_TAIL_BYTES: usize = 4;

/// Change of an object.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) change: Change,
    /// Version of the change. The object of a deletion has it, too.
    pub(crate) version: u64,
    pub(crate) object: Arc<Object>,
    /// The object before the change.
    pub(crate) previous: Option<Meta>,
    pub(crate) at: Instant,
    frame: Bytes,
    line: OnceLock<Bytes>,
    /// A later event has a newer state of the object.
    is_superseded: AtomicBool,
}

impl Event {
    /// An event, whose object shares the memory of its frame.
    pub(crate) fn new(change: Change, mut object: Object, previous: Option<Meta>, at: Instant) -> Self {
        let frame = event_frame(change, object.kind, &object.protobuf);
        let end = frame.len().saturating_sub(FRAME_TAIL_BYTES);
        object.protobuf = frame.slice(end.saturating_sub(object.protobuf.len())..end);
        Self {
            change,
            version: object.meta.version,
            object: Arc::new(object),
            previous,
            at,
            frame,
            line: OnceLock::new(),
            is_superseded: AtomicBool::new(false),
        }
    }

    /// Bytes that the event takes, roughly. Its JSON counts as much as its protobuf, although few clients need it.
    pub(crate) fn size_bytes(&self) -> usize {
        self.object.size_bytes() + self.frame.len() + size_of::<Self>()
    }

    /// The event as it is sent. Empty if the object has no JSON.
    pub(crate) fn encoded(&self, format: Format) -> Bytes {
        match format {
            Format::Protobuf => self.frame.clone(),
            Format::Json => self.line.get_or_init(|| encode(self.change, &self.object, format)).clone(),
        }
    }

    /// The event as another type of change, for a client that sees an object appear or vanish.
    pub(crate) fn encoded_as(&self, change: Change, format: Format) -> Bytes {
        if change == self.change { self.encoded(format) } else { encode(change, &self.object, format) }
    }

    pub(crate) fn supersede(&self) {
        self.is_superseded.store(true, Ordering::Relaxed);
    }

    /// Whether a client that has the later event needs this one, too. Only a change can be left out: without the
    /// addition or deletion of an object, its client would see a change of an object that it does not know.
    pub(crate) fn can_be_left_out(&self) -> bool {
        self.change == Change::Modified && self.is_superseded.load(Ordering::Relaxed)
    }
}

/// An object as an event.
pub(crate) fn encode(change: Change, object: &Object, format: Format) -> Bytes {
    match format {
        Format::Protobuf => event_frame(change, object.kind, &object.protobuf),
        Format::Json => object_json(object, true).map_or_else(Bytes::new, |json| event_line(change, &json)),
    }
}
