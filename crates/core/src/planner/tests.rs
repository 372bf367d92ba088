//! The table against a naive kernel: after every single operation each lookup, also one that was under way, finds a set
//! that was complete at some moment; in the end the table is what a full recomputation says.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::{
    Affinity, Backend, Capacity, Event, ExternalIps, Family, Filter, KernelSet, Members, NodeContext, ObjectName,
    Protocol, Reserve, ResourceKind, RetiredBackends, SERVICE_FRONTENDS_MAX, ServicePort,
    api::{EndpointSlice, Node, Service},
    desired_rows, parse_address, resolve,
};

/// Room for everything that the universe below can hold, from the start.
const AMPLE: Limits =
    Limits { least: Capacity { frontends: 64, sets: 64, slots: 512 }, run_backends: 64, filter_bit, ..GROWING };
/// Same room, grown on demand.
const GROWING: Limits = Limits {
    frontends: 64,
    sets: 64,
    slots: 512,
    external_frontends: 64,
    service_slots: 512,
    may_replace: true,
    reserved: Reserve { sets: 0, slots: 0 },
    least: Capacity { frontends: 1, sets: 2, slots: 1 },
    run_backends: 64,
    filter_bit,
};

/// Some of the addresses below share a bit.
fn filter_bit(address: Address) -> u64 {
    1 << (60 + address.octets()[15] % 3)
}

/// Node of the pod; endpoints are on it or on another.
const NODE: &str = "here";

/// Change of the cluster or of the agent.
#[derive(Clone, Debug)]
enum Step {
    Service(ServiceStep),
    ServiceGone {
        name: u8,
    },
    Slice(SliceStep),
    SliceGone {
        name: u8,
    },
    Node {
        zone: u8,
        addresses: u8,
    },
    NodeGone,
    /// The VM has other addresses.
    PodIps(u8),
    /// The node has other given addresses.
    NodeIps(u8),
    /// External addresses are served or not.
    ExternalIps(ExternalIps),
    /// A Service becomes one of [`GARBAGE`].
    Garbage {
        name: u8,
        which: usize,
    },
    /// An object becomes unreadable; it keeps its state, and a list reports it again.
    Unreadable(ResourceKind, u8),
    /// All events of the step arrive twice.
    Twice(Box<Step>),
    /// The next step is not seen by the agent, as when a watch breaks.
    Missed(Box<Step>),
    Relist(ResourceKind),
    /// A list that breaks off after some objects.
    HalfRelist(ResourceKind, usize),
    Restart,
    /// Nothing has happened for a while.
    Quiet,
}

#[derive(Clone, Copy, Debug, Default)]
struct ServiceStep {
    name: u8,
    vips: u8,
    ports: u8,
    created: u8,
    /// In tens of seconds; 0: none.
    affinity: u8,
    local: bool,
    /// Features besides the ClusterIP, a bit for each of [`extras`].
    extras: u8,
}

/// Endpoints and their conditions, a bit for each.
#[derive(Clone, Copy, Debug, Default)]
struct SliceStep {
    name: u8,
    service: u8,
    v6: bool,
    ports: u8,
    endpoints: u8,
    not_ready: u8,
    terminating: u8,
    not_serving: u8,
    elsewhere: u8,
    hints: Hints,
}

/// Hints of the endpoints, a bit for each.
#[derive(Clone, Copy, Debug, Default)]
struct Hints {
    node: u8,
    other_node: u8,
    zone: u8,
    other_zone: u8,
}

fn step() -> impl Strategy<Value = Step> {
    let change = prop_oneof![
        4 => (0..3u8, 0..16u8, 0..8u8, 0..3u8, 0..3u8, prop::bool::weighted(0.2), extras()).prop_map(
            |(name, vips, ports, created, affinity, local, extras)| {
                Step::Service(ServiceStep { name, vips, ports, created, affinity, local, extras })
            }
        ),
        1 => (0..3u8).prop_map(|name| Step::ServiceGone { name }),
        6 => ((0..4u8, 0..3u8, any::<bool>(), 0..8u8, any::<u8>()), [any::<u8>(); 4], hints()).prop_map(
            |((name, service, v6, ports, endpoints), [not_ready, terminating, not_serving, elsewhere], hints)| {
                // Few of each, so that every combination comes up.
                let (not_ready, not_serving) = (not_ready & elsewhere.rotate_left(1), not_serving & terminating);
                let terminating = terminating & not_ready.rotate_left(3);
                Step::Slice(SliceStep {
                    name, service, v6, ports, endpoints, not_ready, terminating, not_serving, elsewhere, hints,
                })
            }
        ),
        2 => (0..4u8).prop_map(|name| Step::SliceGone { name }),
        1 => (0..3u8, 0..8u8).prop_map(|(zone, addresses)| Step::Node { zone, addresses }),
        1 => prop_oneof![
            Just(Step::NodeGone),
            (0..8u8).prop_map(Step::PodIps),
            (0..4u8).prop_map(Step::NodeIps),
            prop_oneof![Just(ExternalIps::Serve), Just(ExternalIps::Ignore)].prop_map(Step::ExternalIps),
        ],
        1 => (0..3u8, 0..GARBAGE.len()).prop_map(|(name, which)| Step::Garbage { name, which }),
    ];
    let kind = prop_oneof![Just(ResourceKind::Services), Just(ResourceKind::EndpointSlices), Just(ResourceKind::Nodes)];
    prop_oneof![
        16 => change.clone(),
        2 => change.clone().prop_map(|step| Step::Missed(Box::new(step))),
        1 => change.prop_map(|step| Step::Twice(Box::new(step))),
        1 => (kind.clone(), 0..4u8).prop_map(|(kind, name)| Step::Unreadable(kind, name)),
        1 => kind.clone().prop_map(Step::Relist),
        1 => (kind, 0..3usize).prop_map(|(kind, count)| Step::HalfRelist(kind, count)),
        1 => Just(Step::Restart),
        2 => Just(Step::Quiet),
    ]
}

/// Specs of Services that make little sense.
const GARBAGE: [&str; 8] = [
    "null",
    "{}",
    r#"{"clusterIP": "10.96.0.999", "ports": [{"port": 80}]}"#,
    r#"{"clusterIP": "10.96.0.1", "ports": [{"port": 0}, {"port": 70000}, {"port": 80}, {"port": 80}, {}]}"#,
    r#"{"clusterIP": "10.96.0.1", "clusterIPs": ["x"], "ipFamilies": ["IPv6", "IPv5"], "ports": [{"port": 80}]}"#,
    r#"{"clusterIP": " 10.96.0.2 ", "externalIPs": ["", "x", "127.0.0.1", "10.96.0.2"],
        "ports": [{"port": 80, "nodePort": -1}]}"#,
    r#"{"clusterIP": "fd00:96::1", "loadBalancerSourceRanges": ["", "x/8"],
        "ports": [{"port": 80, "protocol": "SCTP"}]}"#,
    r#"{"clusterIP": "None", "type": "ExternalName", "sessionAffinity": "?", "ports": [{"port": 80}]}"#,
];

/// Half of the Services have nothing beside ClusterIPs.
fn extras() -> impl Strategy<Value = u8> {
    prop_oneof![Just(0), any::<u8>()]
}

/// Most slices have no hints, or all their endpoints have one.
fn hints() -> impl Strategy<Value = Hints> {
    let hints = |[node, other_node, zone, other_zone]: [u8; 4]| Hints { node, other_node, zone, other_zone };
    let bits = prop_oneof![Just(0), Just(u8::MAX), any::<u8>()];
    prop_oneof![Just(Hints::default()), [bits.clone(), bits.clone(), bits.clone(), bits].prop_map(hints)]
}

/// True state of the cluster, and the VM's addresses.
#[derive(Default)]
struct Cluster {
    node: Option<Node>,
    pod_ips: Vec<Address>,
    node_ips: Vec<Address>,
    external_ips: ExternalIps,
    services: BTreeMap<u8, Service>,
    slices: BTreeMap<u8, EndpointSlice>,
}

const PORTS: [(&str, u16, &str); 3] = [("a", 80, "TCP"), ("b", 81, "TCP"), ("dns", 80, "UDP")];

fn bits(set: u8) -> impl Iterator<Item = usize> {
    (0..8).filter(move |bit| set & (1 << bit) != 0)
}

fn service(step: ServiceStep) -> Service {
    let ServiceStep { name, vips, ports, created, affinity, local, extras } = step;
    let extra = |bit: u8| extras & (1 << bit) != 0;
    let some = |values: &[(u8, &str)]| -> Vec<String> {
        values.iter().filter(|(bit, _)| extra(*bit)).map(|(_, value)| (*value).to_owned()).collect()
    };
    // Three of the addresses may be ClusterIPs of other Services, one is the node's, two may be the VM's.
    let external_ips =
        some(&[(0, "203.0.113.1"), (0, "2001:db8::1"), (1, "10.96.0.1"), (2, "192.0.2.7"), (2, "10.9.0.1")]);
    let balancer_ips =
        some(&[(3, "203.0.113.1"), (3, "fd00:96::1"), (4, "203.0.113.2"), (4, "2001:db8::2"), (4, "fd09::1")]);
    let ranges = some(&[(5, "10.9.0.0/16"), (6, "fd09::/16")]);
    // Several Services may claim one address: two of four are drawn.
    let v4 = format!("10.96.0.{}", vips % 4);
    let v6 = format!("fd00:96::{}", vips / 4);
    let ports: Vec<_> = bits(ports)
        .filter_map(|port| PORTS.get(port))
        .map(|(name, port, protocol)| {
            // Two Services have the same.
            let node_port = if extra(7) { port + 30_000 + u16::from(step.name / 2) } else { 0 };
            json!({"name": name, "port": port, "protocol": protocol, "nodePort": node_port})
        })
        .collect();
    serde_json::from_value(json!({
        "metadata": {"name": format!("s{name}"), "namespace": "n",
                     "creationTimestamp": format!("2026-01-0{}T00:00:00Z", created + 1)},
        "spec": {"clusterIP": v4, "clusterIPs": [v4, v6], "ipFamilies": ["IPv4", "IPv6"], "ports": ports,
                 "sessionAffinity": if affinity == 0 { "None" } else { "ClientIP" },
                 "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": affinity * 10}},
                 "internalTrafficPolicy": if local { "Local" } else { "Cluster" },
                 "externalIPs": external_ips, "loadBalancerSourceRanges": ranges},
        "status": {"loadBalancer": {"ingress": balancer_ips.iter().map(|ip| json!({"ip": ip})).collect::<Vec<_>>()}},
    }))
    .unwrap()
}

