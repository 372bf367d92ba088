//! The text of a manifest file, YAML or JSON.

#![no_main]

use std::collections::BTreeSet;

use cproxy::manifests::{ParseOptions, parse};
use cproxy_core::{Event, NodeContext, Problem, ResourceKind, Store, resolve};
use cproxy_fuzz::{TablePlanners, check_problems};
use cproxy_policy::{Resolver, compile};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let options = ParseOptions { node_name: Some("here".to_owned()), ..ParseOptions::default() };
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
    check_policies(text, options);
});

/// Checks that objects of network policies are policies of pods, and harm no others.
fn check_policies(text: &str, options: ParseOptions) {
    let without = parse("file", text, &options).expect("it could be read before");
    assert!(without.policy_objects().events().next().is_none(), "they are kept on request alone");
    let contents =
        parse("file", text, &ParseOptions { has_policies: true, ..options }).expect("it could be read before");
    check_problems(contents.problems());
    assert_eq!(
        format!("{:?}", contents.events().collect::<Vec<_>>()),
        format!("{:?}", without.events().collect::<Vec<_>>())
    );
    let resolver: Resolver = contents.policy_objects().events().collect();
    check_problems(&resolver.problems());
    for name in resolver.pods() {
        let policy = resolver.pod_policy(name).expect("each pod has a policy");
        let addresses = |set| {
            let sets = policy.sets.iter().filter(move |other| other.name == set).flat_map(|set| set.slice_names());
            sets.filter_map(|slice| resolver.slice(slice)).flat_map(|slice| slice.addresses).collect::<Vec<_>>()
        };
        check_problems(&compile(&policy, addresses).problems);
    }
}

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
