//! Random Services and endpoints: what is to be received, against a naive reading of the objects, and the steps there,
//! each of which is safe.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::{Event, NodeContext, ObjectName, ResourceKind};

const OWN: &str = "10.244.0.9";
const NODE: &str = "203.0.113.7";
const RANGE: &str = "203.0.113.0/28";

/// A Service with one port, and its endpoints.
#[derive(Clone, Debug)]
struct World {
    services: BTreeMap<u8, OneService>,
}

#[derive(Clone, Debug)]
struct OneService {
    created: u8,
    /// Last bytes of the balancers' addresses; those from 16 on are out of range.
    addresses: Vec<u8>,
    external: Vec<u8>,
    port: u16,
    target: u16,
    is_udp: bool,
    sources: Vec<u8>,
    is_backed: bool,
    is_ready: bool,
}

fn one_service() -> impl Strategy<Value = OneService> {
    let addresses = || prop::collection::vec(5..18u8, 0..3);
    let ports = (prop::sample::select(vec![80, 8080]), prop::sample::select(vec![80, 8080]), any::<bool>());
    let sources = prop::collection::vec(0..3u8, 0..3);
    (0..3u8, addresses(), addresses(), ports, sources, any::<(bool, bool)>()).prop_map(
        |(created, addresses, external, (port, target, is_udp), sources, (is_backed, is_ready))| OneService {
            created,
            addresses,
            external,
            port,
            target,
            is_udp,
            sources,
            is_backed,
            is_ready,
        },
    )
}

fn vip(last: u8) -> String {
    format!("203.0.113.{last}")
}

fn source(number: u8) -> String {
    format!("198.51.{number}.0/24")
}

impl OneService {
    fn protocol(&self) -> &'static str {
        if self.is_udp { "UDP" } else { "TCP" }
    }

    fn objects(&self, name: &str) -> [Value; 2] {
        let port = json!({"port": self.port, "protocol": self.protocol(), "targetPort": self.target});
        let service = json!({
            "metadata": {
                "name": name, "namespace": "shop",
                "creationTimestamp": format!("2026-01-0{}T00:00:00Z", self.created + 1),
            },
            "spec": {
                "type": "LoadBalancer", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"], "ports": [port],
                "externalIPs": self.external.iter().copied().map(vip).collect::<Vec<_>>(),
                "loadBalancerSourceRanges": self.sources.iter().copied().map(source).collect::<Vec<_>>(),
            },
            "status": {"loadBalancer": {"ingress":
                self.addresses.iter().map(|&last| json!({"ip": vip(last)})).collect::<Vec<_>>()}},
        });
        let address = if self.is_backed { OWN } else { "10.244.0.1" };
        let slice = json!({
            "metadata": {
                "name": name, "namespace": "shop", "labels": {"kubernetes.io/service-name": name},
            },
            "addressType": "IPv4",
            "ports": [{"name": "", "port": self.target, "protocol": self.protocol()}],
            "endpoints": [{"addresses": [address], "conditions": {"ready": self.is_ready}}],
        });
        [service, slice]
    }
}

fn name(number: u8) -> String {
    format!("web-{number}")
}

fn store() -> Store {
    let ips = |text: &str| crate::parse_address(text).into_iter().collect::<Vec<_>>();
    let mut store = Store::new(NodeContext::default());
    store.apply(Event::PodIps(ips(OWN)));
    store.apply(Event::NodeIps(ips(NODE)));
    for kind in [ResourceKind::Services, ResourceKind::EndpointSlices] {
        store.apply(Event::ListStarted(kind));
        store.apply(Event::ListDone(kind));
    }
    store
}

fn put(store: &mut Store, number: u8, service: Option<&OneService>) {
    let name = name(number);
    match service.map(|service| service.objects(&name)) {
        Some([service, slice]) => {
            store.apply(Event::Service(Box::new(serde_json::from_value(service).unwrap())));
            store.apply(Event::EndpointSlice(Box::new(serde_json::from_value(slice).unwrap())));
        }
        None => {
            for kind in [ResourceKind::Services, ResourceKind::EndpointSlices] {
                store.apply(Event::Deleted(kind, ObjectName::new("shop", &*name)));
            }
        }
    }
}

/// By address, port and whether it is UDP: the pod's port, the clients, and the Service.
type Readable = BTreeMap<(String, u16, bool), (u16, BTreeSet<String>, String)>;

/// Reading of the objects by hand: for each address, port and protocol the pod's port and the clients.
fn expected(world: &World) -> Readable {
    let mut services: Vec<_> = world.services.iter().collect();
    services.sort_by_key(|(number, service)| (service.created, **number));
    let mut expected = BTreeMap::new();
    for (number, service) in services {
        let is_possible = service.is_backed && (!service.is_udp || service.port == service.target);
        for &last in service.addresses.iter().filter(|&&last| is_possible && last < 16 && last != 7) {
            let sources = service.sources.iter().copied().map(source).collect();
            expected
                .entry((vip(last), service.port, service.is_udp))
                .or_insert_with(|| (service.target, sources, format!("shop/{}", name(*number))));
        }
    }
    expected
}

fn readable(received: &ReceivedPorts) -> Readable {
    let readable = received.iter().map(|received| {
        let frontend = received.frontend;
        let key = (frontend.address.to_string(), frontend.port, frontend.protocol == Protocol::Udp);
        let sources = received.sources.iter().map(ToString::to_string).collect();
        (key, (received.port, sources, received.service.to_string()))
    });
    readable.collect()
}