/// Begins with the name of a Service, which may be the slice's.
fn slice_name(name: u8) -> String {
    format!("s{}-{name}", name / 2)
}

fn slice(step: SliceStep) -> EndpointSlice {
    let SliceStep { name, service, v6, ports, endpoints, not_ready, terminating, not_serving, elsewhere, hints } = step;
    let ports: Vec<_> = bits(ports)
        .filter_map(|port| PORTS.get(port))
        .map(|(port, _, protocol)| json!({"name": port, "port": 8000 + u16::from(name % 2), "protocol": protocol}))
        .collect();
    let endpoints: Vec<_> = bits(endpoints)
        .map(|bit| {
            let address = if v6 { format!("fd00::{bit}") } else { format!("10.0.0.{bit}") };
            let has = |set: u8| set & (1 << bit) != 0;
            let names = |of: &[(u8, &str)]| -> Vec<_> {
                of.iter().filter(|(set, _)| has(*set)).map(|(_, name)| json!({"name": name})).collect()
            };
            let hints = json!({"forNodes": names(&[(hints.node, NODE), (hints.other_node, "there")]),
                               "forZones": names(&[(hints.zone, "zone1"), (hints.other_zone, "zone2")])});
            json!({"addresses": [address], "hints": hints, "nodeName": if has(elsewhere) { "there" } else { NODE },
                   "conditions": {"ready": !has(not_ready) && !has(terminating), "serving": !has(not_serving),
                                  "terminating": has(terminating)}})
        })
        .collect();
    let object = json!({
        "metadata": {"name": slice_name(name), "namespace": "n",
                     "labels": {"kubernetes.io/service-name": format!("s{service}")}},
        "addressType": if v6 { "IPv6" } else { "IPv4" }, "ports": ports, "endpoints": endpoints,
    });
    serde_json::from_value(object).unwrap()
}

/// Node of the pod: in one of two zones or in none.
fn node(zone: u8, addresses: u8) -> Node {
    let labels = if zone == 0 { json!({}) } else { json!({"topology.kubernetes.io/zone": format!("zone{zone}")}) };
    let addresses = bits(addresses).filter_map(|bit| ["192.0.2.7", "192.0.2.8", "2001:db8::7"].get(bit));
    let addresses: Vec<_> = addresses.map(|ip| json!({"type": "InternalIP", "address": ip})).collect();
    serde_json::from_value(json!({"metadata": {"name": NODE, "labels": labels}, "status": {"addresses": addresses}}))
        .unwrap()
}

impl Cluster {
    /// Changes the cluster and returns the events of a watch.
    fn apply(&mut self, step: &Step) -> Vec<Event> {
        match step {
            Step::Service(step) => {
                let service = service(*step);
                self.services.insert(step.name, service.clone());
                vec![Event::Service(Box::new(service))]
            }
            Step::ServiceGone { name } => {
                self.services.remove(name);
                vec![Event::Deleted(ResourceKind::Services, ObjectName::new("n", format!("s{name}")))]
            }
            Step::Slice(step) => {
                let slice = slice(*step);
                self.slices.insert(step.name, slice.clone());
                vec![Event::EndpointSlice(Box::new(slice))]
            }
            Step::SliceGone { name } => {
                self.slices.remove(name);
                vec![Event::Deleted(ResourceKind::EndpointSlices, ObjectName::new("n", slice_name(*name)))]
            }
            Step::Node { zone, addresses } => {
                let node = node(*zone, *addresses);
                self.node = Some(node.clone());
                vec![Event::Node(Box::new(node))]
            }
            Step::NodeGone => {
                self.node = None;
                vec![Event::Deleted(ResourceKind::Nodes, ObjectName::new("", NODE))]
            }
            Step::PodIps(ips) => {
                let known = bits(*ips).filter_map(|bit| ["10.9.0.1", "10.8.0.1", "fd09::1"].get(bit));
                self.pod_ips = known.filter_map(|ip| parse_address(ip)).collect();
                vec![Event::PodIps(self.pod_ips.clone())]
            }
            Step::NodeIps(ips) => {
                let known = bits(*ips).filter_map(|bit| ["192.0.2.8", "2001:db8::8"].get(bit));
                self.node_ips = known.filter_map(|ip| parse_address(ip)).collect();
                vec![Event::NodeIps(self.node_ips.clone())]
            }
            Step::ExternalIps(external_ips) => {
                self.external_ips = *external_ips;
                vec![Event::ExternalIps(self.external_ips)]
            }
            Step::Garbage { name, which } => {
                let metadata = format!(r#"{{"name": "s{name}", "namespace": "n"}}"#);
                let object = format!(r#"{{"metadata": {metadata}, "spec": {}}}"#, GARBAGE[*which]);
                let service: Service = serde_json::from_str(&object).unwrap();
                self.services.insert(*name, service.clone());
                vec![Event::Service(Box::new(service))]
            }
            Step::Unreadable(kind, name) => {
                let name = match kind {
                    ResourceKind::Services => ObjectName::new("n", format!("s{name}")),
                    ResourceKind::EndpointSlices => ObjectName::new("n", slice_name(*name)),
                    ResourceKind::Nodes => ObjectName::new("", NODE),
                };
                let unreadable = Event::Unreadable { kind: *kind, name: Some(name), message: "why".to_owned() };
                let mut events = self.list(*kind, usize::MAX);
                let nameless = Event::Unreadable { kind: *kind, name: None, message: "why".to_owned() };
                events.splice(events.len() - 1..events.len() - 1, [unreadable.clone(), nameless]);
                events.push(unreadable);
                events
            }
            Step::Twice(step) => self.apply(step).into_iter().flat_map(|event| [event.clone(), event]).collect(),
            Step::Missed(step) => {
                self.apply(step);
                Vec::new()
            }
            Step::Relist(kind) => self.list(*kind, usize::MAX),
            Step::HalfRelist(kind, count) => self.list(*kind, *count),
            Step::Restart | Step::Quiet => Vec::new(),
        }
    }

    fn list(&self, kind: ResourceKind, count: usize) -> Vec<Event> {
        let objects: Vec<_> = match kind {
            ResourceKind::Services => {
                self.services.values().map(|object| Event::Service(Box::new(object.clone()))).collect()
            }
            ResourceKind::EndpointSlices => {
                self.slices.values().map(|object| Event::EndpointSlice(Box::new(object.clone()))).collect()
            }
            ResourceKind::Nodes => self.node.iter().map(|object| Event::Node(Box::new(object.clone()))).collect(),
        };
        let is_whole = count >= objects.len();
        let mut events = vec![Event::ListStarted(kind)];
        events.extend(objects.into_iter().take(count));
        events.extend(is_whole.then_some(Event::ListDone(kind)));
        events
    }

    fn lists(&self) -> Vec<Event> {
        let kinds = [ResourceKind::Nodes, ResourceKind::Services, ResourceKind::EndpointSlices];
        let lists = kinds.into_iter().flat_map(|kind| self.list(kind, usize::MAX));
        let settings = [
            Event::PodIps(self.pod_ips.clone()),
            Event::NodeIps(self.node_ips.clone()),
            Event::ExternalIps(self.external_ips),
        ];
        settings.into_iter().chain(lists).collect()
    }
}

fn store(events: Vec<Event>) -> Store {
    let mut store = Store::new(NodeContext { node_name: Some(NODE.to_owned()), ..NodeContext::default() });
    events.into_iter().for_each(|event| drop(store.apply(event)));
    store
}

/// Program that has read something and is on its way to the next lookup.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Program {
    HasSet { frontend: Frontend, set: u32 },
    HasWord { first_slot: u32, backends: Vec<Backend> },
}

/// Position of a set's members, and its behaviour without eligible ones.
#[derive(Clone, Copy, Default)]
struct Word {
    first_slot: u32,
    eligible: u16,
    serving: u16,
    drops: bool,
}

/// Maps, and every program that may still be running.
#[derive(Default)]
struct Kernel {
    frontends: HashMap<Frontend, u32>,
    addresses: HashSet<Address>,
    words: HashMap<u32, Word>,
    affinities: HashMap<u32, Affinity>,
    slots: HashMap<u32, Backend>,
    filter: Filter,
    capacity: Capacity,
    readers: HashSet<Program>,
    /// Backends that sockets remember from lookups since the epoch was last raised.
    flows: HashSet<(Frontend, Backend)>,
    /// An element of FRONTENDS was freed; a program may still hold a pointer to it.
    freed: bool,
    /// Every set that was ever complete, by Service port, the affinities it had, and every port that ever claimed a
    /// frontend.
    complete: HashMap<BackendSetKey, HashSet<Members>>,
    had_affinity: HashMap<BackendSetKey, HashSet<Affinity>>,
    owners: HashMap<Frontend, HashSet<BackendSetKey>>,
}

impl BackendSetKey {
    fn of(row: &Row) -> Self {
        BackendSetKey {
            service: Arc::new(row.service.clone()),
            port_name: (&*row.port_name).into(),
            protocol: row.frontend.protocol,
            family: row.frontend.address.family(),
            scope: row.scope,
        }
    }
}

/// Members and affinity of a frontend's set.
type Seen = (Members, Affinity);

impl Kernel {
    /// Records the set of every Service port, and the claims on each frontend.
    fn expect(&mut self, store: &Store) {
        for row in store.services().flat_map(|(name, _)| desired_rows(store, name)) {
            let (members, affinity) = seen(&row);
            self.owners.entry(row.frontend).or_default().insert(BackendSetKey::of(&row));
            self.complete.entry(BackendSetKey::of(&row)).or_default().insert(members);
            self.had_affinity.entry(BackendSetKey::of(&row)).or_default().insert(affinity);
        }
    }

