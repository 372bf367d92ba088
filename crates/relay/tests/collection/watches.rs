//! Watches case by case: what a client gets, where it may resume, and what is left out.

#![expect(clippy::expect_used, clippy::indexing_slicing, reason = "a failed assertion is a failed test")]

use std::{
    sync::Arc,
    task::{Poll, Waker},
    time::{Duration, Instant},
};

use cproxy_core::api::Service;
use cproxy_relay_core::{
    Collection, Filter, Format, Kind, List, Object, Selector, Update, Upstream, Watch, WatchOptions, WatchStart,
};
use cproxy_testing::relay_client::{Received, read_events, read_list, version as number};
use prost::Message;

fn service(name: &str, version: u64, app: &str) -> Object {
    padded(name, version, app, 0)
}

fn padded(name: &str, version: u64, app: &str, bytes: usize) -> Object {
    let mut service = Service::default();
    service.metadata.name = name.to_owned();
    service.metadata.namespace = "x".to_owned();
    service.metadata.resource_version = version.to_string();
    service.metadata.labels.insert("app".to_owned(), app.to_owned());
    service.spec.external_ips.push("x".repeat(bytes));
    let (metadata, protobuf) = Upstream::<Service>::decode(&*service.encode_to_vec()).expect("protobuf").into_parts();
    Object::new(Kind::Services, metadata, protobuf.into()).expect("it has a name and a version")
}

fn apply(collection: &Collection, updates: impl IntoIterator<Item = Update>) {
    for update in updates {
        let outcome = collection.apply(update, Instant::now());
        assert!(!outcome.is_reset);
    }
}

fn list(collection: &Collection, objects: impl IntoIterator<Item = Object>, version: u64) {
    apply(collection, [Update::ListStarted]);
    apply(collection, objects.into_iter().map(Update::Listed));
    apply(collection, [Update::ListDone(version)]);
}

fn listed(objects: impl IntoIterator<Item = Object>, version: u64) -> Arc<Collection> {
    let collection = Arc::new(Collection::new(Kind::Services));
    list(&collection, objects, version);
    collection
}

fn watch(collection: &Arc<Collection>, labels: &str, fields: &str, version: u64) -> Watch {
    let selector = Selector::parse(Kind::Services, labels, fields).expect("a selector");
    let options = WatchOptions { filter: Filter { selector, ..Filter::default() }, wants_bookmarks: false };
    Watch::new(collection.clone(), options, Format::Protobuf, WatchStart::After(version))
}

/// Events up to the first wait, in short.
fn events(watch: &mut Watch) -> Vec<String> {
    let mut events = Vec::new();
    while let Poll::Ready(Some(part)) = watch.poll_next(Waker::noop()) {
        events.extend(read_events(&part, false).into_iter().map(|event| match event {
            Received::Added(service) => brief("added", &service),
            Received::Modified(service) => brief("modified", &service),
            Received::Deleted(service) => brief("deleted", &service),
            Received::Bookmark(version, _) => format!("bookmark {version}"),
            Received::Error(code) => format!("error {code}"),
        }));
    }
    events
}

fn brief(change: &str, service: &Service) -> String {
    let meta = &service.metadata;
    format!("{change} {} {} {}", meta.name, meta.labels["app"], meta.resource_version)
}

#[test]
fn a_change_is_left_out_if_a_later_one_follows_and_nothing_else_is() {
    let collection = listed([service("a", 1, "a")], 5);
    let changes = [
        Update::Applied(service("a", 6, "a")),
        Update::Applied(service("b", 7, "a")),
        Update::Applied(service("a", 8, "a")),
        Update::Deleted(service("b", 9, "a")),
        Update::Applied(service("b", 10, "a")),
        Update::Applied(service("b", 11, "a")),
        Update::Applied(service("b", 12, "a")),
    ];
    apply(&collection, changes);
    assert_eq!(
        events(&mut watch(&collection, "", "", 5)),
        ["added b a 7", "modified a a 8", "deleted b a 9", "added b a 10", "modified b a 12"]
    );
}