/// Meaning of the kernel's maps for an address, port and protocol while its address is there.
fn meaning(table: &ReceiveTable, frontend: &Frontend) -> Option<(u16, Option<BTreeSet<AddressRange>>)> {
    let &ReceivedPort { port, group, .. } = table.ports.iter().find(|port| port.frontend == *frontend)?;
    let of_group = table.sources.iter().filter(|(number, _)| *number == group).map(|(_, range)| *range);
    Some((port, (group != 0).then(|| of_group.collect())))
}

/// The oldest Services come first. A younger one that does not fit leaves room for a smaller one.
#[test]
fn services_without_room_are_problems_of_their_own() {
    let mut store = store();
    let put = |store: &mut Store, name: &str, year: u32, ports: std::ops::Range<usize>| {
        let ports = |field: &str| -> Vec<Value> {
            ports.clone().map(|port| json!({"name": format!("p{port}"), "port": port, field: port})).collect()
        };
        let metadata =
            json!({"name": name, "namespace": "default", "creationTimestamp": format!("{year}-01-01T00:00:00Z")});
        let service = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": metadata,
            "spec": {"type": "LoadBalancer", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"],
                "ipFamilies": ["IPv4"], "ports": ports("targetPort")},
            "status": {"loadBalancer": {"ingress": [{"ip": vip(1)}, {"ip": vip(2)}]}},
        });
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": name, "namespace": "default", "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv4", "endpoints": [{"addresses": [OWN]}], "ports": ports("ignored"),
        });
        store.apply(Event::Service(Box::new(serde_json::from_value(service).unwrap())));
        store.apply(Event::EndpointSlice(Box::new(serde_json::from_value(slice).unwrap())));
    };
    put(&mut store, "a-young", 2024, 1_000..1_600);
    put(&mut store, "b-old", 2020, 1_000..1_600);
    put(&mut store, "c-small", 2025, 2_000..2_100);
    let mut planner = ReceivePlanner::new(vec![AddressRange::parse(RANGE).unwrap()]);
    planner.sync(&store);
    let services: BTreeSet<_> = planner.received().iter().map(|received| received.service.to_string()).collect();
    assert_eq!(services, ["default/b-old", "default/c-small"].map(str::to_owned).into());
    let problems: Vec<_> = planner.problems().map(|problem| problem.to_string()).collect();
    assert_eq!(problems, ["Service default/a-young: not received: 2048 addresses and ports are, at most"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 200 } else { 2_000 }))]

    #[test]
    fn received_ports_follow_from_the_objects_after_each_change(
        changes in prop::collection::vec((0..4u8, prop::option::weighted(0.8, one_service())), 1..12),
    ) {
        let (mut store, mut world) = (store(), World { services: BTreeMap::new() });
        let ranges = vec![AddressRange::parse(RANGE).unwrap()];
        let mut planner = ReceivePlanner::new(ranges.clone());
        planner.sync(&store);
        for (number, service) in changes {
            put(&mut store, number, service.as_ref());
            match service {
                Some(service) => drop(world.services.insert(number, service)),
                None => drop(world.services.remove(&number)),
            }
            let before = planner.received();
            let dirty = store.take_dirty();
            let has_changed = planner.update(&store, &dirty);
            let received = planner.received();
            prop_assert_eq!(readable(&received), expected(&world));
            prop_assert!(has_changed || before == received);
            let mut anew = ReceivePlanner::new(ranges.clone());
            anew.sync(&store);
            prop_assert_eq!(anew.received(), received);
            prop_assert!(anew.problems().eq(planner.problems()));
        }
    }

    #[test]
    fn each_step_leaves_a_port_as_it_was_or_as_it_is_to_be(
        worlds in prop::collection::vec(prop::collection::btree_map(0..4u8, one_service(), 0..4), 1..6),
        kept in any::<u64>(),
        stop in any::<prop::sample::Index>(),
    ) {
        let mut table = ReceiveTable::default();
        let last = worlds.len() - 1;
        for (round, services) in worlds.into_iter().enumerate() {
            let mut store = store();
            services.iter().for_each(|(number, service)| put(&mut store, *number, Some(service)));
            let mut planner = ReceivePlanner::new(vec![AddressRange::parse(RANGE).unwrap()]);
            planner.sync(&store);
            let wanted = planner.received();
            let keeps = |frontend: &Frontend| kept >> (frontend.address.words()[3].to_be() % 64) & 1 == 1;
            let before = table.clone();
            let ops = table.plan(&wanted, keeps);
            // A process that is killed in between leaves a part of the steps, from which the next one goes on.
            let taken = if round == last { ops.len() } else { stop.index(ops.len() + 1) };
            for op in ops.into_iter().take(taken) {
                table.record(op);
                let all = before.ports.iter().map(|port| port.frontend);
                for frontend in &all.chain(wanted.iter().map(|received| received.frontend)).collect::<Vec<_>>() {
                    if !table.routes.contains(&frontend.address) {
                        continue;
                    }
                    let now = meaning(&table, frontend);
                    let then = wanted.get(frontend).map(|received| {
                        let sources: BTreeSet<_> = received.sources.iter().copied().collect();
                        (received.port, (!sources.is_empty()).then_some(sources))
                    });
                    let is_kept = wanted.get(frontend).is_none() && keeps(frontend);
                    let is_either = now == meaning(&before, frontend) || now == then && !is_kept;
                    prop_assert!(is_either, "{frontend:?} {now:?}");
                    prop_assert!(table.addresses.contains(&frontend.address), "{op:?}");
                }
            }
        }
        for op in table.plan(&ReceivedPorts::default(), |_| false) {
            table.record(op);
        }
        prop_assert_eq!(table, ReceiveTable::default());
    }
}