    fn set(&self, set: u32) -> Seen {
        let word = self.words.get(&set).copied().unwrap_or_default();
        let run = |first: u32, count: u16| -> Vec<Backend> {
            (first..first + u32::from(count)).map(|slot| self.slots[&slot]).collect()
        };
        let serving = run(word.first_slot + u32::from(word.eligible), word.serving);
        let members = Members::new(&run(word.first_slot, word.eligible), &serving, word.drops);
        (members, self.affinities.get(&set).copied().unwrap_or_default())
    }

    fn run(&mut self, ops: &[Op]) {
        for op in ops {
            self.apply(op);
            self.check(op);
            self.look_up();
        }
        let table = self.table();
        for (frontend, backend) in &self.flows {
            let serves = table.get(frontend).is_some_and(|(members, _)| members.has(backend));
            assert!(serves, "sockets still send to {backend}, which {frontend} had");
        }
    }

    /// As [`Self::run`], in a table that another agent has damaged, so that lookups may fail meanwhile.
    fn apply_all(&mut self, ops: &[Op]) {
        ops.iter().for_each(|op| self.apply(op));
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::WriteBackends { first_slot, members, .. } => {
                self.slots.extend((*first_slot..).zip(members.backends.iter().copied()));
                assert!(self.slots.keys().all(|slot| *slot < self.capacity.slots), "{op:?} writes outside the map");
            }
            Op::PublishSet { set, first_slot, eligible, serving, drops } => {
                let word = Word { first_slot: *first_slot, eligible: *eligible, serving: *serving, drops: *drops };
                assert!(*set < self.capacity.sets, "{op:?} writes outside the map");
                self.words.insert(*set, word);
            }
            Op::SetAffinity { set, affinity } => {
                assert!(*set < self.capacity.sets, "{op:?} writes outside the map");
                self.affinities.insert(*set, *affinity);
            }
            Op::PutFrontend { frontend, set } => {
                assert!(!self.freed, "{op:?} may take the memory that a program still reads");
                self.freed |= self.frontends.insert(*frontend, *set).is_some();
                self.check_frontends_capacity(op);
            }
            Op::PutAddress(address) => {
                assert!(!self.freed, "{op:?} may take the memory that a program still reads");
                assert!(self.addresses.insert(*address), "{op:?} is there already");
                self.check_frontends_capacity(op);
            }
            Op::ReplaceFrontends { capacity, frontends, addresses } => {
                let keys = |frontends: &HashMap<Frontend, u32>| frontends.keys().copied().collect::<BTreeSet<_>>();
                let before = (keys(&self.frontends), std::mem::take(&mut self.addresses));
                self.frontends = frontends.iter().copied().collect();
                self.addresses = addresses.iter().copied().collect();
                assert_eq!(before, (keys(&self.frontends), self.addresses.clone()), "nothing is lost or added");
                self.capacity.frontends = *capacity;
                self.check_frontends_capacity(op);
                self.drain();
            }
            Op::ResizeSets(capacity) => {
                self.capacity.sets = *capacity;
                let is_left = |reader: &Program| !matches!(reader, Program::HasSet { set, .. } if set >= capacity);
                // A program that has read an id before is about to look into the new map.
                assert!(self.readers.iter().all(is_left), "{op:?} takes sets that are in use");
                self.drain();
                self.words.retain(|set, _| set < capacity);
                self.affinities.retain(|set, _| set < capacity);
                assert!(self.frontends.values().all(|set| set < capacity), "{op:?} takes sets that are in use");
            }
            Op::ResizeBackends(capacity) => {
                self.capacity.slots = *capacity;
                let held = self.readers.iter().filter_map(|reader| match reader {
                    Program::HasWord { first_slot, backends } => Some(*first_slot as usize + backends.len()),
                    Program::HasSet { .. } => None,
                });
                // A program that has read a word before is about to look into the new map.
                assert!(held.max().is_none_or(|end| end <= *capacity as usize), "{op:?} takes slots that are in use");
                self.drain();
                self.slots.retain(|slot, _| slot < capacity);
            }
            Op::RaiseEpoch => self.flows.clear(),
            Op::DeleteFrontend { frontend } => {
                assert!(self.frontends.remove(frontend).is_some(), "{op:?} deletes nothing");
                self.freed = true;
            }
            Op::DeleteAddress(address) => {
                assert!(self.addresses.remove(address), "{op:?} deletes nothing");
                self.freed = true;
            }
            Op::SetFilter(filter) => self.filter = *filter,
            Op::SetSeed(_)
            | Op::SetBalance(_)
            | Op::SetExclusions(_)
            | Op::SetOwnAddresses(_)
            | Op::FreeTcpPlaces(_)
            | Op::GrowTcpPlaces
            | Op::ShrinkTcpPlaces => {
                panic!("{op:?} is not planned")
            }
            Op::Drain => self.drain(),
        }
    }

    fn drain(&mut self) {
        self.readers.clear();
        self.freed = false;
    }

    fn check_frontends_capacity(&self, op: &Op) {
        assert!(self.frontends.len() + self.addresses.len() <= self.capacity.frontends as usize, "{op:?} does not fit");
    }

    fn check(&self, op: &Op) {
        for reader in &self.readers {
            match reader {
                Program::HasSet { frontend, set } => self.check_set(*frontend, *set, op),
                Program::HasWord { first_slot, backends } => {
                    let now: Vec<_> = (*first_slot..).take(backends.len()).map(|slot| self.slots[&slot]).collect();
                    assert_eq!(&now, backends, "{op:?} overwrote slots that are being read");
                }
            }
        }
        self.frontends.iter().for_each(|(frontend, set)| self.check_set(*frontend, *set, op));
        assert_eq!(self.set(0), Seen::default(), "after {op:?}, the set of unknown ports is empty");
        for address in self.frontends.keys().map(|frontend| &frontend.address).chain(&self.addresses) {
            let bits = if address.family() == Family::V4 { self.filter.v4 } else { self.filter.v6 };
            assert_ne!(bits & filter_bit(*address), 0, "after {op:?}, {address} is not in the filter");
        }
    }

    fn check_set(&self, frontend: Frontend, set: u32, op: &Op) {
        assert_ne!(set, 0, "{frontend} has the set of unknown ports");
        let (members, affinity) = self.set(set);
        let owners = || self.owners.get(&frontend).into_iter().flatten();
        let was_complete = owners().filter_map(|owner| self.complete.get(owner)).any(|sets| sets.contains(&members));
        assert!(was_complete, "after {op:?}, {frontend} has {members:?}, which was never one of its sets");
        let had = owners().filter_map(|owner| self.had_affinity.get(owner)).any(|had| had.contains(&affinity));
        assert!(had, "after {op:?}, {frontend} has {affinity:?}, which it never had");
    }

    fn look_up(&mut self) {
        for (&frontend, &set) in &self.frontends {
            self.flows.extend(self.set(set).0.backends.iter().map(|&backend| (frontend, backend)));
            self.readers.insert(Program::HasSet { frontend, set });
            let first_slot = self.words.get(&set).copied().unwrap_or_default().first_slot;
            self.readers.insert(Program::HasWord { first_slot, backends: self.set(set).0.backends.to_vec() });
        }
    }

    fn read_back(&self) -> KernelTable {
        let sets: BTreeSet<_> = self.frontends.values().copied().collect();
        let read = |set: u32| {
            let (members, affinity) = self.set(set);
            let first_slot = self.words.get(&set).copied().unwrap_or_default().first_slot;
            (set, KernelSet { first_slot, members, affinity })
        };
        KernelTable {
            is_new: false,
            is_damaged: false,
            frontends: self.frontends.iter().map(|(&frontend, &set)| (frontend, set)).collect(),
            addresses: self.addresses.iter().copied().collect(),
            sets: sets.into_iter().map(read).collect(),
            filter: self.filter,
            capacity: self.capacity,
        }
    }

    fn table(&self) -> BTreeMap<Frontend, Seen> {
        self.frontends.iter().map(|(&frontend, &set)| (frontend, self.set(set))).collect()
    }
}

fn seen(row: &Row) -> Seen {
    (row.members.clone(), BackendSetKey::of(row).affinity(row.session_affinity_seconds))
}

fn naive(store: &Store) -> BTreeMap<Frontend, Seen> {
    resolve(store).into_iter().map(|row| (row.frontend, seen(&row))).collect()
}

fn cluster_ips(store: &Store) -> HashSet<Address> {
    store.services().flat_map(|(_, service)| service.cluster_ips).collect()
}

/// Checks that the frontends of a ClusterIP are those of a Service that has it, whatever else claims the address.
fn assert_cluster_ips_are_their_services(table: &TablePlanner, store: &Store) {
    let cluster_ips = cluster_ips(store);
    for row in table.each_row().filter(|row| cluster_ips.contains(&row.frontend.address)) {
        let service = store.service_row(&row.service).unwrap();
        let is_own = service.cluster_ips.contains(&row.frontend.address);
        let has_port = || {
            let is_it = |port: &ServicePort| {
                (port.port, port.protocol, &port.name) == (row.frontend.port, row.frontend.protocol, &row.port_name)
            };
            service.ports.iter().any(is_it)
        };
        assert!(is_own && has_port(), "{} leads to Service {}", row.frontend, row.service);
    }
}

/// Number of pairs of a Service that loses frontends and the owner that it loses them to, derived naively.
fn conflicts(store: &Store) -> usize {
    let mut claims = BTreeMap::<Frontend, Vec<(FrontendSource, i64, Row)>>::new();
    for (name, service) in store.services() {
        for row in desired_rows(store, name) {
            let claim = (row.source, service.created_s.unwrap_or(i64::MAX), row);
            claims.entry(claim.2.frontend).or_default().push(claim);
        }
    }
    let mut cluster_ips = BTreeMap::<Address, ServiceName>::new();
    for claims in claims.values_mut() {
        claims.sort_by_key(|(source, created_s, row)| (*source, *created_s, row.service.clone()));
        for (_, _, row) in claims.iter().filter(|(source, ..)| *source == FrontendSource::ClusterIp) {
            cluster_ips.entry(row.frontend.address).or_insert_with(|| row.service.clone());
        }
    }
    for (name, service) in store.services() {
        for ip in service.cluster_ips {
            cluster_ips.entry(ip).or_insert_with(|| name.clone());
        }
    }
    let mut pairs = BTreeSet::new();
    for (frontend, claims) in &claims {
        let (source, _, first) = &claims[0];
        match cluster_ips.get(&frontend.address) {
            Some(owner) if *source != FrontendSource::ClusterIp => {
                let lost = claims.iter().map(|(_, _, row)| (&row.service, owner, None, true));
                pairs.extend(lost);
            }
            _ => {
                let port = |row: &Row| (first.service == row.service).then_some(first.port_name.clone());
                let lost = claims.iter().skip(1);
                pairs.extend(lost.map(|(_, _, row)| (&row.service, &first.service, port(row), false)));
            }
        }
    }
    pairs.len()
}

