//! Memory of clients and of the history: bounded, and shared.

#![expect(clippy::expect_used, reason = "a failed assertion is a failed test")]

use std::{
    hint::black_box,
    sync::Arc,
    task::{Poll, Wake, Waker},
    time::Instant,
};

use allocation_counter::measure;
use cproxy_core::api::Service;
use cproxy_relay_core::{
    Collection, Filter, Format, Kind, List, Object, Selector, Update, Upstream, Watch, WatchOptions, WatchStart,
};
use cproxy_testing::relay_client::{Received, read_events};
use prost::Message;

const CLIENTS: usize = 1000;

/// A client that waits, with its name and its waker, but without its connection.
const CLIENT_BYTES_MAX: i64 = 416;

struct Nothing;

impl Wake for Nothing {
    fn wake(self: Arc<Self>) {}
}

fn service(name: &str, version: u64, bytes: usize) -> Object {
    with(name, version, bytes / 2, bytes / 2)
}

/// As large as objects can be; labels are short.
fn large(name: &str, version: u64) -> Object {
    with(name, version, 10, 1_400_000)
}

fn with(name: &str, version: u64, label_bytes: usize, bytes: usize) -> Object {
    let mut service = Service::default();
    service.metadata.name = name.to_owned();
    service.metadata.namespace = "default".to_owned();
    service.metadata.resource_version = version.to_string();
    service.metadata.labels.insert("app".to_owned(), "x".repeat(label_bytes));
    service.spec.external_ips.push("x".repeat(bytes));
    let (metadata, protobuf) = Upstream::<Service>::decode(&*service.encode_to_vec()).expect("protobuf").into_parts();
    Object::new(Kind::Services, metadata, protobuf.into()).expect("it has a name and a version")
}

fn collection(services: u64) -> Arc<Collection> {
    let collection = Arc::new(Collection::new(Kind::Services));
    collection.apply(Update::ListStarted, Instant::now());
    for index in 0..services {
        collection.apply(Update::Listed(service(&format!("service-{index}"), index + 1, 1000)), Instant::now());
    }
    collection.apply(Update::ListDone(services + 1), Instant::now());
    collection
}

fn filter(name: Option<&str>) -> Filter {
    let fields = name.map_or_else(String::new, |name| format!("metadata.name={name}"));
    let selector = Selector::parse(Kind::Services, "", &fields).expect("a selector");
    Filter { selector, ..Filter::default() }
}

fn watch(collection: &Arc<Collection>, name: Option<&str>, version: u64) -> Watch {
    let options = WatchOptions { filter: filter(name), wants_bookmarks: true };
    Watch::new(collection.clone(), options, Format::Json, WatchStart::After(version))
}

#[test]
fn a_client_that_waits_costs_little() {
    let collection = collection(10);
    for is_by_name in [false, true] {
        let mut watches = Vec::with_capacity(CLIENTS);
        let bytes = measure(|| {
            for index in 0..CLIENTS {
                let name = format!("service-{index}");
                let mut watch = watch(&collection, Some(&*name).filter(|_| is_by_name), 11);
                assert!(watch.poll_next(Waker::noop()).is_ready(), "a bookmark");
                assert!(watch.poll_next(&Waker::from(Arc::new(Nothing))).is_pending());
                watches.push(Box::new(watch));
            }
        });
        let bytes = bytes.bytes_current / i64::try_from(CLIENTS).expect("few clients");
        assert!(bytes <= CLIENT_BYTES_MAX, "{bytes} bytes for each client, by name: {is_by_name}");
    }
}

#[test]
fn clients_at_one_place_share_their_bytes() {
    let collection = collection(10);
    let mut watches: Vec<_> = (0..CLIENTS).map(|_| watch(&collection, None, 11)).collect();
    let waker = Waker::from(Arc::new(Nothing));
    for version in 12..20 {
        let name = format!("service-{}", version % 3);
        collection.apply(Update::Applied(service(&name, version, 1000)), Instant::now());
    }
    let mut parts = Vec::with_capacity(CLIENTS);
    let poll = |watch: &mut Watch| match watch.poll_next(&waker) {
        Poll::Ready(Some(part)) => part,
        other => panic!("{other:?}"),
    };
    let first = poll(&mut watches[0]);
    let bytes = measure(|| parts.extend(watches.iter_mut().skip(1).map(poll)));
    assert!(parts.iter().all(|part| part.as_ptr() == first.as_ptr() && part == &first));
    assert_eq!(bytes.bytes_current, 0, "no client has a copy");
}

#[test]
fn clients_that_come_and_go_leave_nothing() {
    let collection = collection(10);
    let come_and_go = |number: u32| {
        for index in 0..number {
            let name = format!("name-{index}");
            drop(black_box(watch(&collection, Some(&*name).filter(|_| index % 2 == 0), 11)));
        }
    };
    come_and_go(10);
    assert_eq!(measure(|| come_and_go(100_000)).bytes_current, 0);
    assert_eq!(collection.summary().expect("it has a list").watchers, 0);
}

