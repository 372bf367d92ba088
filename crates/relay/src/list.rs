//! List as bytes, encoded as it is read.

use bytes::Bytes;

use crate::{
    collection::Snapshot,
    filter::Filter,
    json::object_json,
    wire::{Format, list_head, list_tail, protobuf_item_bytes, push_protobuf_item},
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
    /// Number of objects of the snapshot that are encoded; `None` before the head.
    encoded: Option<usize>,
    has_items: bool,
    is_over: bool,
}

impl List {
    /// A list of the objects that `filter` has.
    #[must_use]
    pub fn new(snapshot: Snapshot, filter: Filter, format: Format) -> Self {
        Self { snapshot, filter, format, encoded: None, has_items: false, is_over: false }
    }

    fn head(&self) -> Vec<u8> {
        let items_bytes = match self.format {
            Format::Protobuf => {
                let objects = self.snapshot.objects.iter().filter(|object| self.filter.has(object));
                objects.map(|object| protobuf_item_bytes(&object.protobuf)).sum()
            }
            Format::Json => 0,
        };
        list_head(self.format, self.snapshot.kind, self.snapshot.version, items_bytes)
    }

    fn push(&mut self, chunk: &mut Vec<u8>, index: usize) {
        let Some(object) = self.snapshot.objects.get(index).filter(|object| self.filter.has(object)) else { return };
        match self.format {
            Format::Protobuf => push_protobuf_item(chunk, &object.protobuf),
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
        let mut chunk = if self.encoded.is_none() { self.head() } else { Vec::new() };
        let mut encoded = self.encoded.unwrap_or(0);
        let end = self.snapshot.objects.len().min(encoded + CHUNK_OBJECTS_MAX);
        while chunk.len() < CHUNK_BYTES && encoded < end {
            self.push(&mut chunk, encoded);
            encoded += 1;
        }
        self.encoded = Some(encoded);
        if encoded == self.snapshot.objects.len() {
            chunk.extend_from_slice(list_tail(self.format));
            self.is_over = true;
        }
        Some(chunk.into())
    }
}