/// Number of problems that Services have because of the node or the VM.
fn problems(store: &Store) -> usize {
    store.services().map(|(name, _)| DesiredService::new(store, name).problems.len()).sum()
}

/// Backends that any frontend has lost.
fn lost(before: &BTreeMap<Frontend, Seen>, after: &BTreeMap<Frontend, Seen>) -> Vec<(Protocol, Backend)> {
    let mut lost = Vec::new();
    for (frontend, (members, _)) in before {
        let now = after.get(frontend);
        let is_lost = |backend: &&Backend| now.is_none_or(|(members, _)| !members.has(backend));
        lost.extend(members.backends.iter().filter(is_lost).map(|backend| (frontend.protocol, *backend)));
    }
    lost
}

/// Datagrams that are refused: to frontends without eligible backends, and to other ports of ClusterIPs.
fn refuses(table: &BTreeMap<Frontend, Seen>, addresses: &HashSet<Address>, frontend: &Frontend) -> bool {
    table.get(frontend).map_or(addresses.contains(&frontend.address), |(members, _)| members.eligible == 0)
}

/// Checks the loss that a store would bring. An address of two Services may count as kept for one of them.
fn assert_loss(table: &TablePlanner, kernel: &BTreeMap<Frontend, Seen>, store: &Store) {
    let addresses = |rows: &BTreeMap<Frontend, Seen>| -> BTreeSet<Address> {
        let forwarding = rows.iter().filter(|(_, (members, _))| members.eligible != 0);
        forwarding.map(|(frontend, _)| frontend.address).collect()
    };
    let (serving, after) = (addresses(kernel), addresses(&naive(store)));
    assert_eq!(table.serving_addresses(), serving);
    let (lost, loss) = (serving.difference(&after).count(), Loss::of(&serving, store));
    assert_eq!(loss.serving, serving.len());
    assert!(if conflicts(store) == 0 { loss.lost == lost } else { loss.lost <= lost }, "{loss:?} and {lost}");
}

/// Plays a history on a table with these limits, and checks the kernel against the store.
fn play(steps: &[Step], limits: Limits, check: impl Fn(&Kernel, &Store, &TablePlanner)) {
    let (mut cluster, mut kernel) = (Cluster::default(), Kernel::default());
    let mut seen = store(cluster.lists());
    let mut table = TablePlanner::new(limits, KernelTable::default());
    kernel.run(&table.sync(&seen));
    for step in steps {
        let events = cluster.apply(step);
        let is_restart = matches!(step, Step::Restart);
        if is_restart {
            seen = store(cluster.lists());
            table = TablePlanner::new(limits, kernel.read_back());
        }
        events.into_iter().for_each(|event| drop(seen.apply(event)));
        kernel.expect(&seen);
        let dirty = seen.take_dirty();
        let (before, addresses_before) = (kernel.table(), kernel.addresses.clone());
        assert_loss(&table, &before, &seen);
        kernel.run(&if is_restart { table.sync(&seen) } else { table.update(&seen, dirty) });
        let lost = lost(&before, &kernel.table());
        let retired = table.take_retired();
        assert!(
            lost.iter().all(|(protocol, backend)| retired.of(*protocol).has(backend)),
            "{retired:?} lacks {lost:?}"
        );
        let after = kernel.table();
        let mut served_again = before.keys().chain(after.keys()).filter(|frontend| {
            frontend.protocol == Protocol::Udp
                && refuses(&before, &addresses_before, frontend)
                && !refuses(&after, &kernel.addresses, frontend)
        });
        let is_seen = retired.of(Protocol::Udp).has(&Backend::NOBODY);
        // Sockets may be refused at any port of a ClusterIP.
        assert!(is_seen || addresses_before.is_subset(&kernel.addresses), "{retired:?} lacks nobody");
        assert!(is_seen || served_again.next().is_none(), "{retired:?} lacks nobody: {before:?} {after:?}");
        if matches!(step, Step::Quiet) {
            kernel.run(&table.compact());
        }
        check(&kernel, &seen, &table);
    }
    // A complete list repairs all that was missed.
    cluster.lists().into_iter().for_each(|event| drop(seen.apply(event)));
    kernel.expect(&seen);
    let dirty = seen.take_dirty();
    kernel.run(&table.update(&seen, dirty));
    check(&kernel, &seen, &table);
    assert_eq!(naive(&seen), naive(&store(cluster.lists())), "a relist is a full diff");
    // Services without room so far may have it since the last step has freed some.
    let waiting = table.without_capacity();
    let ops = table.sync(&seen);
    assert!(ops.is_empty() || waiting != 0, "a full sync finds nothing to do: {ops:?}");
}

/// Settings of the tests, which together play ten thousand histories and more.
fn histories(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, max_shrink_iters: 20_000, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(histories(4000))]

    #[test]
    fn every_history_gives_the_table_of_a_full_recomputation(steps in prop::collection::vec(step(), 1..40)) {
        play(&steps, GROWING, |kernel, store, table| {
            assert_eq!(kernel.table(), naive(store));
            assert_eq!(table.rows(), resolve(store));
            assert_eq!(kernel.addresses, cluster_ips(store));
            assert_eq!(kernel.filter, needed_filter(kernel), "no wider than it must be");
            assert_eq!(table.problems.iter().count(), problems(store));
            assert_cluster_ips_are_their_services(table, store);
            let conflicts = conflicts(store);
            assert_eq!(table.problems().len(), problems(store) + conflicts, "one problem for each loser and owner");
        });
    }

    #[test]
    fn the_order_of_arrival_does_not_change_the_table(
        steps in prop::collection::vec(step(), 1..30),
        order in prop::collection::vec(any::<u32>(), 16),
    ) {
        let mut cluster = Cluster::default();
        steps.iter().for_each(|step| drop(cluster.apply(step)));
        let expected = resolve(&store(cluster.lists()));
        let (lists, mut objects): (Vec<_>, Vec<_>) = cluster.lists().into_iter().partition(is_bracket);
        let mut order = order.into_iter().cycle();
        objects.sort_by_cached_key(|_| order.next());
        // All lists are empty, and the objects come afterwards.
        let mut store = store(lists);
        let mut table = TablePlanner::new(AMPLE, KernelTable::default());
        let mut kernel = Kernel::default();
        kernel.run(&table.sync(&store));
        for object in objects {
            store.apply(object);
            kernel.expect(&store);
            let dirty = store.take_dirty();
            kernel.run(&table.update(&store, dirty));
            assert_cluster_ips_are_their_services(&table, &store);
        }
        assert_eq!(table.rows(), expected);
        assert_eq!(resolve(&store), expected);
    }
}

proptest! {
    #![proptest_config(histories(2500))]

    #[test]
    fn a_full_table_keeps_complete_sets_and_reports_the_rest(
        steps in prop::collection::vec(step(), 1..40),
        frontends in 1..8u32,
        sets in 1..8u32,
        slots in 1..24u32,
        run_backends in 1..8usize,
    ) {
        let limits = Limits { frontends, sets, slots, run_backends, ..GROWING };
        play(&steps, limits, |kernel, store, table| {
            assert_cluster_ips_are_their_services(table, store);
            assert!(kernel.frontends.len() + kernel.addresses.len() <= frontends as usize);
            if kernel.table() != naive(store) {
                assert!(table.problems.iter().count() > problems(store), "what does not fit is reported");
            }
            if kernel.addresses != cluster_ips(store) {
                assert_ne!(table.claims.cluster_ips.unplaced.len(), 0, "what does not fit is reported");
            }
        });
    }
}

fn is_bracket(event: &Event) -> bool {
    matches!(event, Event::ListStarted(_) | Event::ListDone(_))
}

fn needed_filter(kernel: &Kernel) -> Filter {
    let keys = kernel.frontends.keys().map(|frontend| &frontend.address).chain(&kernel.addresses);
    keys.fold(Filter::default(), |filter, &address| match address.family() {
        Family::V4 => Filter { v4: filter.v4 | filter_bit(address), ..filter },
        Family::V6 => Filter { v6: filter.v6 | filter_bit(address), ..filter },
    })
}

fn two_endpoints() -> (Store, TablePlanner, Kernel) {
    let mut cluster = Cluster::default();
    cluster.apply(&Step::Service(ServiceStep { ports: 1, ..ServiceStep::default() }));
    cluster.apply(&Step::Slice(endpoints(0b11)));
    let (store, mut kernel) = (store(cluster.lists()), Kernel::default());
    let mut table = TablePlanner::new(AMPLE, KernelTable::default());
    kernel.expect(&store);
    kernel.run(&table.sync(&store));
    (store, table, kernel)
}

fn endpoints(endpoints: u8) -> SliceStep {
    SliceStep { ports: 1, endpoints, ..SliceStep::default() }
}

/// Operations for one more event.
fn follow(store: &mut Store, table: &mut TablePlanner, event: Event) -> Vec<Op> {
    store.take_dirty();
    store.apply(event);
    let dirty = store.take_dirty();
    table.update(store, dirty)
}

fn slice_event(step: SliceStep) -> Event {
    Event::EndpointSlice(Box::new(slice(step)))
}

fn service_event(step: ServiceStep) -> Event {
    Event::Service(Box::new(service(step)))
}

