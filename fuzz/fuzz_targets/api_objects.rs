//! Objects as an API server sends them: lists and watch events, in any order, of Services, EndpointSlices and Nodes.
//!
//! The first line of an input is the name of this node. Each further line is a letter and its argument:
//! - `s`, `e`, `n`: an event of the watch of Services, EndpointSlices or Nodes, as JSON
//! - `S`, `E`, `N`: a whole list of them, as JSON
//! - `(` or `)` and one of these letters: start or end of a list that the watch streams
//! - `p`, `i`: the VM's own addresses, the given addresses of the node
//!
//! At an empty line the agent writes the table.

#![no_main]

use cproxy_core::{
    Event, NodeContext, ObjectName, ResourceKind, Store,
    api::{EndpointSlice, Node, Object, Service},
    parse_address,
};
use cproxy_fuzz::{TablePlanners, check_problems};
use kube::core::{ObjectList, WatchEvent};
use libfuzzer_sys::fuzz_target;
use serde_json::from_str;

fuzz_target!(|input: &str| {
    let mut lines = input.lines();
    let node_name = lines.next().filter(|name| !name.is_empty()).map(str::to_owned);
    let mut store = Store::new(NodeContext { node_name, ..NodeContext::default() });
    let mut planners = TablePlanners::default();
    for line in lines.chain([""]) {
        match line {
            "" => planners.write(&mut store),
            line => events(line).into_iter().for_each(|event| check_problems(&store.apply(event))),
        }
    }
});

/// Events of a line; none if an API server would not send it.
fn events(line: &str) -> Vec<Event> {
    let mut rest = line.chars();
    let command = rest.next();
    let rest = rest.as_str();
    match command {
        Some('s') => watched(rest, service, |name| Event::Deleted(ResourceKind::Services, name)),
        Some('e') => watched(rest, slice, |name| Event::Deleted(ResourceKind::EndpointSlices, name)),
        Some('n') => watched(rest, node, |name| Event::Deleted(ResourceKind::Nodes, ObjectName::new("", name.name))),
        Some('S') => listed(rest, ResourceKind::Services, service),
        Some('E') => listed(rest, ResourceKind::EndpointSlices, slice),
        Some('N') => listed(rest, ResourceKind::Nodes, node),
        Some('(') => kind(rest).map(Event::ListStarted).into_iter().collect(),
        Some(')') => kind(rest).map(Event::ListDone).into_iter().collect(),
        Some('p') => vec![Event::PodIps(rest.split(' ').filter_map(parse_address).collect())],
        Some('i') => vec![Event::NodeIps(rest.split(' ').filter_map(parse_address).collect())],
        _ => Vec::new(),
    }
}

fn service(object: Service) -> Event {
    Event::Service(Box::new(object))
}

fn slice(object: EndpointSlice) -> Event {
    Event::EndpointSlice(Box::new(object))
}

fn node(object: Node) -> Event {
    Event::Node(Box::new(object))
}

fn kind(letter: &str) -> Option<ResourceKind> {
    match letter {
        "s" => Some(ResourceKind::Services),
        "e" => Some(ResourceKind::EndpointSlices),
        "n" => Some(ResourceKind::Nodes),
        _ => None,
    }
}

/// One line of a watch's answer.
fn watched<K: Object>(json: &str, applied: fn(K) -> Event, deleted: fn(ObjectName) -> Event) -> Vec<Event> {
    match from_str(json) {
        Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) => vec![applied(object)],
        Ok(WatchEvent::Deleted(object)) => {
            let meta = object.metadata();
            vec![deleted(ObjectName::new(&meta.namespace, &*meta.name))]
        }
        Ok(WatchEvent::Bookmark(_) | WatchEvent::Error(_)) | Err(_) => Vec::new(),
    }
}

/// The answer to a list.
fn listed<K: Clone + serde::de::DeserializeOwned>(
    json: &str,
    kind: ResourceKind,
    applied: fn(K) -> Event,
) -> Vec<Event> {
    let Ok(list) = from_str::<ObjectList<K>>(json) else { return Vec::new() };
    let objects = list.items.into_iter().map(applied);
    [Event::ListStarted(kind)].into_iter().chain(objects).chain([Event::ListDone(kind)]).collect()
}
