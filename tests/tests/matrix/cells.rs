//! The matrix: every kind of socket, form of address, call and destination. Each cell runs the same steps twice, first
//! against a host without programs, then with the programs attached. The results must be the same, so that an
//! application cannot distinguish a ClusterIP from a host.
//!
//! | destination | equivalent |
//! |---|---|
//! | a Service that forwards | a host that answers |
//! | a Service that drops | a host that the routing table calls unreachable (EHOSTUNREACH at once) |
//! | a Service that refuses, also an unknown port or protocol | the same, with ECONNREFUSED |
//! | either, for a connected datagram socket | a host where nobody listens (ECONNREFUSED after a datagram) |
//! | no Service: a host that answers, one without a route | itself |

use std::{
    collections::BTreeMap,
    io::{self, Write},
    time::Instant,
};

use cproxy_tests::{
    Server,
    manifest::{Endpoint, Service},
    witness::Witness,
};
use serde_json::{Value, json};

use crate::{
    play::{Cast, Party, SOURCE, STRANGER, play},
    script::{Call, Role, script},
    world::{
        Form, Host, MatrixSandbox, OTHER_NODE, OWN_ADDRESSES, POD_PORT, PORT, SocketKind, count_of_lost_answers, host,
        pod, ready, service, slices, vip,
    },
};

/// Number of differing cells that are shown in full.
const SHOWN_MAX: usize = 12;

const TARGET_PODS: [u8; 3] = [1, 2, 3];
const OTHER_PODS: [u8; 3] = [4, 5, 6];
const TARGET_SERVERS: &[&str] = &["pod-1", "pod-2", "pod-3"];
const OTHER_SERVERS: &[&str] = &["pod-4", "pod-5", "pod-6"];

/// Hosts that play the roles without programs; the last one also with programs.
const HOSTS: [u8; 3] = [1, 2, 3];

const UNREACHABLE: Host = Host::new([198, 51, 100, 1], [0x2001, 0xdb8, 0xdead, 0, 0, 0, 0, 1]);
const WITHOUT_ROUTE: Host = Host::new([203, 0, 113, 1], [0x2001, 0xdb8, 0xbeef, 0, 0, 0, 0, 1]);

const FORWARDING: u8 = 10;
const OTHER: u8 = 11;
const EMPTY: u8 = 12;
const ELSEWHERE: u8 = 13;
const TCP_ONLY: u8 = 14;
const UDP_ONLY: u8 = 15;

/// Target of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Destination {
    /// A Service with three pods.
    Forward,
    /// A Service without endpoints.
    Refuse,
    /// A ClusterIP at a port that it does not have.
    RefusePort,
    /// A ClusterIP at a port of the other protocol.
    RefuseProtocol,
    /// A Service whose endpoints are all on another node, where they do not count.
    Drop,
    /// A host that answers.
    NoService,
    /// An address to which there is no route.
    NoRoute,
}

/// Equivalent of a destination without programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reference {
    Host,
    Unreachable,
    /// To streams and unconnected datagram sockets it is unreachable.
    Closed,
    WithoutRoute,
}

impl Destination {
    const ALL: [Self; 7] = [
        Self::Forward,
        Self::Refuse,
        Self::RefusePort,
        Self::RefuseProtocol,
        Self::Drop,
        Self::NoService,
        Self::NoRoute,
    ];

    fn reference(self, kind: SocketKind) -> Reference {
        match self {
            Self::Forward | Self::NoService => Reference::Host,
            Self::Refuse | Self::RefusePort | Self::RefuseProtocol | Self::Drop if kind == SocketKind::Tcp => {
                Reference::Unreachable
            }
            Self::Refuse | Self::RefusePort | Self::RefuseProtocol | Self::Drop => Reference::Closed,
            Self::NoRoute => Reference::WithoutRoute,
        }
    }

    /// Expected observations, from those of the reference.
    fn expected(self, reference: &[String]) -> Vec<String> {
        let refuses = matches!(self, Self::Refuse | Self::RefusePort | Self::RefuseProtocol);
        let translate = |line: &String| {
            if refuses { line.replace("EHOSTUNREACH", "ECONNREFUSED") } else { line.clone() }
        };
        reference.iter().map(translate).collect()
    }

