//! Objects that a relay takes from an API server: a byte for the kind, then protobuf. What clients read of one is what
//! they would read of the original.

#![no_main]

use std::{
    sync::Arc,
    task::{Poll, Waker},
    time::Instant,
};

use cproxy_core::api::{EndpointSlice, Node, Object as Api, Service};
use cproxy_protobuf::last;
use cproxy_relay_core::{
    Collection, Format, Object, Relayed, Update, Upstream, Watch, WatchOptions, WatchStart, envelope, object_json,
};
use libfuzzer_sys::fuzz_target;
use prost::Message;

fuzz_target!(|input: &[u8]| {
    let Some((kind, bytes)) = input.split_first() else { return };
    match kind % 3 {
        0 => take::<Service>(bytes),
        1 => take::<EndpointSlice>(bytes),
        _ => take::<Node>(bytes),
    }
});

fn take<K: Relayed + Api + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    let original = K::decode(bytes);
    let Ok(upstream) = Upstream::<K>::decode(bytes) else { return assert!(original.is_err(), "{original:?}") };
    let (metadata, trimmed) = upstream.into_parts();
    let (metadata_again, trimmed_again) =
        Upstream::<K>::decode(&*trimmed).expect("what is trimmed can be read").into_parts();
    assert_eq!((&metadata, &trimmed), (&metadata_again, &trimmed_again), "what is trimmed stays as it is");
    if let Ok(original) = &original {
        assert_eq!(K::decode(&*trimmed).as_ref(), Ok(original), "no client reads what is left out");
    }
    let Ok(object) = Object::new(K::RELAYED, metadata, trimmed.into()) else { return };
    assert!(envelope(K::RELAYED, &object.protobuf).len() > object.protobuf.len());
    for json in [true, false].into_iter().filter_map(|stands_alone| object_json(&object, stands_alone)) {
        serde_json::from_slice::<serde_json::Value>(&json).expect("JSON");
    }
    delete::<K>(object, original.ok());
}

/// The object is deleted: clients get it with the version of its deletion, and otherwise as it was.
fn delete<K: Relayed + Api + PartialEq + std::fmt::Debug>(object: Object, original: Option<K>) {
    let meta = object.meta.clone();
    let Some(version) = meta.version.checked_add(1) else { return };
    let collection = Arc::new(Collection::new(K::RELAYED));
    let apply = |update| collection.apply(update, Instant::now());
    for update in [Update::ListStarted, Update::Listed(object), Update::ListDone(meta.version)] {
        apply(update);
    }
    let start = WatchStart::After(meta.version);
    let mut watch = Watch::new(collection.clone(), WatchOptions::default(), Format::Protobuf, start);
    assert_eq!(apply(Update::DeletedUnreadable(meta.namespace, meta.name, version)).events, 1);
    let Poll::Ready(Some(frame)) = watch.poll_next(Waker::noop()) else { panic!("the client gets the deletion") };
    let kept = collection.summary().expect("it has a list").objects;
    assert_eq!(kept, 0);
    let Some(original) = original else { return };
    let deleted = K::decode(deleted_object(&frame)).expect("it is read as before");
    let names = |object: &K| (object.metadata().name.clone(), object.metadata().labels.clone());
    assert_eq!(deleted.metadata().resource_version, version.to_string());
    assert_eq!(names(&deleted), names(&original));
}

/// Object of a frame of a watch.
fn deleted_object(frame: &[u8]) -> &[u8] {
    let magic = frame.windows(4).position(|window| window == b"k8s\0").expect("an envelope");
    let object = last(&frame[magic + 4..], 2).expect("an envelope has fields");
    object.expect("an envelope has an object").bytes().expect("an object is a message")
}