#[test]
fn maps_grow_and_shrink_with_their_content() {
    let least = Capacity { frontends: 4, sets: 2, slots: 4 };
    let (mut cluster, mut kernel) = (Cluster::default(), Kernel::default());
    let mut store = store(cluster.lists());
    let mut table = TablePlanner::new(Limits { least, ..GROWING }, KernelTable::default());
    kernel.run(&table.sync(&store));
    let mut follow = |cluster: &mut Cluster, table: &mut TablePlanner, kernel: &mut Kernel, step: &Step| {
        cluster.apply(step).into_iter().for_each(|event| drop(store.apply(event)));
        kernel.expect(&store);
        let dirty = store.take_dirty();
        kernel.run(&table.update(&store, dirty));
    };
    for name in 0..3 {
        let service = ServiceStep { name, vips: name * 5, ports: 7, ..ServiceStep::default() };
        follow(&mut cluster, &mut table, &mut kernel, &Step::Service(service));
        let slice = SliceStep { name, service: name, ports: 7, endpoints: 0xff, ..SliceStep::default() };
        follow(&mut cluster, &mut table, &mut kernel, &Step::Slice(slice));
    }
    assert_eq!(kernel.capacity, Capacity { frontends: 32, sets: 19, slots: 84 });
    assert!(!table.is_sparse());
    // Only the set behind the others is left.
    for name in 0..2 {
        follow(&mut cluster, &mut table, &mut kernel, &Step::ServiceGone { name });
    }
    follow(&mut cluster, &mut table, &mut kernel, &Step::Slice(SliceStep { name: 2, service: 2, ..endpoints(1) }));
    assert!(table.is_sparse());
    kernel.run(&table.compact());
    assert_eq!(
        kernel.capacity,
        Capacity { frontends: 8, sets: 19, slots: 4 },
        "of the sets more than a third are in use"
    );
    follow(&mut cluster, &mut table, &mut kernel, &Step::ServiceGone { name: 2 });
    kernel.run(&table.compact());
    assert_eq!((kernel.capacity, table.is_sparse()), (least, false));
    assert_eq!(table.compact(), []);
}

#[test]
fn a_full_sync_of_what_is_in_force_makes_no_room() {
    let (mut store, mut table) =
        (store(Cluster::default().lists()), TablePlanner::new(GROWING, KernelTable::default()));
    table.sync(&store);
    // Deleted sets leave ids that no drain was needed for yet; a Service without ports has no frontend.
    for _ in 0..8 {
        follow(&mut store, &mut table, service_event(ServiceStep { ports: 7, ..ServiceStep::default() }));
        follow(&mut store, &mut table, service_event(ServiceStep::default()));
    }
    assert_eq!(table.sync(&store), []);
}

/// Each wait takes some ten milliseconds: a burst of changes must not wait once for each.
#[test]
fn a_burst_of_changes_waits_for_programs_a_few_times() {
    let mut cluster = Cluster::default();
    // They fill what would be a power of two of slots almost completely.
    for name in 0..255 {
        cluster.apply(&Step::Service(ServiceStep { name, ports: 1, ..ServiceStep::default() }));
        cluster.apply(&Step::Slice(SliceStep { name, service: name, ..endpoints(0xff) }));
    }
    let mut store = store(cluster.lists());
    let limits = Limits { frontends: 4_096, sets: 4_096, slots: 65_536, ..GROWING };
    let mut table = TablePlanner::new(limits, KernelTable::default());
    table.sync(&store);
    let mut waits = 0;
    for change in 0..1_000_u32 {
        let name = (change % 255) as u8;
        let endpoints = if (change / 255) % 2 == 0 { 0x7f } else { 0xff };
        let ops = follow(
            &mut store,
            &mut table,
            slice_event(SliceStep { name, service: name, ..self::endpoints(endpoints) }),
        );
        waits += ops.iter().filter(|op| matches!(op, Op::Drain | Op::ResizeBackends(_))).count();
    }
    assert!(waits <= 25, "{waits} waits");
}

#[test]
fn a_change_of_endpoints_is_one_write_of_slots_and_one_store() {
    let (mut store, mut table, _) = two_endpoints();
    let ops = follow(&mut store, &mut table, slice_event(endpoints(0b111)));
    assert!(matches!(ops.as_slice(), [Op::WriteBackends { .. }, Op::PublishSet { eligible: 3, .. }]), "{ops:?}");
}

#[test]
fn a_change_of_affinity_is_one_store() {
    let (mut store, mut table, _) = two_endpoints();
    let with = |affinity| service_event(ServiceStep { ports: 1, affinity, ..ServiceStep::default() });
    for seconds in [10, 20, 0] {
        let ops = follow(&mut store, &mut table, with(seconds / 10));
        let is_store =
            |op: &Op| matches!(op, Op::SetAffinity { affinity, .. } if affinity.seconds == u32::from(seconds));
        assert!(ops.len() == 2 && ops.iter().all(is_store), "one for each family: {ops:?}");
    }
}

/// A deleted set may have had session affinity; the next set with its id must not inherit it.
#[test]
fn a_new_set_starts_with_its_own_affinity() {
    let with = |name, vips, affinity| ServiceStep { name, vips, ports: 1, affinity, ..ServiceStep::default() };
    let steps =
        [Step::Service(with(0, 0, 1)), Step::ServiceGone { name: 0 }, Step::Restart, Step::Service(with(1, 5, 0))];
    play(&steps, AMPLE, |kernel, store, _| assert_eq!(kernel.table(), naive(store)));
}

/// A backend that leaves both runs of a set is retired; one that moves from one run to the other is not.
#[test]
fn backends_are_retired_when_they_leave_a_set_altogether() {
    let (mut store, mut table, _) = two_endpoints();
    let without_ports = service_event(ServiceStep::default());
    let slice = |endpoints, terminating, not_serving| {
        slice_event(SliceStep { ports: 1, endpoints, terminating, not_serving, ..SliceStep::default() })
    };
    for (what, event, expected) in [
        ("one comes", slice(0b111, 0, 0), 0),
        ("one is about to end", slice(0b111, 0b001, 0), 0),
        ("and no longer serves", slice(0b111, 0b001, 0b001), 1),
        ("and is gone", slice(0b110, 0, 0), 0),
        ("another goes at once", slice(0b100, 0, 0), 1),
        ("the port goes", without_ports, 1),
    ] {
        let before: BTreeSet<_> = table.rows().into_iter().flat_map(|row| row.members.backends.to_vec()).collect();
        follow(&mut store, &mut table, event);
        let retired = table.take_retired();
        let RetiredBackends::These(tcp) = retired.of(Protocol::Tcp) else { panic!("{what}: {retired:?}") };
        assert!(tcp.len() == expected && tcp.is_subset(&before), "{what}: {tcp:?} of {before:?}");
        assert!(retired.of(Protocol::Udp).is_empty(), "{what}");
        assert!(table.take_retired().is_empty(), "{what}, once");
    }
}

#[test]
fn a_frontend_without_backends_retires_nobody() {
    let mut cluster = Cluster::default();
    cluster.apply(&Step::Service(ServiceStep { ports: 7, ..ServiceStep::default() }));
    let mut store = store(cluster.lists());
    let mut table = TablePlanner::new(AMPLE, KernelTable::default());
    table.sync(&store);
    let ops = follow(&mut store, &mut table, service_event(ServiceStep::default()));
    assert!(ops.iter().any(|op| matches!(op, Op::DeleteFrontend { .. })), "{ops:?}");
    let retired = table.take_retired();
    assert!(retired.of(Protocol::Tcp).is_empty());
    assert_eq!(retired.of(Protocol::Udp), &RetiredBackends::These([Backend::NOBODY].into()));
}

/// Each replaced frontend would cost a grace period.
#[test]
fn a_port_that_is_renamed_keeps_its_frontend() {
    let (mut store, mut table, mut kernel) = two_endpoints();
    store.take_dirty();
    let mut renamed = service(ServiceStep { ports: 1, ..ServiceStep::default() });
    renamed.spec.ports[0].name = "renamed".to_owned();
    store.apply(Event::Service(Box::new(renamed)));
    let mut slice = slice(endpoints(0b110));
    slice.ports[0].name = Some("renamed".to_owned());
    store.apply(Event::EndpointSlice(Box::new(slice)));
    kernel.expect(&store);
    let dirty = store.take_dirty();
    let ops = table.update(&store, dirty);
    // One backend has gone, so the epoch is raised; the frontend is not touched.
    assert!(matches!(*ops, [Op::WriteBackends { .. }, Op::PublishSet { .. }, Op::RaiseEpoch]), "{ops:?}");
    kernel.run(&ops);
    assert_eq!(kernel.table(), naive(&store));
}

#[test]
fn an_unchanged_table_needs_no_writes() {
    let (mut store, mut table, kernel) = two_endpoints();
    assert_eq!(follow(&mut store, &mut table, slice_event(endpoints(0b11))), []);
    assert_eq!(table.sync(&store), []);
    assert_eq!(TablePlanner::new(AMPLE, kernel.read_back()).sync(&store), [], "a restart takes over what is there");
}

/// A table with two Services, as another agent has written it, and the store.
fn two_services() -> (Cluster, Store, Kernel) {
    let mut cluster = Cluster::default();
    for name in 0..2 {
        cluster.apply(&Step::Service(ServiceStep { name, vips: name * 5, ports: 1, ..ServiceStep::default() }));
        cluster.apply(&Step::Slice(SliceStep { name, service: name, ..endpoints(0b11) }));
    }
    let (store, mut kernel) = (store(cluster.lists()), Kernel::default());
    kernel.apply_all(&TablePlanner::new(GROWING, KernelTable::default()).sync(&store));
    (cluster, store, kernel)
}

