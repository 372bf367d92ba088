//! Memory and time of a resolver of a large cluster.
//!
//! `cargo test --release -p cproxy-policy --test many_pods -- --nocapture` prints both.

#![expect(clippy::expect_used, clippy::indexing_slicing, reason = "a failed assertion is a failed test")]

use std::{
    hint::black_box,
    net::{IpAddr, Ipv4Addr},
    time::Instant,
};

use allocation_counter::measure;
use cproxy_core::ObjectName;
use cproxy_policy::{Changes, Event, Namespace, Pod, Policy, Resolver, api, served};
use prost::Message as _;
use serde_json::{Value, json};

const NAMESPACES: u32 = 200;
const WORKLOADS: u32 = 10;
const REPLICAS: u32 = 50;
const POLICIES: u32 = 10;
const PODS_OF_A_NODE: u32 = 20;

/// Bytes of 100,000 pods with 2,000 policies.
const BYTES_MAX: i64 = 40 << 20;

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("an object")
}

fn namespace(index: u32) -> Event {
    let labels = json!({"team": (index % 10).to_string(), "env": "prod"});
    let object: api::Namespace = read(json!({"metadata": {"name": format!("namespace-{index}"), "labels": labels}}));
    Event::Namespace(Namespace::read(&object).expect("a name"))
}

/// Pod with the labels of its workload, as a Deployment makes it.
fn pod(number: u32, app: u32) -> Event {
    let (namespace, workload) = (number / (WORKLOADS * REPLICAS), number / REPLICAS % WORKLOADS);
    let address = |first: u32| IpAddr::from(Ipv4Addr::from_bits(first + number)).to_string();
    let node = number / PODS_OF_A_NODE;
    let labels = json!({
        "app.kubernetes.io/name": format!("app-{app}"), "app.kubernetes.io/instance": format!("workload-{workload}"),
        "app.kubernetes.io/part-of": "shop", "tier": if workload < 5 { "front" } else { "back" },
        "pod-template-hash": format!("7d9c5b8f{workload}"),
    });
    let object: api::Pod = read(json!({
        "metadata": {
            "namespace": format!("namespace-{namespace}"),
            "name": format!("workload-{workload}-7d9c5b8f6d-{number:05}"),
            "uid": format!("6f1d0c3e-8a5b-4c2d-9e7f-{number:012x}"), "labels": labels,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {
            "nodeName": format!("node-{node}"),
            "containers": [{"ports": [{"name": "http", "containerPort": 8080}]}],
        },
        "status": {
            "phase": "Running", "podIPs": [{"ip": address(0x0a00_0000)}],
            "hostIPs": [{"ip": IpAddr::from(Ipv4Addr::from_bits(0xac10_0000 + node)).to_string()}],
        },
    }));
    Event::Pod(Box::new(Pod::read(&object).expect("a name").value))
}

/// Policy of a workload: ingress from another of the namespace, from a team and from a range; egress by a named port
/// and to the resolver of names.
fn policy(namespace: u32, index: u32) -> Event {
    let app = |app: u32| json!({"podSelector": {"matchLabels": {"app.kubernetes.io/name": format!("app-{app}")}}});
    let team = json!({"matchLabels": {"team": ((namespace + index) % 10).to_string()}});
    let tier = json!({"matchExpressions": [{"key": "tier", "operator": "In", "values": ["front"]}]});
    let object: api::NetworkPolicy = read(json!({
        "metadata": {"namespace": format!("namespace-{namespace}"), "name": format!("policy-{index}")},
        "spec": {
            "podSelector": app(index)["podSelector"],
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {"from": [app((index + 1) % WORKLOADS)], "ports": [{"port": 8080}]},
                {"from": [{"namespaceSelector": team, "podSelector": tier}], "ports": [{"port": "http"}]},
                {"from": [{"ipBlock": {"cidr": "172.16.0.0/12", "except": ["172.16.9.0/24"]}}]},
            ],
            "egress": [
                {"to": [app((index + 2) % WORKLOADS)], "ports": [{"port": "http"}]},
                {"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "namespace-0"}}}],
                 "ports": [{"port": 53, "protocol": "UDP"}]},
            ],
        },
    }));
    Event::Policy(Box::new(Policy::read(&object).expect("a name").value))
}

