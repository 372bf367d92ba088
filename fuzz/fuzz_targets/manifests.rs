//! The text of a manifest file, YAML or JSON.

#![no_main]

use std::collections::BTreeSet;

use cproxy::{
    manifests::{Manifest, parse},
    model::{Own, Problem, Store, resolve},
};
use cproxy_fuzz::{Follower, check_problems};
use kube::core::ObjectMeta;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let manifest = match parse("file", text) {
        Ok(manifest) => manifest,
        Err(message) => {
            assert!(!message.is_empty() && !message.contains('\n'), "{message:?} is not one line");
            return check_problems([&Problem::new("file", "", message)]);
        }
    };
    check_problems(&manifest.problems);
    let mut store = store(&manifest);
    Follower::default().write(&mut store);
    let again: Vec<_> = manifest.events().into_iter().flat_map(|event| store.apply(event)).collect();
    assert_eq!(again, [], "the same file has no new problems");
    assert!(store.take_dirty().is_empty(), "the same file changes nothing");
    check_order(manifest, &store);
});

fn store(manifest: &Manifest) -> Store {
    let mut store = Store::new(Own { node_name: Some("here".to_owned()), ..Own::default() });
    for event in manifest.events() {
        check_problems(&store.apply(event));
    }
    store
}

/// Of several objects with one name the last counts; else their order does not matter.
fn check_order(mut manifest: Manifest, in_order: &Store) {
    let is_unique = are_unique(manifest.services.iter().map(|service| &service.metadata))
        && are_unique(manifest.slices.iter().map(|slice| &slice.metadata));
    if is_unique {
        manifest.services.reverse();
        manifest.slices.reverse();
        assert_eq!(resolve(&store(&manifest)), resolve(in_order), "in the other order");
    }
}

fn are_unique<'a>(mut objects: impl Iterator<Item = &'a ObjectMeta>) -> bool {
    let mut names = BTreeSet::new();
    objects.all(|metadata| {
        let namespace = metadata.namespace.as_deref().filter(|namespace| !namespace.is_empty());
        names.insert((namespace.unwrap_or("default"), metadata.name.as_deref()))
    })
}