#[test]
fn a_history_has_a_bound_whatever_happens() {
    const BYTES_MAX: usize = 1 << 20;
    let collection = collection(10);
    let all = measure(|| {
        for version in 12..3000 {
            let (name, bytes) = (format!("service-{}", version % 7), 100 + version as usize * 997 % 20_000);
            let now = Instant::now();
            collection.apply(Update::Applied(service(&name, version, bytes)), now);
            if version % 5 == 0 {
                collection.apply(Update::Deleted(service(&name, version + 1, bytes)), now);
            }
            while collection.history_bytes() > BYTES_MAX {
                collection.forget_oldest();
            }
        }
    });
    let bytes_max = i64::try_from(BYTES_MAX).expect("a small bound");
    assert!(all.bytes_current < bytes_max * 5 / 4, "{}", all.bytes_current);
    assert!(all.bytes_max < 2 * BYTES_MAX as u64, "{}", all.bytes_max);
    for _ in 0..3000 {
        collection.forget_oldest();
    }
    assert_eq!(collection.history_bytes(), 0, "all that was counted is taken off again");
}

/// Names of the Services of a watch's events.
fn names(collection: &Arc<Collection>, version: u64) -> Vec<String> {
    let mut watch = watch(collection, None, version);
    let mut names = Vec::new();
    while let Poll::Ready(Some(part)) = watch.poll_next(Waker::noop()) {
        for event in read_events(&part, true) {
            match event {
                Received::Added(service) => names.push(format!("added {}", service.metadata.name)),
                Received::Modified(service) => names.push(format!("modified {}", service.metadata.name)),
                Received::Deleted(service) => names.push(format!("deleted {}", service.metadata.name)),
                Received::Bookmark(..) => {}
                Received::Error(code) => names.push(format!("error {code}")),
            }
        }
    }
    names
}

#[test]
fn updates_of_large_objects_leave_the_others_their_history() {
    let collection = collection(2);
    let apply = |update| assert!(!collection.apply(update, Instant::now()).is_reset);
    apply(Update::Applied(service("service-0", 10, 100)));
    for version in 11..40 {
        apply(Update::Applied(large("service-1", version)));
    }
    // The first change has other labels, so that some clients see the object appear in that state.
    assert!(collection.history_bytes() < 1_500_000, "{}", collection.history_bytes());
    assert_eq!(names(&collection, 3), ["modified service-0", "modified service-1"]);
    // Objects that come and go keep their names alone, once it is needed.
    for version in 0..30 {
        apply(Update::Applied(large("late", 100 + 2 * version)));
        apply(Update::Deleted(large("late", 101 + 2 * version)));
    }
    assert!(collection.history_bytes() > 10 << 20);
    let (namespace, bytes) = collection.largest_namespace().expect("a namespace");
    assert_eq!((&*namespace, bytes), ("default", collection.history_bytes()));
    collection.compact(&namespace);
    assert!(collection.history_bytes() < 100_000, "{}", collection.history_bytes());
    assert_eq!(collection.largest_namespace(), None, "there is no more to gain");
    let deletions = ["deleted late"; 30];
    assert_eq!(names(&collection, 3), [&["modified service-0", "modified service-1"][..], &deletions].concat());
    // One that stays appears.
    apply(Update::Applied(service("late", 200, 100)));
    apply(Update::Applied(service("late", 201, 100)));
    collection.compact("default");
    assert_eq!(names(&collection, 199), ["added late"]);
    while collection.history_bytes() > 0 {
        collection.forget_oldest();
    }
}

/// Clients that begin lists and do not read them, while the cluster changes.
#[test]
fn lists_that_nobody_reads_keep_little_alive_together() {
    let collection = collection(8_000);
    let mut lists = Vec::new();
    let bytes = measure(|| {
        for version in 0..1_200 {
            let name = format!("service-{}", version * 7 % 8_000);
            collection.apply(Update::Applied(service(&name, 40_000 + version, 20_000)), Instant::now());
            let mut list = List::new(collection.snapshot().expect("a list"), filter(None), Format::Protobuf);
            assert!(list.next().is_some());
            lists.push(list);
            while collection.history_bytes() > 1 << 20 {
                collection.forget_oldest();
            }
        }
    });
    // The objects themselves have grown by 1,200 times 19 KB.
    let kept = bytes.bytes_current - 1_200 * 19_000;
    assert!(kept < 24 << 20, "{kept} bytes");
    let cut = lists.iter_mut().map(|list| list.by_ref().count()).filter(|chunks| *chunks == 0).count();
    assert!((100..1_199).contains(&cut), "{cut}");
    assert!(lists.first().is_some_and(List::is_cut) && lists.last().is_some_and(|list| !list.is_cut()));
}

#[test]
fn lists_leave_nothing_but_their_objects() {
    let collection = collection(10);
    let list = |version: u64| {
        collection.apply(Update::ListStarted, Instant::now());
        for index in 0..10 {
            collection.apply(Update::Listed(service(&format!("service-{index}"), index + 1, 1000)), Instant::now());
        }
        collection.apply(Update::ListDone(version), Instant::now());
    };
    (1..100).for_each(|index| list(index * 10 + 20));
    let bytes = measure(|| (100..1000).for_each(|index| list(index * 10 + 20))).bytes_current;
    assert!(bytes < 4096, "{bytes}");
}

#[test]
fn a_list_holds_only_a_part_of_its_bytes() {
    let collection = collection(1000);
    for format in [Format::Json, Format::Protobuf] {
        let snapshot = collection.snapshot().expect("it has a list");
        let mut bytes = 0;
        let list = List::new(snapshot, filter(None), format);
        let peak = measure(|| bytes = list.map(|chunk| chunk.len()).sum()).bytes_max;
        assert!(bytes > 1_000_000 && peak < 100_000, "{peak} of {bytes}");
    }
}