/// Otherwise a change of one set would overwrite the backends of the other.
#[test]
fn sets_that_share_backends_are_parted_at_the_start() {
    for first in [0, 1] {
        let (mut cluster, mut store, mut kernel) = two_services();
        let ids: Vec<_> = kernel.words.iter().filter(|(_, word)| word.eligible != 0).map(|(id, _)| *id).collect();
        let [one, other] = if first == 0 { [ids[0], ids[1]] } else { [ids[1], ids[0]] };
        let first_slot = kernel.words[&one].first_slot;
        kernel.words.insert(other, Word { first_slot: first_slot + 1, eligible: 1, ..Word::default() });
        let mut table = TablePlanner::new(GROWING, kernel.read_back());
        kernel.apply_all(&table.sync(&store));
        assert_eq!(kernel.table(), naive(&store));
        for change in 0..24_u8 {
            let name = change % 2;
            let endpoints = endpoints(if change % 4 < 2 { 0b1111 } else { 0b11 });
            let slice = Step::Slice(SliceStep { name, service: name, ..endpoints });
            cluster.apply(&slice).into_iter().for_each(|event| drop(store.apply(event)));
            // Deleted frontends make others wait, and slots free.
            let service = ServiceStep { name: 2, vips: 10, ports: change % 3 / 2, ..ServiceStep::default() };
            store.apply(service_event(service));
            let dirty = store.take_dirty();
            kernel.apply_all(&table.update(&store, dirty));
            assert_eq!(kernel.table(), naive(&store), "after change {change}");
        }
    }
}

#[test]
fn most_of_a_table_is_more_than_half_of_what_serves() {
    let is_most = |serving, lost| Loss { serving, lost }.is_most();
    assert_eq!(
        [(0, 0), (1, 1), (2, 1), (3, 1), (3, 2), (4, 2), (4, 3)].map(|(serving, lost)| is_most(serving, lost)),
        [false, true, false, false, true, false, true]
    );
    // A new agent compares with what the last one has left.
    let (cluster, _, kernel) = two_services();
    let table = TablePlanner::new(GROWING, kernel.read_back());
    let serving = table.serving_addresses();
    let empty = |kind| {
        let events = cluster.lists().into_iter();
        let events = events.filter(move |event| is_bracket(event) || event.changed_kind() != Some(kind));
        Loss::of(&serving, &store(events.collect()))
    };
    let count = serving.len();
    assert!(count > 1);
    assert_eq!(empty(ResourceKind::Nodes), Loss { serving: count, lost: 0 });
    for kind in [ResourceKind::Services, ResourceKind::EndpointSlices] {
        assert_eq!(empty(kind), Loss { serving: count, lost: count }, "{kind:?}");
    }
}

#[test]
fn a_frontend_without_a_set_gets_one_at_the_start() {
    for set in [0, u32::MAX, u32::MAX - 1] {
        let (_, store, mut kernel) = two_services();
        kernel.frontends.values_mut().for_each(|id| *id = set);
        let read_back = KernelTable { sets: BTreeMap::new(), ..kernel.read_back() };
        let mut table = TablePlanner::new(GROWING, read_back);
        kernel.apply_all(&table.sync(&store));
        assert_eq!((kernel.table(), table.frontend_count()), (naive(&store), kernel.frontends.len()));
    }
    // Nor is its id given to another Service, as long as it leads there.
    let (_, store, mut kernel) = two_services();
    let unreadable: BTreeMap<_, _> = kernel.frontends.clone().into_iter().collect();
    let mut table = TablePlanner::new(GROWING, KernelTable { sets: BTreeMap::new(), ..kernel.read_back() });
    for op in table.sync(&store) {
        let is_new = |set: &u32| !unreadable.values().any(|id| id == set);
        assert!(!matches!(&op, Op::PublishSet { set, .. } if !is_new(set)), "{op:?} of {unreadable:?}");
        kernel.apply(&op);
    }
    assert_eq!(kernel.table(), naive(&store));
}

#[test]
fn the_agents_own_services_are_written_and_counted_apart() {
    let own = |vips: Option<u8>| {
        let step = |vips| ServiceStep { name: 7, vips, ports: 1, ..ServiceStep::default() };
        store(vips.into_iter().map(|vips| service_event(step(vips))).collect())
    };
    let (_, mut store, _) = two_services();
    let (mut kernel, of_source) = (Kernel::default(), naive(&store));
    let with = |own: &Store| -> BTreeMap<_, _> { of_source.clone().into_iter().chain(naive(own)).collect() };
    let mut table = TablePlanner::new(GROWING, kernel.read_back());
    // Before the first sync, and again while the table is followed.
    for (round, vips) in [Some(10), Some(15), None, Some(10)].into_iter().enumerate() {
        table.set_internal(own(vips));
        let dirty = store.take_dirty();
        kernel.apply_all(&if round == 0 { table.sync(&store) } else { table.update(&store, dirty) });
        assert_eq!(kernel.table(), with(&own(vips)), "{vips:?}");
        assert_eq!(table.frontend_count(), of_source.len());
        let named: BTreeSet<_> = table.each_name().map(|name| name.frontend).collect();
        assert_eq!(named, of_source.keys().copied().collect());
        assert_eq!(table.each_internal_name().count(), naive(&own(vips)).len());
        assert!(round == 0 || table.take_changes().is_empty());
        table.take_changes();
    }
    // A table that is read back has no such Services until they are set again.
    table.set_internal(own(Some(15)));
    kernel.apply_all(&table.update(&store, BTreeSet::new()));
    let mut table = TablePlanner::new(GROWING, kernel.read_back());
    table.set_internal(own(Some(15)));
    kernel.apply_all(&table.sync(&store));
    assert_eq!(kernel.table(), with(&own(Some(15))));
}

#[test]
fn keys_that_no_agent_writes_are_removed_at_the_start() {
    let (_, store, mut kernel) = two_services();
    kernel.words.insert(0, Word { drops: true, ..Word::default() });
    let damaged = || KernelTable { is_damaged: true, ..kernel.read_back() };
    let full = Limits { may_replace: false, ..GROWING };
    let replaces = |op: &Op| matches!(op, Op::ReplaceFrontends { .. });
    assert!(!TablePlanner::new(full, damaged()).sync(&store).iter().any(replaces), "there is no memory for it");
    let ops = TablePlanner::new(GROWING, damaged()).sync(&store);
    assert_eq!(ops.iter().filter(|op| replaces(op)).count(), 1);
    kernel.apply_all(&ops);
    assert_eq!((kernel.table(), kernel.set(0)), (naive(&store), Seen::default()));
}

/// A program may still read memory that a dead agent has freed when the next agent starts to write.
#[test]
fn a_new_agent_waits_for_what_the_last_one_gave_up() {
    let steps = [
        Step::Service(ServiceStep { ports: 1, ..ServiceStep::default() }),
        Step::Service(ServiceStep { vips: 1, ..ServiceStep::default() }),
        Step::Restart,
        Step::Service(ServiceStep { ports: 1, ..ServiceStep::default() }),
    ];
    play(&steps, AMPLE, |kernel, store, _| assert_eq!(kernel.table(), naive(store)));
}

#[test]
fn the_first_agent_waits_for_no_programs() {
    let mut cluster = Cluster::default();
    cluster.apply(&Step::Service(ServiceStep { ports: 1, ..ServiceStep::default() }));
    let store = store(cluster.lists());
    let waits = |is_new| {
        let kernel = KernelTable { is_new, capacity: AMPLE.least, ..KernelTable::default() };
        TablePlanner::new(AMPLE, kernel).sync(&store).contains(&Op::Drain)
    };
    assert!(waits(false) && !waits(true));
}

/// A program still holds the set's id from a deleted frontend; then the set goes to another Service's port.
#[test]
fn programs_do_not_find_a_set_of_another_service_by_an_old_id() {
    let steps = [
        Step::Slice(SliceStep { service: 1, ports: 5, endpoints: 1, ..SliceStep::default() }),
        Step::Service(ServiceStep { name: 1, vips: 1, ports: 1, ..ServiceStep::default() }),
        Step::Service(ServiceStep { name: 1, vips: 12, ports: 5, ..ServiceStep::default() }),
        Step::Service(ServiceStep { name: 2, vips: 4, ports: 1, ..ServiceStep::default() }),
        Step::Service(ServiceStep { name: 1, ..ServiceStep::default() }),
    ];
    play(&steps, Limits { frontends: 3, sets: 1, slots: 1, run_backends: 1, ..AMPLE }, |_, _, _| ());
}

/// In a full table, deletions make room for insertions of the same batch.
#[test]
fn a_service_takes_the_room_of_one_that_goes_in_the_same_batch() {
    let limits = Limits { frontends: 4, ..AMPLE };
    let (mut cluster, mut kernel) = (Cluster::default(), Kernel::default());
    cluster.apply(&Step::Service(ServiceStep { ports: 1, ..ServiceStep::default() }));
    let mut store = store(cluster.lists());
    let mut table = TablePlanner::new(limits, KernelTable::default());
    kernel.expect(&store);
    kernel.run(&table.sync(&store));
    store.take_dirty();
    let events = [
        Step::ServiceGone { name: 0 },
        Step::Service(ServiceStep { name: 1, vips: 5, ports: 1, ..ServiceStep::default() }),
    ];
    events.iter().flat_map(|step| cluster.apply(step)).for_each(|event| drop(store.apply(event)));
    kernel.expect(&store);
    let dirty = store.take_dirty();
    kernel.run(&table.update(&store, dirty));
    assert_eq!((kernel.table(), table.problems.iter().count()), (naive(&store), 0));
}

/// A Service with these ports.
fn many_ports(name: &str, address: &str, ports: std::ops::Range<u16>) -> Event {
    let ports: Vec<_> = ports.map(|port| json!({"name": format!("p{port}"), "port": port})).collect();
    let object = json!({"metadata": {"name": name}, "spec": {"clusterIP": address, "ports": ports}});
    Event::Service(Box::new(serde_json::from_value(object).unwrap()))
}

/// Replaces all objects by these.
fn list(store: &mut Store, objects: Vec<Event>) {
    let kinds = [ResourceKind::Nodes, ResourceKind::Services, ResourceKind::EndpointSlices];
    let events = kinds.into_iter().map(Event::ListStarted).chain(objects).chain(kinds.into_iter().map(Event::ListDone));
    events.for_each(|event| drop(store.apply(event)));
}

/// A full table: one Service that fits and one with ports of which none does.
fn full() -> (Store, TablePlanner) {
    let mut store = store(Vec::new());
    let events = [many_ports("fits", "10.0.0.1", 1..4), many_ports("large", "10.0.0.2", 1..41)];
    list(&mut store, events.into_iter().collect());
    let mut table = TablePlanner::new(Limits { frontends: 4, ..AMPLE }, KernelTable::default());
    table.sync(&store);
    (store, table)
}