    fn party(self, kind: SocketKind) -> Party {
        let party = |host, port, servers| Party { host, port, closed: None, servers };
        match (self, kind) {
            (Self::Forward, _) => party(vip(FORWARDING), PORT, TARGET_SERVERS),
            (Self::Refuse, _) => party(vip(EMPTY), PORT, &[]),
            (Self::RefusePort, _) => party(vip(FORWARDING), PORT + 1, &[]),
            (Self::RefuseProtocol, SocketKind::Tcp) => party(vip(UDP_ONLY), PORT, &[]),
            (Self::RefuseProtocol, _) => party(vip(TCP_ONLY), PORT, &[]),
            (Self::Drop, _) => party(vip(ELSEWHERE), PORT, &[]),
            (Self::NoService, _) => Reference::Host.party(),
            (Self::NoRoute, _) => Reference::WithoutRoute.party(),
        }
    }
}

impl Reference {
    const ALL: [Self; 4] = [Self::Host, Self::Unreachable, Self::Closed, Self::WithoutRoute];

    fn party(self) -> Party {
        match self {
            Self::Host => Party { host: host(1), port: PORT, closed: None, servers: &["host-1"] },
            Self::Unreachable => Party { host: UNREACHABLE, port: PORT, closed: None, servers: &[] },
            Self::Closed => Party { closed: Some((host(1), PORT + 1)), ..Self::Unreachable.party() },
            Self::WithoutRoute => Party { host: WITHOUT_ROUTE, port: PORT, closed: None, servers: &[] },
        }
    }
}

fn cast(target: Party, other: Party) -> Cast {
    let plain = Party { host: host(3), port: PORT, closed: None, servers: &["host-3"] };
    [(Role::Target, target), (Role::Other, other), (Role::Plain, plain)].into()
}

/// The application's side of a cell.
type Row = (SocketKind, Form, Call);

fn rows() -> impl Iterator<Item = Row> {
    let forms = |kind| Form::ALL.map(|form| (kind, form));
    let calls = |(kind, form)| Call::ALL.map(|call| (kind, form, call));
    SocketKind::ALL.into_iter().flat_map(forms).flat_map(calls)
}

fn objects() -> impl Iterator<Item = Value> {
    let elsewhere = service("elsewhere", ELSEWHERE).spec("internalTrafficPolicy", json!("Local"));
    let one_protocol = |name, number| Service::new(name).cluster_ips(vip(number).addresses());
    let alone = |service: &Service, name: &'static str| {
        [service.clone().into()].into_iter().chain(slices(name, &TARGET_PODS, |_, address| Endpoint::ready(address)))
    };
    let on_other_node = |_, address| Endpoint::ready(address).node(OTHER_NODE);
    let tcp_only = one_protocol("tcp-only", TCP_ONLY).tcp("tcp", PORT, POD_PORT);
    let udp_only = one_protocol("udp-only", UDP_ONLY).udp("udp", PORT, POD_PORT);
    ready("target", FORWARDING, &TARGET_PODS)
        .into_iter()
        .chain(ready("other", OTHER, &OTHER_PODS))
        .chain([service("empty", EMPTY).into(), elsewhere.into()])
        .chain(slices("elsewhere", &TARGET_PODS, on_other_node))
        .chain(alone(&tcp_only, "tcp-only"))
        .chain(alone(&udp_only, "udp-only"))
}

/// Starts servers on every pod and host, without programs.
fn stage(witness: &Witness) -> (MatrixSandbox, Vec<Server>) {
    let pods = TARGET_PODS.into_iter().chain(OTHER_PODS);
    let pods = pods.map(|number| (pod(number), POD_PORT, format!("pod-{number}")));
    let hosts = HOSTS.map(|number| (host(number), PORT, format!("host-{number}")));
    let all: Vec<_> = pods.chain(hosts).collect();
    let world = MatrixSandbox::new(all.iter().map(|(host, ..)| *host).chain([STRANGER, SOURCE]));
    world.ip("route add unreachable 198.51.100.0/24");
    world.ip("-6 route add unreachable 2001:db8:dead::/48");
    let mut servers = Vec::new();
    for (host, port, name) in &all {
        for address in host.addresses() {
            servers.push(witness.tcp(&world.sandbox, (address, *port).into(), name));
            servers.push(witness.udp(&world.sandbox, (address, *port).into(), name));
        }
    }
    (world, servers)
}