#[test]
fn an_object_that_leaves_or_enters_a_selector_is_deleted_or_added_even_if_it_changes_later() {
    let collection = listed([service("a", 1, "a"), service("b", 2, "b")], 5);
    let changes = [(("a", 6, "b"), ("a", 7, "c")), (("b", 8, "a"), ("b", 9, "a"))];
    let applied = |(name, version, app)| Update::Applied(service(name, version, app));
    apply(&collection, changes.into_iter().flat_map(|(first, second)| [applied(first), applied(second)]));
    // It goes in the last state that the client may see.
    assert_eq!(events(&mut watch(&collection, "app=a", "", 5)), ["deleted a a 6", "added b a 8", "modified b a 9"]);
}

#[test]
fn a_watch_by_name_gets_events_that_are_longer_than_a_part() {
    let collection = listed([], 5);
    let mut idle = watch(&collection, "", "metadata.name=a", 5);
    let long = |version| padded("a", version, "a", 20_000);
    apply(&collection, [Update::Applied(long(6)), Update::Deleted(long(7)), Update::Applied(long(8))]);
    let expected = ["added a a 6", "deleted a a 7", "added a a 8"];
    assert_eq!(events(&mut watch(&collection, "", "metadata.name=a", 5)), expected);
    assert_eq!(events(&mut idle), expected);
}

#[test]
fn after_a_list_comes_first_what_takes_objects_away() {
    let collection = listed([service("a", 1, "a"), service("b", 2, "a"), service("c", 3, "a")], 5);
    list(&collection, [service("c", 8, "b"), service("d", 7, "a")], 9);
    let expected = ["deleted a a 5", "deleted b a 5", "added d a 7", "modified c b 8"];
    assert_eq!(events(&mut watch(&collection, "", "", 5)), expected);
    let expected = ["deleted a a 5", "deleted b a 5", "deleted c a 5", "added d a 7"];
    assert_eq!(events(&mut watch(&collection, "app=a", "", 5)), expected);
    assert_eq!(events(&mut watch(&collection, "app=b", "", 5)), ["added c b 8"]);
}

#[test]
fn a_watch_begins_where_all_later_changes_are_known() {
    let collection = listed([service("a", 1, "a")], 5);
    apply(&collection, [Update::Applied(service("a", 7, "a"))]);
    list(&collection, [service("a", 7, "a")], 12);
    apply(&collection, [Update::Applied(service("a", 14, "a"))]);
    let starts = |versions: &[u64]| {
        versions.iter().all(|version| events(&mut watch(&collection, "", "", *version)) != ["error 410"])
    };
    assert!(starts(&[5, 6, 7, 12, 13, 14]));
    // Before the first list; between what is known from a list only; after all that has been.
    for version in [0, 4, 8, 11, 15] {
        assert!(!starts(&[version]), "{version}");
    }
    collection.forget_oldest();
    assert!(!starts(&[6]) && starts(&[7]));
}

#[test]
fn a_list_that_contradicts_what_is_known_means_that_the_data_went_back() {
    for (objects, version) in [
        (vec![service("a", 2, "a")], 4),
        (vec![service("a", 1, "a")], 9),
        (vec![service("a", 2, "a"), service("b", 3, "a")], 9),
        (vec![], 5),
    ] {
        let collection = listed([service("a", 2, "a")], 5);
        let mut watch = watch(&collection, "", "", 5);
        let updates = [Update::ListStarted].into_iter().chain(objects.into_iter().map(Update::Listed));
        updates.for_each(|update| assert!(!collection.apply(update, Instant::now()).is_reset));
        assert!(collection.apply(Update::ListDone(version), Instant::now()).is_reset);
        assert_eq!(events(&mut watch), ["error 410"]);
    }
}

#[test]
fn no_object_of_lost_data_is_newer_than_the_list_that_has_it() {
    let restored = [
        // The list has an object that cannot be read: its last state stays.
        vec![
            Update::ListStarted,
            Update::Listed(service("a", 4, "a")),
            Update::ListedUnreadable("x".into(), "b".into()),
            Update::ListDone(5),
        ],
        // A change from before what is known.
        vec![Update::Applied(service("a", 5, "a"))],
    ];
    for updates in restored {
        let collection = listed([service("a", 3, "a"), service("b", 9, "a")], 9);
        let resets = updates.into_iter().map(|update| collection.apply(update, Instant::now()).is_reset);
        assert_eq!(resets.last(), Some(true));
        let snapshot = collection.snapshot().expect("a list");
        let body: Vec<u8> = List::new(snapshot, Filter::default(), Format::Protobuf).flatten().collect();
        let (services, version) = read_list(&body, false);
        assert!(version == 5 && services.values().all(|service| number(service) <= 5), "{services:?}");
        let mut watch = watch(&collection, "", "", 5);
        apply(&collection, [Update::Applied(service("b", 6, "a"))]);
        assert_eq!(events(&mut watch), ["modified b a 6"]);
    }
}