fn texts(table: &TablePlanner) -> Vec<String> {
    table.problems().iter().map(ToString::to_string).collect()
}

#[test]
fn frontends_that_do_not_fit_are_one_problem_of_their_service() {
    let (_, table) = full();
    let problems = texts(&table);
    assert_eq!(
        problems,
        [
            "Service default/large: no room for more than 4 frontends; 10.0.0.2:2/TCP, 10.0.0.2:3/TCP, \
             10.0.0.2:4/TCP and 36 more are not served",
            "Service default/fits: spec.clusterIP: no room for more than 4 frontends; calls to other ports of 10.0.0.1 \
             are not refused",
            "Service default/large: spec.clusterIP: no room for more than 4 frontends; calls to other ports of \
             10.0.0.2 are not refused",
        ]
    );
}

#[test]
fn a_service_without_room_is_not_planned_again_before_room_is_freed() {
    let (mut store, mut table) = full();
    let seen = table.problems_revision();
    let empty = json!({"metadata": {"name": "other"}, "spec": {"clusterIP": "None", "ports": []}});
    let other = Event::Service(Box::new(serde_json::from_value(empty).unwrap()));
    assert_eq!(follow(&mut store, &mut table, other), []);
    assert_eq!(table.problems_revision(), seen, "nothing was tried");
}

#[test]
fn freed_room_is_used_in_the_same_update() {
    let (mut store, mut table) = full();
    let served = |table: &TablePlanner, name| table.rows().iter().filter(|row| &*row.service.name == name).count();
    assert_eq!((served(&table, "fits"), served(&table, "large")), (3, 1));
    follow(&mut store, &mut table, Event::Deleted(ResourceKind::Services, ObjectName::new("default", "fits")));
    assert_eq!((served(&table, "fits"), served(&table, "large")), (0, 3), "and its ClusterIP");
    assert_eq!(table.update(&store, BTreeSet::new()), [], "nothing is left to retry");
}

#[test]
fn a_deleted_service_no_longer_waits_for_room() {
    let (mut store, mut table) = full();
    store.apply(many_ports("larger", "10.0.0.3", 1..41));
    let dirty = store.take_dirty();
    table.update(&store, dirty);
    let waiting = table.without_capacity();
    follow(&mut store, &mut table, Event::Deleted(ResourceKind::Services, ObjectName::new("default", "larger")));
    assert_eq!(table.without_capacity(), waiting - 2, "the Service and its ClusterIP");
}

/// The new owner of a frontend has too many endpoints, so the frontend keeps another Service's set, and does so over a
/// restart; when the owner moves to another address, that set must not move with it.
#[test]
fn a_set_from_before_the_restart_serves_no_other_frontend() {
    let slice = |name, service, endpoints| {
        Step::Slice(SliceStep { name, service, v6: true, ports: 1, endpoints, ..SliceStep::default() })
    };
    let steps = [
        Step::Service(ServiceStep { name: 2, vips: 8, ports: 3, ..ServiceStep::default() }),
        slice(2, 2, 0b1),
        Step::Service(ServiceStep { vips: 8, ports: 1, ..ServiceStep::default() }),
        slice(0, 0, 0b11_1000),
        Step::Restart,
        Step::Service(ServiceStep { ports: 1, ..ServiceStep::default() }),
    ];
    play(&steps, Limits { frontends: 6, sets: 3, slots: 1, run_backends: 1, ..AMPLE }, |_, _, _| ());
}

#[test]
fn bootstrap_adds_and_never_replaces() {
    let (store, _, kernel) = two_endpoints();
    let mut cluster = Cluster::default();
    cluster.apply(&Step::Service(ServiceStep { ports: 0b11, ..ServiceStep::default() }));
    cluster.apply(&Step::Slice(SliceStep { ports: 0b11, endpoints: 0b1000, ..SliceStep::default() }));
    let bootstrap = self::store(cluster.lists());
    let mut table = TablePlanner::new(AMPLE, kernel.read_back());
    let ops = table.bootstrap(&bootstrap);
    let puts = ops.iter().filter(|op| matches!(op, Op::PutFrontend { .. })).count();
    assert_eq!(puts, 2, "port 81 in both families; port 80 is known: {ops:?}");
    assert!(!ops.iter().any(|op| matches!(op, Op::DeleteFrontend { .. } | Op::DeleteAddress(_))));
    let after = table.sync(&store);
    let deleted = after.iter().filter(|op| matches!(op, Op::DeleteFrontend { .. })).count();
    assert_eq!(deleted, 2, "the first complete sync takes the rest of the bootstrap away: {after:?}");
}

#[test]
fn the_api_server_never_loses_its_last_endpoint() {
    let object = |endpoints: serde_json::Value| -> Vec<Event> {
        let service = json!({"metadata": {"name": "kubernetes", "namespace": "default"},
            "spec": {"clusterIP": "10.96.0.1", "ports": [{"name": "https", "port": 443}]}});
        let slice = json!({"metadata": {"name": "kubernetes", "namespace": "default",
                                        "labels": {"kubernetes.io/service-name": "kubernetes"}},
            "addressType": "IPv4", "ports": [{"name": "https", "port": 6443}], "endpoints": endpoints});
        vec![
            Event::ListStarted(ResourceKind::Nodes),
            Event::ListDone(ResourceKind::Nodes),
            Event::ListStarted(ResourceKind::Services),
            Event::Service(serde_json::from_value(service).unwrap()),
            Event::ListDone(ResourceKind::Services),
            Event::ListStarted(ResourceKind::EndpointSlices),
            Event::EndpointSlice(serde_json::from_value(slice).unwrap()),
            Event::ListDone(ResourceKind::EndpointSlices),
        ]
    };
    let mut store = store(object(json!([{"addresses": ["10.0.0.1"]}])));
    let mut table = TablePlanner::new(AMPLE, KernelTable::default());
    table.sync(&store);
    object(json!([])).into_iter().for_each(|event| drop(store.apply(event)));
    let dirty = store.take_dirty();
    assert_eq!(table.update(&store, dirty), []);
    assert_eq!(table.problems().len(), 1);
    assert_eq!(table.without_capacity(), 0, "room is not the matter");
    assert_eq!(table.rows()[0].backends().len(), 1);
}

/// Only a complete store shows whether a ClusterIP has other ports.
#[test]
fn bootstrap_makes_no_address_known() {
    let mut cluster = Cluster::default();
    cluster.apply(&Step::Service(ServiceStep { ports: 1, ..ServiceStep::default() }));
    let store = store(cluster.lists());
    let mut table = TablePlanner::new(AMPLE, KernelTable::default());
    let is_address = |op: &&Op| matches!(op, Op::PutAddress(_));
    assert_eq!(table.bootstrap(&store).iter().filter(is_address).count(), 0);
    assert_eq!(table.sync(&store).iter().filter(is_address).count(), 2);
}

/// State that an agent killed at the wrong moment, or another build, may leave.
#[test]
fn errors_in_the_kernels_table_are_repaired() {
    let (store, _, mut kernel) = two_endpoints();
    // Wider than need be, then too narrow.
    kernel.filter.v4 |= 1;
    kernel.run(&TablePlanner::new(AMPLE, kernel.read_back()).sync(&store));
    assert_eq!(kernel.filter, needed_filter(&kernel));
    let read_back = KernelTable { filter: Filter::default(), ..kernel.read_back() };
    let ops = TablePlanner::new(AMPLE, read_back).sync(&store);
    assert_eq!(ops, [Op::Drain, Op::SetFilter(kernel.filter)]);
    // A frontend with the set of unknown ports, an address that no Service claims, and one that is missing.
    let mut read_back = kernel.read_back();
    let (&frontend, _) = read_back.frontends.iter().next().unwrap();
    read_back.frontends.insert(frontend, 0);
    read_back.sets.insert(0, KernelSet::default());
    read_back.addresses.remove(&frontend.address);
    let stranger = Address::from_octets([1; 16]);
    read_back.addresses.insert(stranger);
    let ops = TablePlanner::new(AMPLE, read_back).sync(&store);
    let mends = |wanted: fn(&Op) -> bool| ops.iter().any(wanted);
    assert!(mends(|op| matches!(op, Op::PutFrontend { set, .. } if *set != 0)), "{ops:?}");
    assert!(ops.contains(&Op::PutAddress(frontend.address)) && ops.contains(&Op::DeleteAddress(stranger)), "{ops:?}");
}

/// A Service with these ports on a ClusterIP and so many external addresses.
fn external(name: &str, number: u8, ports: u16, external: u32) -> Event {
    let ports: Vec<_> = (1..=ports).map(|port| json!({"name": format!("p{port}"), "port": port})).collect();
    let base = u32::from_be_bytes([198, 18, 0, 0]) + (u32::from(number) << 12);
    let ips: Vec<_> = (0..external).map(|index| std::net::Ipv4Addr::from_bits(base + index).to_string()).collect();
    let (namespace, name) = name.split_once('/').unwrap();
    let object = json!({"metadata": {"name": name, "namespace": namespace},
                        "spec": {"clusterIP": format!("10.0.0.{number}"), "ports": ports, "externalIPs": ips}});
    Event::Service(Box::new(serde_json::from_value(object).unwrap()))
}

fn sources(table: &TablePlanner) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for row in table.rows() {
        *counts.entry(format!("{} {}", row.service, row.source.as_str())).or_default() += 1;
    }
    counts
}

fn counts<const COUNT: usize>(of: [(&str, usize); COUNT]) -> BTreeMap<String, usize> {
    of.into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
}