/// Observations of each reference.
fn references(witness: &Witness) -> BTreeMap<(Row, Reference), Vec<String>> {
    let other = Party { host: host(2), port: PORT, closed: None, servers: &["host-2"] };
    let mut seen = BTreeMap::new();
    for reference in Reference::ALL {
        let cast = cast(reference.party(), other);
        for (kind, form, call) in rows() {
            let trace = play(&cast, witness, form, kind, &script(kind, call));
            let name = format!("{reference:?} / {kind:?} / {form} / {call:?}");
            assert_eq!(count_of_lost_answers(), 0, "answers are missing from {name}: {trace:#?}");
            seen.insert(((kind, form, call), reference), trace);
        }
    }
    seen
}

/// Full text of a differing cell.
fn difference(expected: &[String], seen: &[String]) -> String {
    let missing = "(nothing)".to_owned();
    let lines = (0..expected.len().max(seen.len())).map(|line| {
        let (expected, seen) = (expected.get(line).unwrap_or(&missing), seen.get(line).unwrap_or(&missing));
        if expected == seen { format!("    {seen}\n") } else { format!("  ! {seen}\n    instead of {expected}\n") }
    });
    lines.collect()
}

/// Runs all cells of one destination and returns those that differ, by name, with their differences.
fn cells_that_differ(
    destination: Destination,
    rows: impl Iterator<Item = Row>,
    witness: &Witness,
    references: &BTreeMap<(Row, Reference), Vec<String>>,
) -> Vec<(String, String)> {
    let other = Party { host: vip(OTHER), port: PORT, closed: None, servers: OTHER_SERVERS };
    let mut differ = Vec::new();
    for (kind, form, call) in rows {
        let seen = play(&cast(destination.party(kind), other), witness, form, kind, &script(kind, call));
        let expected = destination.expected(&references[&((kind, form, call), destination.reference(kind))]);
        if seen != expected {
            differ.push((format!("{destination:?} / {kind:?} / {form} / {call:?}"), difference(&expected, &seen)));
        }
    }
    differ
}

#[test]
fn every_cell_shows_a_service_like_a_host() {
    let started = Instant::now();
    let witness = Witness::default();
    let (mut world, _servers) = stage(&witness);
    let references = references(&witness);
    world.write(objects());
    world.start_agent_with(&OWN_ADDRESSES);
    let mut differ = Vec::new();
    for destination in Destination::ALL {
        let these = cells_that_differ(destination, rows(), &witness, &references);
        println!("{destination:?}: {} of {} cells differ", these.len(), rows().count());
        differ.extend(these);
    }
    let cells = Destination::ALL.len() * rows().count();
    assert_eq!(cells, 7 * 3 * 4 * 14, "destinations, kinds of sockets, forms of addresses, calls");
    // A second pass checks TCP sockets when all regular places are taken.
    // Without an agent, which would free them: the hooks stay.
    world.kill_agent();
    world.occupy_tcp_places();
    for destination in Destination::ALL {
        let tcp = rows().filter(|(kind, ..)| *kind == SocketKind::Tcp);
        let these = cells_that_differ(destination, tcp, &witness, &references).into_iter();
        differ.extend(these.map(|(name, difference)| (format!("{name}, without a place"), difference)));
    }
    // Written to stderr, so that it is also shown when the test passes.
    writeln!(io::stderr(), "{cells} cells in {:?}, none left out; {} differ", started.elapsed(), differ.len()).unwrap();
    for (name, difference) in differ.iter().take(SHOWN_MAX) {
        println!("{name}:\n{difference}");
    }
    let names: Vec<_> = differ.iter().map(|(name, _)| name.as_str()).collect();
    assert!(names.is_empty(), "{} cells differ:\n{}", names.len(), names.join("\n"));
}
