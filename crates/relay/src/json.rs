//! Objects in JSON.

use crate::object::{Object, transcode_kind};

/// The object in JSON, with `kind` and `apiVersion` if it stands by itself; `None` if its protobuf is broken.
#[must_use]
pub fn object_json(object: &Object, stands_alone: bool) -> Option<Vec<u8>> {
    let mut json = Vec::with_capacity(object.protobuf.len() * 2);
    cproxy_transcode::write_json(transcode_kind(object.kind), &object.protobuf, stands_alone, &mut json).ok()?;
    Some(json)
}
