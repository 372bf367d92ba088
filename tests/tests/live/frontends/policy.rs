//! Policies of a Service, with the frontends and clients to which each applies.

use std::{
    io,
    net::{TcpStream, UdpSocket},
};

use cproxy_tests::{
    echo,
    manifest::{Endpoint, Service},
    sandbox::Sandbox,
    world::{OWN_ADDRESSES, PORT, ready, slices},
};
use serde_json::{Value, json};

use super::world::{ASKS, BALANCER_IP, CLUSTER_IP, FRONTENDS, all_are, ask_from, connect, service, start};

const PODS: u8 = 3;
/// Arguments to close sockets in every case; sockets of pods that still serve are never closed, in any mode.
const CLOSE_ALL: [&str; 2] = ["--terminate-sockets", "all"];
const NODE: [&str; 5] = ["--node-ip", "192.0.2.10", "2001:db8:2::a", "--node-name", "here"];
const OWN: [&str; 3] = ["--pod-ip", "10.0.0.2", "fd00::2"];

fn with(service: Service) -> Vec<Value> {
    std::iter::once(service.into()).chain(ready(1..=PODS)).collect()
}

fn internal_local() -> Service {
    service().spec("internalTrafficPolicy", json!("Local"))
}

/// A Service whose load balancer's addresses only these ranges may use.
fn source_ranges(ranges: &[&str]) -> Service {
    service().spec("loadBalancerSourceRanges", json!(ranges))
}

/// A connected datagram socket is refused by the VM itself, as where nobody listens.
fn assert_drops(error: &io::Error, how: &str, what: &str) {
    let is_connected = how == "connected UDP";
    let expected = if is_connected { io::ErrorKind::ConnectionRefused } else { io::ErrorKind::HostUnreachable };
    assert_eq!(error.kind(), expected, "{what}: {error}");
}

#[test]
fn internal_traffic_policy_is_about_cluster_ips_only() {
    let flags = [NODE.as_slice(), &OWN_ADDRESSES].concat();
    let world = start(PODS, with(internal_local()), &flags, |_| ());
    for (kind, addresses, ports) in FRONTENDS {
        for (how, index, ask) in ASKS {
            for to in addresses.forms(ports[index]) {
                match (kind, ask(to)) {
                    ("ClusterIP", result) => assert_drops(&result.unwrap_err(), how, &format!("{to} {how}")),
                    (_, result) => drop(result.unwrap_or_else(|error| panic!("{kind} {to} {how}: {error}"))),
                }
            }
        }
    }
    // One of the pods is on this node: the ClusterIP leads to that one, and all other frontends to all.
    let nodes =
        slices([2, 1], |number, address| Endpoint::ready(address).node(if number == 2 { "here" } else { "there" }));
    let objects = std::iter::once(internal_local().into()).chain(nodes);
    world.set(objects, |rows| all_are(rows, CLUSTER_IP, "forward"));
    for (kind, addresses, ports) in FRONTENDS {
        for (how, index, ask) in ASKS {
            for to in addresses.forms(ports[index]) {
                // Fifty even choices between two are all the same once in 2^49 times.
                let mut answers: Vec<_> = (0..50).map(|_| ask(to).unwrap()).collect();
                answers.sort();
                answers.dedup();
                let expected = if kind == "ClusterIP" { vec!["pod-2"] } else { vec!["pod-1", "pod-2"] };
                assert_eq!(answers, expected, "{kind} {to} {how}");
            }
        }
    }
}

