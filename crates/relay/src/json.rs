//! Objects in JSON.

use crate::object::Object;

/// The object in JSON, with `kind` and `apiVersion` if it stands by itself; `None` if its protobuf is broken.
#[must_use]
pub fn object_json(object: &Object, stands_alone: bool) -> Option<Vec<u8>> {
    let mut json = Vec::with_capacity(object.protobuf.len() * 2);
    let kind = match object.kind {
        cproxy_core::ResourceKind::Services => cproxy_transcode::Kind::Service,
        cproxy_core::ResourceKind::EndpointSlices => cproxy_transcode::Kind::EndpointSlice,
        cproxy_core::ResourceKind::Nodes => cproxy_transcode::Kind::Node,
    };
    cproxy_transcode::write_json(kind, &object.protobuf, stands_alone, &mut json).ok()?;
    Some(json)
}
