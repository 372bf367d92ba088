//! Requests of a relay's clients: a path, a query, a header Accept and labels, each on a line. What is refused is the
//! client's fault, and is told in both formats.

#![no_main]

use cproxy_core::api::Metadata;
use cproxy_relay_core::{Format, Kind, Object, Operation, Target, discovery, parse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &str| {
    let mut lines = input.lines();
    let mut line = || lines.next().unwrap_or_default();
    let (path, query, accept, labels) = (line(), line(), line(), line());
    let format = Format::accepted(accept).unwrap_or(Format::Json);
    let target = match parse(path, query, true) {
        Ok(target) => target,
        Err(status) => {
            assert!((400..500).contains(&status.code), "{status:?}");
            assert!(!status.body(format).is_empty());
            return;
        }
    };
    match target {
        Target::Objects(request) => {
            assert!(request.namespace.is_none() || request.kind.is_namespaced(), "{request:?}");
            let selector = match request.operation {
                Operation::Get(name) => return assert!(!name.is_empty()),
                Operation::List(parameters) => parameters.selector,
                Operation::Watch(parameters) => parameters.selector,
            };
            let object = object(request.kind, labels);
            let selects = selector.matches(&object.meta);
            assert!(selects || !selector.is_everything());
            assert!(!selects || selector.name().is_none_or(|name| name == "web"));
        }
        Target::Discovery(path) => drop(discovery(&path, true)),
        Target::Health(_) | Target::Version => {}
    }
});

fn object(kind: Kind, labels: &str) -> Object {
    let pairs = labels.split(',').filter_map(|pair| pair.split_once('='));
    let labels = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    let (name, resource_version) = ("web".to_owned(), "7".to_owned());
    let metadata = Metadata { name, resource_version, labels, ..Metadata::default() };
    Object::new(kind, metadata, Vec::new().into()).expect("it has a name and a version")
}
