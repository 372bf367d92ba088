//! The text of a manifest file, YAML or JSON.

#![no_main]

use std::collections::BTreeSet;

use cproxy::manifests::{ParseOptions, parse};
use cproxy_core::{Event, NodeContext, Problem, ResourceKind, Store, resolve};
use cproxy_fuzz::{TablePlanners, check_problems};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let options = ParseOptions { node_name: Some("here".to_owned()), whole_service: None, has_pipes: false };
    let contents = match parse("file", text, &options) {
        Ok(contents) => contents,
        Err(message) => {
            assert!(!message.is_empty() && !message.contains('\n'), "{message:?} is not one line");
            return check_problems([&Problem::new("file", "", message)]);
        }
    };
    check_problems(contents.problems());
    let mut store = store(contents.events());
    TablePlanners::default().write(&mut store);
    let again: Vec<_> = contents.events().flat_map(|event| store.apply(event)).collect();
    assert_eq!(again, [], "the same file has no new problems");
    assert!(store.take_dirty().is_empty(), "the same file changes nothing");
    check_order(contents.events().collect(), &store);
});

fn store(events: impl IntoIterator<Item = Event>) -> Store {
    let mut store = Store::new(NodeContext { node_name: Some("here".to_owned()), ..NodeContext::default() });
    for event in events {
        check_problems(&store.apply(event));
    }
    store
}

/// Checks that order does not matter, except that the last of several objects with one name counts.
fn check_order(mut events: Vec<Event>, in_order: &Store) {
    if are_unique(&events) {
        let is_border = |event: &Event| matches!(event, Event::ListStarted(_) | Event::ListDone(_));
        events.split_mut(is_border).for_each(<[Event]>::reverse);
        assert_eq!(resolve(&store(events)), resolve(in_order), "in the other order");
    }
}

fn are_unique(events: &[Event]) -> bool {
    let mut names = BTreeSet::new();
    events.iter().all(|event| match event {
        Event::Row(row) => names.insert((row.kind(), Some(row.name()))),
        // This node is the only readable one in the store.
        Event::Node(_) | Event::Unreadable { kind: ResourceKind::Nodes, .. } => {
            names.insert((ResourceKind::Nodes, None))
        }
        Event::Unreadable { kind, name, .. } => names.insert((*kind, name.as_ref())),
        _ => true,
    })
}
