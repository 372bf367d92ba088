//! List as bytes, encoded as it is read.

use bytes::Bytes;

use crate::{
    collection::Snapshot,
    filter::Filter,
    json::object_json,
    object::{Object, item_bytes, push_item},
    objects::{Cursor, Objects},
    wire::{Format, list_head, list_tail},
};

/// Bytes that are encoded at once.
const CHUNK_BYTES: usize = 16 << 10;
/// Objects that are looked at once.
const CHUNK_OBJECTS_MAX: usize = 512;

/// List of the objects of a snapshot that a client sees. It shares the snapshot and holds no bytes of its own. A chunk
/// is empty if the client sees none of many objects.
pub struct List {
    snapshot: Snapshot,
    filter: Filter,
    format: Format,
    /// Next object to be encoded; `None` before the head.
    next: Option<Cursor>,
    has_items: bool,
    is_over: bool,
    is_cut: bool,
}

impl List {
    /// A list of the objects that `filter` has.
    #[must_use]
    pub fn new(snapshot: Snapshot, filter: Filter, format: Format) -> Self {
        Self { snapshot, filter, format, next: None, has_items: false, is_over: false, is_cut: false }
    }

    /// Whether it has ended before all was encoded: too much has changed since.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    fn head(&self, objects: &Objects) -> Vec<u8> {
        let items_bytes = match self.format {
            Format::Protobuf => {
                let objects = objects.iter().map(|entry| &entry.object).filter(|object| self.filter.has(object));
                objects.map(|object| item_bytes(&object.protobuf)).sum()
            }
            Format::Json => 0,
        };
        list_head(self.format, self.snapshot.kind, self.snapshot.version, items_bytes)
    }

    fn push(&mut self, chunk: &mut Vec<u8>, object: &Object) {
        if !self.filter.has(object) {
            return;
        }
        match self.format {
            Format::Protobuf => push_item(chunk, &object.protobuf),
            Format::Json => {
                let Some(json) = object_json(object, false) else { return };
                if std::mem::replace(&mut self.has_items, true) {
                    chunk.push(b',');
                }
                chunk.extend_from_slice(&json);
            }
        }
    }
}

impl Iterator for List {
    type Item = Bytes;

    fn next(&mut self) -> Option<Bytes> {
        if self.is_over {
            return None;
        }
        let Some(objects) = self.snapshot.objects() else {
            (self.is_over, self.is_cut) = (true, true);
            return None;
        };
        let mut chunk = if self.next.is_none() { self.head(&objects) } else { Vec::new() };
        let (mut next, mut considered) = (self.next.unwrap_or_default(), 0);
        while chunk.len() < CHUNK_BYTES && considered < CHUNK_OBJECTS_MAX {
            let Some(object) = objects.next(&mut next) else {
                chunk.extend_from_slice(list_tail(self.format));
                self.is_over = true;
                break;
            };
            self.push(&mut chunk, object);
            considered += 1;
        }
        self.next = Some(next);
        Some(chunk.into())
    }
}
