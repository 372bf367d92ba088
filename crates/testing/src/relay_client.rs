//! Client of a relay that knows nothing of it but the bytes: decodes lists and watches, in protobuf and JSON, into a
//! cache of Services.

use std::collections::BTreeMap;

use cproxy_core::api::Service;
use prost::Message;
use serde_json::Value;

/// Namespace and name.
pub type Key = (String, String);

/// Services by namespace and name.
pub type Services = BTreeMap<Key, Service>;

/// Namespace and name of a Service.
pub fn key(service: &Service) -> Key {
    (service.metadata.namespace.clone(), service.metadata.name.clone())
}

/// Version of a Service.
pub fn version(service: &Service) -> u64 {
    service.metadata.resource_version.parse().expect("a version is a number")
}

/// Event of a watch.
#[derive(Debug)]
pub enum Received {
    /// ADDED
    Added(Service),
    /// MODIFIED
    Modified(Service),
    /// DELETED
    Deleted(Service),
    /// A version, and whether it ends the initial events.
    Bookmark(u64, bool),
    /// Code of the error that ends the watch.
    Error(i32),
}

/// runtime.Unknown
#[derive(Clone, PartialEq, Message)]
struct Unknown {
    #[prost(message, optional, tag = "1")]
    type_meta: Option<TypeMeta>,
    #[prost(bytes = "vec", tag = "2")]
    raw: Vec<u8>,
}

/// runtime.TypeMeta
#[derive(Clone, PartialEq, Message)]
struct TypeMeta {
    #[prost(string, tag = "1")]
    api_version: String,
    #[prost(string, tag = "2")]
    kind: String,
}

/// metav1.WatchEvent
#[derive(Clone, PartialEq, Message)]
struct WatchEvent {
    #[prost(string, tag = "1")]
    change: String,
    #[prost(message, optional, tag = "2")]
    object: Option<RawExtension>,
}

/// runtime.RawExtension
#[derive(Clone, PartialEq, Message)]
struct RawExtension {
    #[prost(bytes = "vec", tag = "1")]
    raw: Vec<u8>,
}

/// v1.ServiceList
#[derive(Clone, PartialEq, Message)]
struct ServiceList {
    #[prost(message, optional, tag = "1")]
    metadata: Option<ListMeta>,
    #[prost(message, repeated, tag = "2")]
    items: Vec<Service>,
}

/// metav1.ListMeta
#[derive(Clone, PartialEq, Message)]
struct ListMeta {
    #[prost(string, tag = "2")]
    resource_version: String,
}

/// A bookmark's object.
#[derive(Clone, PartialEq, Message)]
struct Bookmark {
    #[prost(message, optional, tag = "1")]
    metadata: Option<BookmarkMeta>,
}

#[derive(Clone, PartialEq, Message)]
struct BookmarkMeta {
    #[prost(string, tag = "6")]
    resource_version: String,
    #[prost(map = "string, string", tag = "12")]
    annotations: std::collections::HashMap<String, String>,
}

/// metav1.Status
#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(int32, tag = "6")]
    code: i32,
}

/// Object in an envelope of this kind.
fn unpacked<M: Message + Default>(envelope: &[u8], kind: &str) -> M {
    let unknown = envelope.strip_prefix(b"k8s\0").expect("protobuf of Kubernetes begins with its magic");
    let unknown = Unknown::decode(unknown).expect("an envelope");
    let meta = unknown.type_meta.expect("an envelope names its kind");
    assert_eq!((&*meta.api_version, &*meta.kind), ("v1", kind));
    M::decode(&*unknown.raw).expect("an object")
}

/// Services of a list, and its version.
pub fn read_list(body: &[u8], is_json: bool) -> (Services, u64) {
    let (services, version) = if is_json {
        let mut list: Value = serde_json::from_slice(body).expect("a list is JSON");
        let version = list["metadata"]["resourceVersion"].as_str().expect("a list has a version").to_owned();
        (serde_json::from_value::<Vec<Service>>(list["items"].take()).expect("items are Services"), version)
    } else {
        let list: ServiceList = unpacked(body, "ServiceList");
        (list.items, list.metadata.expect("a list has metadata").resource_version)
    };
    let number = services.len();
    let services: Services = services.into_iter().map(|service| (key(&service), service)).collect();
    assert_eq!(services.len(), number, "an object is in the list twice");
    (services, version.parse().expect("a version is a number"))
}

/// Events of a part of a watch, which ends between events.
pub fn read_events(mut part: &[u8], is_json: bool) -> Vec<Received> {
    let mut events = Vec::new();
    while !part.is_empty() {
        if is_json {
            let end = part.iter().position(|byte| *byte == b'\n').expect("a line ends");
            let (line, rest) = part.split_at(end + 1);
            events.push(read_line(line));
            part = rest;
        } else {
            let (length, rest) = part.split_first_chunk().expect("a frame has a length");
            let (frame, rest) = rest.split_at(u32::from_be_bytes(*length) as usize);
            events.push(read_frame(frame));
            part = rest;
        }
    }
    events
}

fn read_line(line: &[u8]) -> Received {
    let mut event: Value = serde_json::from_slice(line).expect("a line is JSON");
    let object = event["object"].take();
    let service = |object| serde_json::from_value(object).expect("an object is a Service");
    match event["type"].as_str().expect("an event has a type") {
        "ADDED" => Received::Added(service(object)),
        "MODIFIED" => Received::Modified(service(object)),
        "DELETED" => Received::Deleted(service(object)),
        "BOOKMARK" => {
            let meta = &object["metadata"];
            let version = meta["resourceVersion"].as_str().and_then(|version| version.parse().ok());
            Received::Bookmark(version.expect("a bookmark has a version"), has_end(&meta["annotations"]))
        }
        "ERROR" => Received::Error(object["code"].as_i64().and_then(|code| code.try_into().ok()).expect("a code")),
        other => panic!("{other} is no type of an event"),
    }
}

fn has_end(annotations: &Value) -> bool {
    annotations["k8s.io/initial-events-end"] == "true"
}

fn read_frame(frame: &[u8]) -> Received {
    let event = WatchEvent::decode(frame).expect("a frame has an event");
    let object = event.object.expect("an event has an object").raw;
    match &*event.change {
        "ADDED" => Received::Added(unpacked(&object, "Service")),
        "MODIFIED" => Received::Modified(unpacked(&object, "Service")),
        "DELETED" => Received::Deleted(unpacked(&object, "Service")),
        "BOOKMARK" => {
            let meta = unpacked::<Bookmark>(&object, "Service").metadata.expect("a bookmark has metadata");
            let is_end = meta.annotations.get("k8s.io/initial-events-end").is_some_and(|value| value == "true");
            Received::Bookmark(meta.resource_version.parse().expect("a version is a number"), is_end)
        }
        "ERROR" => Received::Error(unpacked::<Status>(&object, "Status").code),
        other => panic!("{other} is no type of an event"),
    }
}