/// Resident memory of this process in KiB.
fn resident_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("statm");
    text.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).expect("pages") * 4
}

/// Middle and largest of some times in microseconds.
fn times(mut all: Vec<u128>) -> (u128, u128) {
    all.sort_unstable();
    (all[all.len() / 2], all[all.len() - 1])
}

#[test]
fn a_hundred_thousand_pods_fit_and_a_change_is_small() {
    let pods = NAMESPACES * WORKLOADS * REPLICAS;
    let mut resolver = Resolver::default();
    let resident = resident_kib();
    let mut microseconds = 0;
    let mut apply = |event: Event| {
        let start = Instant::now();
        black_box(resolver.apply(event));
        microseconds += start.elapsed().as_micros();
    };
    let memory = measure(|| {
        (0..NAMESPACES).for_each(|index| apply(namespace(index)));
        (0..NAMESPACES * POLICIES).for_each(|index| apply(policy(index / POLICIES, index % POLICIES)));
        (0..pods).for_each(|number| apply(pod(number, number / REPLICAS % WORKLOADS)));
    });
    println!(
        "{pods} pods, {} policies: {} KiB, resident {} KiB, built in {} ms",
        NAMESPACES * POLICIES,
        memory.bytes_current >> 10,
        resident_kib() - resident,
        microseconds / 1000
    );
    assert!(memory.bytes_current <= BYTES_MAX, "{} KiB", memory.bytes_current >> 10);

    let slices: Vec<_> = resolver.slices().filter_map(|name| resolver.slice(name)).collect();
    let addresses: usize = slices.iter().map(|slice| slice.addresses.len()).sum();
    let encoded: usize = slices.iter().map(|slice| served::AddressSlice::new(slice).encoded_len()).sum();
    println!("{} slices with {addresses} addresses, {} KiB encoded", slices.len(), encoded >> 10);
    drop(slices);

    // A label change moves a pod from one workload's sets to another's.
    let mut elapsed = Vec::new();
    for number in (0..pods).step_by(97) {
        let event = pod(number, (number / REPLICAS + 1) % WORKLOADS);
        let start = Instant::now();
        let Changes { pods, slices } = resolver.apply(event);
        elapsed.push(start.elapsed().as_micros());
        assert_eq!(pods.len(), 1, "{pods:?}");
        // It enters and leaves one set of the ingress rules and one of the egress rules.
        assert_eq!(slices.len(), 4, "{slices:?}");
    }
    println!("label change: median and maximum of {} in us: {:?}", elapsed.len(), times(elapsed));

    let names: Vec<ObjectName> = resolver.pods().step_by(97).cloned().collect();
    let of = |name: &ObjectName| {
        let start = Instant::now();
        let policy = resolver.pod_policy(name).expect("it is there");
        let slices = policy.sets.iter().flat_map(|set| set.slice_names()).filter_map(|name| resolver.slice(name));
        black_box(slices.count());
        start.elapsed().as_micros()
    };
    let bytes = |name: &ObjectName| {
        let policy = resolver.pod_policy(name).expect("it is there");
        let slices = policy.sets.iter().flat_map(|set| set.slice_names()).filter_map(|name| resolver.slice(name));
        let of_slices: usize = slices.map(|slice| served::AddressSlice::new(&slice).encoded_len()).sum();
        (served::PodPolicy::new(&policy).encoded_len(), of_slices, policy.sets.len())
    };
    let mut all: Vec<_> = names.iter().step_by(10).map(bytes).collect();
    all.sort_unstable();
    println!("bytes of a policy and its slices, and its sets, in the middle: {:?}", all[all.len() / 2]);
    let elapsed: Vec<_> = names.iter().map(of).collect();
    println!("policy of a pod with all slices: median and maximum in us: {:?}", times(elapsed));

    let mut elapsed = Vec::new();
    for index in 0..POLICIES {
        let start = Instant::now();
        black_box(resolver.apply(Event::PolicyDeleted(ObjectName::new("namespace-7", &*format!("policy-{index}")))));
        black_box(resolver.apply(policy(7, index)));
        elapsed.push(start.elapsed().as_micros());
    }
    println!("policy gone and back: median and maximum in us: {:?}", times(elapsed));
}