/// Precedence, whatever came first: the API server, then ClusterIPs, then the rest.
#[test]
fn external_addresses_give_way_to_cluster_ips() {
    let limits = Limits { frontends: 12, ..GROWING };
    let events = [external("a/greedy", 1, 2, 20), external("b/web", 2, 3, 0), external("default/kubernetes", 3, 3, 1)];
    // Of 12 places ClusterIPs take 8, and that they are known takes 3.
    let expected = counts([("a/greedy ClusterIP", 2), ("b/web ClusterIP", 3), ("default/kubernetes ClusterIP", 3)]);
    let cluster_ips = |table: &TablePlanner| {
        let (of_cluster, others): (BTreeMap<_, _>, BTreeMap<_, _>) =
            sources(table).into_iter().partition(|(name, _)| name.ends_with("ClusterIP"));
        assert_eq!(others.values().sum::<usize>(), 1, "{others:?}");
        of_cluster
    };
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut store = store(Vec::new());
        list(&mut store, Vec::new());
        let (mut table, mut kernel) = (TablePlanner::new(limits, KernelTable::default()), Kernel::default());
        kernel.run(&table.sync(&store));
        for index in order {
            store.apply(events[index].clone());
            kernel.expect(&store);
            let dirty = store.take_dirty();
            kernel.run(&table.update(&store, dirty));
        }
        assert_eq!(cluster_ips(&table), expected, "in the order {order:?}");
        assert!((1..=2).contains(&table.without_capacity()), "external addresses: {:?}", texts(&table));
        let mut fresh = TablePlanner::new(limits, KernelTable::default());
        fresh.sync(&store);
        assert_eq!(cluster_ips(&fresh), expected);
    }
}

#[test]
fn the_api_server_comes_before_other_cluster_ips() {
    let limits = Limits { frontends: 6, ..GROWING };
    let mut store = store(Vec::new());
    list(&mut store, vec![external("a/web", 1, 5, 0)]);
    let (mut table, mut kernel) = (TablePlanner::new(limits, KernelTable::default()), Kernel::default());
    kernel.expect(&store);
    kernel.run(&table.sync(&store));
    store.apply(external("default/kubernetes", 2, 2, 0));
    kernel.expect(&store);
    let dirty = store.take_dirty();
    kernel.run(&table.update(&store, dirty));
    assert_eq!(sources(&table).get("default/kubernetes ClusterIP"), Some(&2));
    assert!(kernel.addresses.contains(&parse_address("10.0.0.2").unwrap()), "{:?}", texts(&table));
    assert_eq!(table.without_capacity(), 1, "{:?}", texts(&table));
}

#[test]
fn external_addresses_together_have_a_bound() {
    let limits = Limits { external_frontends: 5, ..GROWING };
    let mut store = store(Vec::new());
    list(&mut store, vec![external("a/greedy", 1, 2, 3), external("b/late", 2, 1, 1)]);
    let mut table = TablePlanner::new(limits, KernelTable::default());
    table.sync(&store);
    assert_eq!(sources(&table).values().sum::<usize>(), 3 + 5);
    let problem = texts(&table);
    assert!(
        problem[0].contains("no room for more than 5 frontends of external addresses and node ports"),
        "{problem:?}"
    );
    let ops = follow(&mut store, &mut table, Event::Deleted(ResourceKind::Services, ObjectName::new("a", "greedy")));
    assert_ne!(ops, []);
    assert_eq!(
        (sources(&table), table.without_capacity()),
        (counts([("b/late ClusterIP", 1), ("b/late ExternalIP", 1)]), 0)
    );
}

/// 16 KB of YAML may ask for a hundred thousand frontends.
#[test]
fn one_service_has_a_bound_and_keeps_its_cluster_ips() {
    let mut store = store(Vec::new());
    list(&mut store, vec![external("a/greedy", 1, 100, 1_000)]);
    let rows = resolve(&store);
    assert_eq!(rows.len(), SERVICE_FRONTENDS_MAX);
    let all = rows.iter().filter(|row| row.source == FrontendSource::ClusterIp).count();
    assert_eq!(all, 100);
    let limits = Limits { frontends: 1 << 18, external_frontends: 1 << 17, sets: 1 << 10, ..GROWING };
    let mut table = TablePlanner::new(limits, KernelTable::default());
    table.sync(&store);
    assert_eq!(table.rows(), rows);
    let problems = texts(&table);
    assert!(problems.len() == 1 && problems[0].contains("100 ports on 1001 addresses are more than"), "{problems:?}");
    assert_eq!(table.without_capacity(), 0, "it is a bound, not a lack of room");
}

#[test]
fn one_service_has_a_bound_of_backends() {
    let limits = Limits { service_slots: 5, ..AMPLE };
    let mut cluster = Cluster::default();
    for name in 0..2 {
        cluster.apply(&Step::Service(ServiceStep { name, vips: name, ports: 0b11, ..ServiceStep::default() }));
        let slice = SliceStep { name, service: name, ports: 0b11, endpoints: 0b111, ..SliceStep::default() };
        cluster.apply(&Step::Slice(slice));
    }
    let store = store(cluster.lists());
    let (mut table, mut kernel) = (TablePlanner::new(limits, KernelTable::default()), Kernel::default());
    kernel.expect(&store);
    kernel.run(&table.sync(&store));
    // The second port of each has no room, in either family; the first has three backends of IPv4.
    assert_eq!(table.problems.iter().count(), 2, "{:?}", texts(&table));
    assert_eq!(table.used().slots, 6);
    assert_eq!(table.without_capacity(), 0);
}

/// Each wait for programs takes some ten milliseconds, in the one task that takes events.
#[test]
fn frontends_that_change_their_sets_together_wait_once() {
    let mut cluster = Cluster::default();
    for name in 0..40 {
        let extras = 1 << 3 | 1 << 5;
        cluster.apply(&Step::Service(ServiceStep { name, vips: 5, ports: 7, extras, ..ServiceStep::default() }));
        let mut service = cluster.services[&name].clone();
        let ip = format!("203.0.113.{name}");
        service.status = serde_json::from_value(json!({"loadBalancer": {"ingress": [{"ip": ip}]}})).unwrap();
        cluster.services.insert(name, service);
        cluster.apply(&Step::Slice(SliceStep { name, service: name, ports: 7, ..endpoints(1) }));
    }
    let mut store = store(cluster.lists());
    let limits = Limits { frontends: 4_096, sets: 4_096, slots: 4_096, external_frontends: 4_096, ..GROWING };
    let (mut table, mut kernel) = (TablePlanner::new(limits, KernelTable::default()), Kernel::default());
    kernel.expect(&store);
    kernel.run(&table.sync(&store));
    store.apply(Event::PodIps(vec![parse_address("10.9.0.1").unwrap()]));
    kernel.expect(&store);
    let dirty = store.take_dirty();
    let ops = table.update(&store, dirty);
    kernel.run(&ops);
    assert_eq!(kernel.table(), naive(&store));
    let waits = ops
        .iter()
        .filter(|op| matches!(op, Op::Drain | Op::ReplaceFrontends { .. } | Op::ResizeBackends(_) | Op::ResizeSets(_)));
    let waits: Vec<_> = waits.map(std::mem::discriminant).collect();
    assert!(waits.len() <= 3, "{} waits for {} Services", waits.len(), store.service_names().len());
    // Where there was no memory for a second map, they are replaced one by one.
    let mut table = TablePlanner::new(Limits { may_replace: false, ..limits }, kernel.read_back());
    store.apply(Event::PodIps(Vec::new()));
    kernel.expect(&store);
    kernel.run(&table.sync(&store));
    assert_eq!(kernel.table(), naive(&store));
}

/// Two small objects may claim tens of thousands of frontends.
#[test]
fn frontends_lost_to_another_service_are_one_problem() {
    let mut store = store(Vec::new());
    let events = [many_ports("a", "10.0.0.1", 1..31), many_ports("b", "10.0.0.1", 11..31)];
    list(&mut store, events.into_iter().collect());
    let mut table = TablePlanner::new(AMPLE, KernelTable::default());
    table.sync(&store);
    assert_eq!(
        texts(&table),
        ["Service default/b: 10.0.0.1:11/TCP, 10.0.0.1:12/TCP, 10.0.0.1:13/TCP and 17 more belong to Service \
             default/a, which comes first by name"]
    );
    let seen = table.problems_revision();
    assert_ne!(seen, 0);
    let slice = json!({"metadata": {"name": "b-1", "labels": {"kubernetes.io/service-name": "b"}},
        "addressType": "IPv4", "ports": [{"name": "p11", "port": 80}], "endpoints": [{"addresses": ["10.1.0.1"]}]});
    let slice = Event::EndpointSlice(serde_json::from_value(slice).unwrap());
    assert_ne!(follow(&mut store, &mut table, slice), []);
    assert_eq!(table.problems_revision(), seen, "endpoints have nothing to do with it");
    follow(&mut store, &mut table, Event::Deleted(ResourceKind::Services, ObjectName::new("default", "a")));
    assert_ne!(table.problems_revision(), seen);
    assert_eq!(texts(&table), [""; 0]);
}

/// The reserve holds, whatever the other Services have taken before.
#[test]
fn the_api_server_has_sets_and_slots_of_its_own() {
    let reserved = Reserve { sets: 1, slots: 2 };
    let limits = Limits { sets: 4, slots: 10, reserved, ..GROWING };
    let mut cluster = Cluster::default();
    for name in 0..3 {
        cluster.apply(&Step::Service(ServiceStep { name, vips: name * 5, ports: 0b11, ..ServiceStep::default() }));
        let slice = SliceStep { name, service: name, ports: 0b11, endpoints: 0b111, ..SliceStep::default() };
        cluster.apply(&Step::Slice(slice));
    }
    let mut store = store(cluster.lists());
    let (mut table, mut kernel) = (TablePlanner::new(limits, KernelTable::default()), Kernel::default());
    kernel.expect(&store);
    kernel.run(&table.sync(&store));
    assert_ne!(table.without_capacity(), 0);
    store.apply(external("default/kubernetes", 9, 1, 0));
    let slice = json!({"metadata": {"name": "kubernetes", "namespace": "default",
                                    "labels": {"kubernetes.io/service-name": "kubernetes"}},
        "addressType": "IPv4", "ports": [{"name": "p1", "port": 6443}],
        "endpoints": [{"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2"]}]});
    store.apply(Event::EndpointSlice(serde_json::from_value(slice).unwrap()));
    kernel.expect(&store);
    let dirty = store.take_dirty();
    kernel.run(&table.update(&store, dirty));
    let row = table.rows().into_iter().find(|row| &*row.service.name == "kubernetes").unwrap();
    assert_eq!(row.backends().len(), 2);
}
