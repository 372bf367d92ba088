//! One Service with more frontends or endpoints than all others together.

use std::net::Ipv4Addr;

use cproxy_tests::{
    manifest::{self, Service, Slice},
    process::{Agent, RunningAgent, cproxy},
    sandbox::Sandbox,
    usage::Memory,
};
use serde_json::{Value, json};

use crate::fixture::{PATIENCE, POD_PORT, WEB, pods, small};

/// Limit on the increase of the agent's peak memory by one Service of any size.
const EXCESS_BYTES_MAX: u64 = 32 << 20;

/// Approximate number of external addresses, or ports, that fit into one object (etcd's --max-request-bytes).
const ADDRESSES_OF_AN_OBJECT: u32 = 90_000;
const PORTS_OF_AN_OBJECT: u16 = 20_000;

/// A Service of great size, whose ClusterIP comes before that of the small one.
fn greedy(addresses: u32, ports: u16, endpoints: usize) -> Vec<Value> {
    let named = |port: u16| json!({"name": format!("p{port}"), "port": port});
    let first = Ipv4Addr::new(1, 0, 0, 1).to_bits();
    let external: Vec<_> = (first..first + addresses).map(|bits| Ipv4Addr::from_bits(bits).to_string()).collect();
    let service = Service::new("greedy").cluster_ips([Ipv4Addr::new(10, 96, 0, 2)]);
    let service = service.spec("ports", (1..=ports).map(named).collect()).spec("externalIPs", json!(external));
    let slice = (1..=ports).fold(Slice::v4("greedy"), |slice, port| slice.tcp(&format!("p{port}"), POD_PORT));
    vec![service.into(), slice.ready(pods(0, endpoints)).into()]
}

fn start(sandbox: &Sandbox, objects: impl IntoIterator<Item = Value>) -> RunningAgent {
    manifest::write(&sandbox.manifest_dir(), "objects.json", objects);
    Agent::new(sandbox).manifests(sandbox.manifest_dir()).start()
}

fn peak_bytes(agent: &RunningAgent) -> u64 {
    Memory::of(agent.pid()).peak
}

/// Checks an agent that starts with the objects: when it is ready, it serves the small Service and the API server's,
/// and its memory is not much larger than without the objects.
fn assert_harmless(what: &str, objects: Vec<Value>) {
    let kubernetes = small("kubernetes", "10.96.0.1");
    let without = {
        let sandbox = Sandbox::for_test();
        peak_bytes(&start(&sandbox, small("web", WEB).into_iter().chain(kubernetes.clone())))
    };
    let sandbox = Sandbox::for_test();
    let agent = start(&sandbox, objects.into_iter().chain(small("web", WEB)).chain(kubernetes));
    let table = cproxy(&sandbox, &["get", "services"]).success().stdout;
    let rows: Vec<Vec<_>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    for name in ["default/kubernetes", "default/web"] {
        let row = rows.iter().find(|row| row[0] == name);
        let backends = row.map(|row| &row[6..]);
        assert_eq!(backends, Some(&["10.240.0.1:8080,", "10.240.0.2:8080"][..]), "{name}");
    }
    let own = rows.iter().filter(|row| row[0] == "default/greedy" && row[3] == "ClusterIP").count();
    assert_ne!(own, 0, "its ClusterIP is served");
    let excess = peak_bytes(&agent).saturating_sub(without);
    eprintln!(
        "{what}: {} frontends, {} KiB at the peak, {} without it; {} lines of log",
        rows.len() - 1,
        peak_bytes(&agent) >> 10,
        without >> 10,
        agent.log().lines().count()
    );
    assert!(excess <= EXCESS_BYTES_MAX, "{what}: {} KiB more than without it", excess >> 10);
    assert!(agent.log().len() < 64 << 10, "{} bytes of log", agent.log().len());
}

#[test]
fn many_addresses_and_ports_with_few_endpoints_are_harmless() {
    assert_harmless("1,000 addresses x 100 ports x 10 endpoints", greedy(1_000, 100, 10));
}

#[test]
fn many_addresses_and_ports_with_many_endpoints_are_harmless() {
    assert_harmless("1,000 addresses x 100 ports x 1,000 endpoints", greedy(1_000, 100, 1_000));
}

#[test]
fn more_frontends_than_the_table_holds_are_harmless() {
    assert_harmless("2,700 addresses x 100 ports x 10 endpoints", greedy(2_700, 100, 10));
}

#[test]
fn as_many_addresses_as_an_object_has_room_for_are_harmless() {
    assert_harmless("90,000 addresses x 1 port x 1,000 endpoints", greedy(ADDRESSES_OF_AN_OBJECT, 1, 1_000));
}

#[test]
fn as_many_ports_as_an_object_has_room_for_are_harmless() {
    assert_harmless("20,000 ports x 1,000 endpoints", greedy(0, PORTS_OF_AN_OBJECT, 1_000));
}

/// Two objects of 6 KB each may claim the same 20,000 frontends.
#[test]
fn services_that_claim_the_same_many_frontends_fill_no_log() {
    let second = |mut objects: Vec<Value>| {
        objects.truncate(1);
        for object in &mut objects {
            object["metadata"]["name"] = json!("second");
            object["spec"]["clusterIP"] = json!("10.96.0.3");
            object["spec"]["clusterIPs"] = json!(["10.96.0.3"]);
        }
        objects
    };
    let both = greedy(200, 100, 1).into_iter().chain(second(greedy(200, 100, 1)));
    assert_harmless("two of 200 addresses x 100 ports", both.collect());
}

/// None of 20,000 addresses is of a family that the Service has.
#[test]
fn very_many_addresses_that_cannot_be_served_are_one_line() {
    let mut objects = greedy(0, 1, 1);
    let external: Vec<_> = (1..20_000).map(|number| format!("2001:db8::{number:x}")).collect();
    objects[0]["spec"]["externalIPs"] = json!(external);
    assert_harmless("20,000 addresses of the other family", objects);
}

/// 5,000 objects with one mistake each, or one that comes again and again.
#[test]
fn very_many_objects_with_mistakes_fill_no_log() {
    let wrong = |number: u32| {
        let mut service = Value::from(Service::new(&format!("wrong-{number}")).tcp("http", 80, POD_PORT));
        service["spec"]["clusterIP"] = json!("10.96.0.999");
        service
    };
    let sandbox = Sandbox::for_test();
    let mut agent = start(&sandbox, (0..5_000).map(wrong).chain(small("web", WEB)));
    agent.wait_log("messages were left out", PATIENCE);
    let lines = agent.log().lines().count();
    assert!(lines < 400, "{lines} lines");
}
