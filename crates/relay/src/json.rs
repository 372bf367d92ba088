//! Objects in JSON.

use cproxy_core::api::Object as Api;
use cproxy_policy::served::{AddressSlice, PodPolicy};
use cproxy_transcode::Kind as Tables;
use serde::Serialize;

use crate::{
    kind::Kind,
    object::{Object, Relayed},
};

/// The object in JSON, with `kind` and `apiVersion` if it stands by itself; `None` if its protobuf is broken.
#[must_use]
pub fn object_json(object: &Object, stands_alone: bool) -> Option<Vec<u8>> {
    match object.kind {
        Kind::Services => transcoded(cproxy_core::api::Service::TABLES, &object.protobuf, stands_alone),
        Kind::EndpointSlices => transcoded(cproxy_core::api::EndpointSlice::TABLES, &object.protobuf, stands_alone),
        Kind::Nodes => transcoded(cproxy_core::api::Node::TABLES, &object.protobuf, stands_alone),
        Kind::PodPolicies => served::<PodPolicy>(object.kind, &object.protobuf, stands_alone),
        Kind::AddressSlices => served::<AddressSlice>(object.kind, &object.protobuf, stands_alone),
    }
}

fn transcoded(tables: Tables, protobuf: &[u8], stands_alone: bool) -> Option<Vec<u8>> {
    let mut json = Vec::with_capacity(protobuf.len() * 2);
    cproxy_transcode::write_json(tables, protobuf, stands_alone, &mut json).ok()?;
    Some(json)
}

/// Object of a kind of the relay's own.
fn served<K: Api + Serialize>(kind: Kind, protobuf: &[u8], stands_alone: bool) -> Option<Vec<u8>> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Whole<K> {
        kind: &'static str,
        api_version: &'static str,
        #[serde(flatten)]
        object: K,
    }
    let object = K::decode(protobuf).ok()?;
    if !stands_alone {
        return serde_json::to_vec(&object).ok();
    }
    serde_json::to_vec(&Whole { kind: kind.singular(), api_version: kind.api_version(), object }).ok()
}
