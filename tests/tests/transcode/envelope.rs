//! The protobuf around objects.

use prost::Message;

/// Start of every protobuf of Kubernetes, but not of a watch event.
const MAGIC: &[u8] = b"k8s\0";

/// runtime.Unknown.
#[derive(Message)]
struct Unknown {
    #[prost(bytes = "vec", tag = "2")]
    raw: Vec<u8>,
}

/// List of objects of any kind.
#[derive(Message)]
struct List {
    #[prost(message, required, tag = "1")]
    metadata: ListMeta,
    #[prost(bytes = "vec", repeated, tag = "2")]
    items: Vec<Vec<u8>>,
}

/// metav1.ListMeta.
#[derive(Message)]
struct ListMeta {
    #[prost(string, tag = "2")]
    resource_version: String,
}

/// metav1.WatchEvent.
#[derive(Message)]
struct WatchEvent {
    #[prost(string, tag = "1")]
    change: String,
    #[prost(message, required, tag = "2")]
    object: RawExtension,
}

/// runtime.RawExtension.
#[derive(Message)]
struct RawExtension {
    #[prost(bytes = "vec", tag = "1")]
    raw: Vec<u8>,
}

/// Event of a watch.
pub(crate) struct Event {
    /// Type of the event.
    pub(crate) change: String,
    pub(crate) object: Vec<u8>,
}

/// The object in a response.
pub(crate) fn object(response: &[u8]) -> Vec<u8> {
    let unknown = response.strip_prefix(MAGIC).expect("the response is in protobuf");
    Unknown::decode(unknown).unwrap().raw
}

/// Version and objects of the list in a response.
pub(crate) fn list(response: &[u8]) -> (String, Vec<Vec<u8>>) {
    let List { metadata, items } = List::decode(&*object(response)).unwrap();
    (metadata.resource_version, items)
}

/// Events of a watch: each has its length before it, in four bytes.
pub(crate) fn events(mut response: &[u8]) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some((length, rest)) = response.split_first_chunk() {
        let (event, rest) = rest.split_at(u32::from_be_bytes(*length) as usize);
        let WatchEvent { change, object: RawExtension { raw } } = WatchEvent::decode(event).unwrap();
        events.push(Event { change, object: object(&raw) });
        response = rest;
    }
    assert_eq!(response, b"", "the last event is whole");
    events
}