#[test]
fn a_first_list_is_complete_once_each_of_its_objects_was_read_or_deleted() {
    let unreadable = |name: &str| Update::ListedUnreadable("x".into(), name.into());
    let ends: [(&str, Vec<Update>); 3] = [
        ("changes", vec![Update::Applied(service("b", 6, "a")), Update::Deleted(service("c", 7, "a"))]),
        (
            "deletions",
            vec![
                Update::DeletedUnreadable("x".into(), "b".into(), 6),
                Update::DeletedUnreadable("x".into(), "c".into(), 7),
            ],
        ),
        (
            "another list",
            vec![Update::ListStarted, unreadable("a"), Update::Listed(service("b", 6, "a")), Update::ListDone(7)],
        ),
    ];
    for (name, end) in ends {
        let collection = Arc::new(Collection::new(Kind::Services));
        apply(&collection, [Update::ListStarted, Update::Listed(service("a", 2, "a"))]);
        apply(&collection, [unreadable("b"), unreadable("c"), Update::ListDone(5)]);
        assert_eq!(collection.unread(), Some((2, "x/b".to_owned())), "{name}");
        assert!(collection.snapshot().is_none() && collection.summary().is_none(), "{name}");
        apply(&collection, end);
        assert_eq!((collection.unread(), collection.summary().map(|summary| summary.version)), (None, Some(7)));
        assert!(collection.get("x", "a").is_some(), "{name}: its last state stays");
    }
    // Later, clients lose nothing for lack of an object that none has.
    let collection = listed([service("a", 2, "a")], 5);
    apply(&collection, [Update::ListStarted, unreadable("a"), unreadable("b"), Update::ListDone(8)]);
    assert!(collection.summary().is_some_and(|summary| summary.objects == 1 && summary.version == 8));
}

#[test]
fn a_client_that_resumes_gets_a_bookmark_at_once_if_it_wants_any() {
    let collection = listed([service("a", 2, "x")], 3);
    apply(&collection, [Update::Bookmark(5)]);
    assert_eq!(events(&mut watch(&collection, "", "", 3)), [""; 0]);
    for version in [3, 4, 5] {
        let options = WatchOptions { filter: Filter::default(), wants_bookmarks: true };
        let mut watch = Watch::new(collection.clone(), options, Format::Protobuf, WatchStart::After(version));
        assert_eq!(events(&mut watch), ["bookmark 5"]);
    }
}

#[test]
fn a_watch_that_is_to_end_first_sends_all_of_what_is_known_from_a_list_only() {
    let names: Vec<_> = (0..5).map(|number| format!("service-{number}")).collect();
    let collection = listed([], 3);
    let mut watch = watch(&collection, "", "", 3);
    assert!(watch.can_end());
    // Each takes a part.
    let objects = names.iter().zip(10..).map(|(name, version)| padded(name, version, "a", 20 << 10));
    list(&collection, objects, 30);
    for _ in &names {
        assert!(matches!(watch.poll_next(Waker::noop()), Poll::Ready(Some(_))));
        // The next part has the rest, or the client has everything.
        assert_eq!(watch.can_end(), watch.version() == 30, "{}", watch.version());
    }
    assert!(watch.can_end(), "{}", watch.version());
    drop(watch);
    let mut resumed = self::watch(&collection, "", "", 30);
    assert_eq!(events(&mut resumed), [""; 0]);
}

#[test]
fn events_are_forgotten_by_age() {
    let collection = listed([], 5);
    let start = Instant::now();
    for version in 6..9 {
        let now = start + Duration::from_secs(version);
        collection.apply(Update::Applied(service("a", version, "a")), now);
    }
    collection.forget_older_than(Duration::from_secs(1), start + Duration::from_secs(8));
    let summary = collection.summary().expect("it has a list");
    assert_eq!((summary.events, summary.oldest_version), (2, 6));
}
