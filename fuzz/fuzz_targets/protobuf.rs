//! Objects in protobuf as an API server sends them. An input is objects: a byte for the kind and what becomes of it, two
//! bytes for its length, least significant first, and the object. At the end the agent writes the table.

#![no_main]

use cproxy_core::{
    Event, NodeContext, ResourceKind, Store,
    api::{EndpointSlice, Node, Object, Service},
    object_name,
};
use cproxy_fuzz::{TablePlanners, check_problems};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let mut store = Store::new(NodeContext { node_name: Some("own".to_owned()), ..NodeContext::default() });
    for kind in [ResourceKind::Services, ResourceKind::EndpointSlices, ResourceKind::Nodes] {
        store.apply(Event::ListStarted(kind));
        store.apply(Event::ListDone(kind));
    }
    let (mut planners, mut rest) = (TablePlanners::default(), input);
    while let Some((&[command, low, high], tail)) = rest.split_first_chunk() {
        let (object, tail) = tail.split_at(usize::from(u16::from_le_bytes([low, high])).min(tail.len()));
        rest = tail;
        let is_deleted = command & 0x80 != 0;
        let event = match command % 3 {
            0 => read(object, is_deleted, ResourceKind::Services, |service: Box<Service>| Event::Service(service)),
            1 => read(object, is_deleted, ResourceKind::EndpointSlices, |slice: Box<EndpointSlice>| {
                Event::EndpointSlice(slice)
            }),
            _ => read(object, is_deleted, ResourceKind::Nodes, |node: Box<Node>| Event::Node(node)),
        };
        event.into_iter().for_each(|event| check_problems(&store.apply(event)));
        if command & 0x40 != 0 {
            planners.write(&mut store);
        }
    }
    planners.write(&mut store);
});

/// Event of an object. What is decoded and encoded again is the same object.
fn read<K: Object + PartialEq + std::fmt::Debug>(
    bytes: &[u8],
    is_deleted: bool,
    kind: ResourceKind,
    applied: fn(Box<K>) -> Event,
) -> Option<Event> {
    match K::decode(bytes) {
        Ok(object) if is_deleted => object_name(object.metadata()).map(|name| Event::Deleted(kind, name)),
        Ok(object) => {
            assert!(K::decode(&*object.encode_to_vec()).is_ok_and(|again| again == object), "{object:?}");
            Some(applied(Box::new(object)))
        }
        Err(error) => Some(Event::Unreadable { kind, name: None, message: error.to_string() }),
    }
}
