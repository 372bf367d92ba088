//! Allocations of one change of an EndpointSlice: few, and independent of the number of Services. Memory of many
//! objects, and its peak while a file of them is read.

#![allow(clippy::unwrap_used, reason = "a test that cannot make its objects fails")]

use std::time::Instant;

use allocation_counter::measure;
use cproxy::manifests::{ParseOptions, parse};
use cproxy_core::{
    Event, KernelTable, NodeContext, ResourceKind, Store, TablePlanner,
    api::{EndpointSlice, Service},
};
use cproxy_datapath::bpf::KernelMaps;
use serde_json::{Value, json};

/// Allocations for an object that was decoded to an event: its row, the changes from it, and the operations.
const ALLOCATIONS_MAX: u64 = 55;
/// Memory of a thousand Services with ten endpoints each.
const KEPT_BYTES_MAX: i64 = 620_000;
/// Peak of memory, besides the text, while a file with these is read.
const FILE_BYTES_MAX: u64 = 800_000;

fn address(network: u32, index: u32) -> String {
    std::net::Ipv4Addr::from_bits(network << 24 | (index + 1)).to_string()
}

fn service(index: u32) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": format!("service-{index:05}"), "namespace": format!("namespace-{}", index % 50),
                     "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"clusterIP": address(10, index), "ports": [{"name": "http", "port": 80}]},
    })
}

fn service_event(index: u32) -> Event {
    Event::Service(Box::<Service>::new(serde_json::from_value(service(index)).unwrap()))
}

/// Ten endpoints, of which some are not ready.
fn slice(index: u32, unready: u32) -> Value {
    let endpoint = |endpoint: u32| -> Value {
        json!({"addresses": [address(100, index * 10 + endpoint)], "conditions": {"ready": endpoint >= unready}})
    };
    let name = format!("service-{index:05}");
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": format!("{name}-x7k2p"), "namespace": format!("namespace-{}", index % 50),
                     "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4", "ports": [{"name": "http", "port": 8080}],
        "endpoints": (0..10).map(endpoint).collect::<Vec<_>>(),
    })
}

fn slice_event(index: u32, unready: u32) -> Event {
    Event::EndpointSlice(Box::<EndpointSlice>::new(serde_json::from_value(slice(index, unready)).unwrap()))
}

fn synced(services: u32) -> (Store, TablePlanner) {
    let mut store = Store::new(NodeContext::default());
    let mut list = |kind, object: &dyn Fn(u32) -> Event| {
        store.apply(Event::ListStarted(kind));
        (0..services).for_each(|index| drop(store.apply(object(index))));
        store.apply(Event::ListDone(kind));
    };
    list(ResourceKind::Services, &service_event);
    list(ResourceKind::EndpointSlices, &|index| slice_event(index, 0));
    let mut table = TablePlanner::new(KernelMaps::LIMITS, KernelTable::default());
    table.sync_by(&store, &mut drop);
    (store, table)
}

/// Number of allocations for each of a few changes of one slice.
fn allocations(services: u32) -> Vec<u64> {
    let (mut store, mut table) = synced(services);
    let changes: Vec<_> = (1..7).map(|change| slice_event(services / 2, change % 3)).collect();
    let of_one = |change: Event| {
        let mut ops = Vec::new();
        let allocated = measure(|| {
            assert!(store.apply(change).is_empty());
            let dirty = store.take_dirty();
            ops = table.update(&store, dirty);
            assert_eq!(table.problems_revision(), 0);
        });
        assert!((1..=3).contains(&ops.len()), "{ops:?}");
        allocated.count_total
    };
    changes.into_iter().map(of_one).collect()
}

#[test]
fn a_change_costs_the_same_however_many_services_there_are() {
    let few = allocations(10);
    assert!(few.iter().all(|&count| count <= ALLOCATIONS_MAX), "{few:?}");
    for services in [1_000, 10_000] {
        assert_eq!(allocations(services), few, "with {services} Services");
    }
}

#[test]
fn a_thousand_services_take_little() {
    let mut kept = None;
    let bytes = measure(|| kept = Some(synced(1_000))).bytes_current;
    assert!(bytes <= KEPT_BYTES_MAX, "{bytes} bytes");
}

/// A thousand Services and their slices as one List whose kind comes last, as JSON and as YAML, and document by
/// document.
fn files() -> [(&'static str, String); 3] {
    let objects: Vec<_> =
        (0..1_000).flat_map(|index| [service(index), slice(index, 0)]).map(|value| value.to_string()).collect();
    let list = objects.join(",\n");
    let yaml: String = objects.iter().map(|object| format!("- {object}\n")).collect();
    [
        ("a JSON List", format!(r#"{{"apiVersion":"v1","items":[{list}],"kind":"List"}}"#)),
        ("a YAML List", format!("apiVersion: v1\nitems:\n{yaml}kind: List\n")),
        ("YAML documents", objects.join("\n---\n")),
    ]
}

#[test]
fn a_file_is_never_there_as_objects() {
    for (what, text) in files() {
        let mut contents = None;
        let bytes = measure(|| contents = Some(parse("file", &text, &ParseOptions::default()).unwrap())).bytes_max;
        let rows = contents.unwrap().events().filter(|event| matches!(event, Event::Row(_))).count();
        assert_eq!(rows, 2_000, "{what}");
        assert!(bytes <= FILE_BYTES_MAX, "{what}: {bytes} bytes");
    }
}

/// Sixteen times the ports may cost somewhat more than sixteen times as much, but not two hundred and fifty times.
#[test]
fn the_cost_of_a_service_grows_with_its_ports_and_not_with_their_square() {
    let cost = |ports: u16| {
        let (mut store, mut table) = synced(1);
        let start = Instant::now();
        for first in [1, 2] {
            let ports: Vec<_> =
                (first..first + ports).map(|port| json!({"name": format!("p{port}"), "port": port})).collect();
            let object = json!({"metadata": {"name": "large"}, "spec": {"clusterIP": "10.255.0.1", "ports": ports}});
            store.apply(Event::Service(Box::new(serde_json::from_value(object).unwrap())));
            let dirty = store.take_dirty();
            assert!(!table.update(&store, dirty).is_empty());
        }
        start.elapsed()
    };
    let (few, many) = (cost(1_000), cost(16_000));
    assert!(many < 80 * few, "{many:?} for 16,000 ports, {few:?} for 1,000");
}