#[test]
fn source_ranges_are_about_load_balancers_addresses_only() {
    let flags = [NODE.as_slice(), &OWN].concat();
    let own = |sandbox: &Sandbox| sandbox.add_addresses(["10.0.0.2", "fd00::2"]);
    let world = start(PODS, with(source_ranges(&["10.9.0.0/16", "fd09::/16"])), &flags, own);
    let expect = |balancer_is_open: [bool; 3]| {
        for (kind, addresses, ports) in FRONTENDS {
            for (how, index, ask) in ASKS {
                for (to, is_open) in addresses.forms(ports[index]).into_iter().zip(balancer_is_open) {
                    let what = format!("{kind} {to} {how}");
                    match ask(to) {
                        Ok(_) => assert!(kind != "LoadBalancerIP" || is_open, "{what}"),
                        Err(error) => {
                            assert_drops(&error, how, &what);
                            assert!(kind == "LoadBalancerIP" && !is_open, "{what}");
                        }
                    }
                }
            }
        }
    };
    expect([false; 3]);
    let v6_rows_forward = |rows: &[Value]| {
        rows.iter().filter(|row| row["address"] == BALANCER_IP.v6.to_string()).all(|row| row["action"] == "forward")
    };
    // Ranges of one family do not affect the other.
    world.set(with(source_ranges(&["10.9.0.0/16"])), v6_rows_forward);
    expect([false, true, false]);
    world.set(with(source_ranges(&["10.0.0.2/32", "fd00::/64"])), |rows| all_are(rows, BALANCER_IP, "forward"));
    expect([true; 3]);
}

#[test]
fn a_client_keeps_its_backend_whichever_frontend_it_uses() {
    // If each frontend had a choice of its own, all four would have the same pod by chance once in 27 times, and there
    // are twelve.
    for round in 0..3 {
        let _world = start(PODS, with(service().client_ip_affinity(10_800)), &NODE, |_| ());
        for (index, port_kind) in ["TCP", "UDP"].into_iter().enumerate() {
            for form in 0..2 {
                let asks = ASKS.iter().filter(|(_, of, _)| *of == index);
                let answers = asks.flat_map(|(_, _, ask)| {
                    FRONTENDS.map(|(_, addresses, ports)| ask(addresses.forms(ports[index])[form]).unwrap())
                });
                let mut answers: Vec<_> = answers.collect();
                answers.dedup();
                assert_eq!(answers.len(), 1, "round {round}, {port_kind}: {answers:?}");
            }
        }
    }
}

/// Connections and flows from before a change, through each kind of frontend in both families.
struct Standing {
    tcp: Vec<TcpStream>,
    connected: Vec<(UdpSocket, String)>,
    unconnected: Vec<(UdpSocket, std::net::SocketAddr, String)>,
}

impl Standing {
    fn open() -> Self {
        let mut standing = Self { tcp: Vec::new(), connected: Vec::new(), unconnected: Vec::new() };
        for (_, addresses, [tcp, udp_port]) in FRONTENDS {
            standing.tcp.extend(addresses.forms(tcp).map(connect));
            for to in addresses.forms(udp_port) {
                let socket = echo::udp_client(to).unwrap();
                let name = ask_from(&socket, to).unwrap();
                standing.unconnected.push((socket, to, name));
                let socket = echo::udp_client(to).unwrap();
                socket.connect(to).unwrap();
                let name = echo::ask_peer(&socket).unwrap();
                standing.connected.push((socket, name));
            }
        }
        standing
    }

    fn assert_undisturbed(&self) {
        self.tcp.iter().for_each(|stream| echo::ping_tcp(stream, "still there?").unwrap());
        for (socket, name) in &self.connected {
            assert_eq!(echo::ask_peer(socket).unwrap(), *name);
        }
        for (socket, to, name) in &self.unconnected {
            assert_eq!(ask_from(socket, *to).unwrap(), *name, "{to}");
        }
    }
}

#[test]
fn established_flows_are_not_checked_again() {
    let flags = [NODE.as_slice(), &OWN, &CLOSE_ALL].concat();
    let world = start(PODS, with(service()), &flags, |_| ());
    let standing = Standing::open();
    let closed_outside = source_ranges(&["10.9.0.0/16", "fd09::/16"]);
    for (changed, addresses) in [(internal_local(), CLUSTER_IP), (closed_outside, BALANCER_IP)] {
        world.set(with(changed), |rows| all_are(rows, addresses, "drop"));
        for to in addresses.forms(PORT) {
            assert_drops(&ASKS[0].2(to).unwrap_err(), ASKS[0].0, "a new connection");
        }
        standing.assert_undisturbed();
        world.set(with(service()), |rows| all_are(rows, addresses, "forward"));
        standing.assert_undisturbed();
    }
    assert!(!world.agent.log().contains("sockets closed"), "{}", world.agent.log());
}
