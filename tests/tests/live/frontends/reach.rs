//! Backends of each frontend's address.

use std::{collections::BTreeSet, io, net::SocketAddr};

use cproxy_tests::{
    echo, manifest,
    sandbox::Sandbox,
    world::{Host, OWN_ADDRESSES, PORT, pod, pod_name, ready},
};
use serde_json::Value;

use super::world::{ASKS, BALANCER_IP, CLUSTER_IP, EXTERNAL_IP, FRONTENDS, NODE_IP, NODE_PORTS, service, start};

const PODS: u8 = 3;

fn objects() -> impl Iterator<Item = Value> {
    std::iter::once(service().into()).chain(ready(1..=PODS))
}

/// This node, with these addresses.
fn node(addresses: Host) -> Value {
    let mut node = manifest::node("here", "a");
    node["status"] = manifest::node_status(addresses.addresses())["status"].take();
    node
}

fn node_ip_flags() -> [String; 3] {
    let [v4, v6] = NODE_IP.addresses();
    ["--node-ip".to_owned(), v4.to_string(), v6.to_string()]
}

/// Repeats `ask` until every pod has answered; each answer must be from a pod.
fn all_pods_answer(what: &str, mut ask: impl FnMut() -> io::Result<String>) {
    let expected: BTreeSet<_> = (1..=PODS).map(pod_name).collect();
    let mut missing = expected.clone();
    // 200 draws from three miss one of them with probability 3 * (2/3)^200, less than 1e-34.
    for _ in 0..200 {
        let name = ask().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(expected.contains(&name), "{what}: {name}");
        missing.remove(&name);
        if missing.is_empty() {
            return;
        }
    }
    panic!("{what}: {missing:?} never answers");
}

/// TCP and UDP, in both families and IPv4-mapped. The socket's peer is always the frontend.
fn every_frontend_reaches_every_pod() {
    for (kind, addresses, ports) in FRONTENDS {
        for (how, index, ask) in ASKS {
            for to in addresses.forms(ports[index]) {
                all_pods_answer(&format!("{kind} {to} {how}"), || ask(to));
            }
        }
    }
}

#[test]
fn every_frontend_reaches_every_pod_with_given_node_addresses() {
    let flags = node_ip_flags();
    let world = start(PODS, objects(), &flags.each_ref().map(String::as_str), |_| ());
    every_frontend_reaches_every_pod();
    let sources: BTreeSet<_> = world.rows().iter().map(|row| row["source"].as_str().unwrap().to_owned()).collect();
    assert_eq!(sources.into_iter().collect::<Vec<_>>(), ["ClusterIP", "ExternalIP", "LoadBalancerIP", "NodePort"]);
}

#[test]
fn every_frontend_reaches_every_pod_with_the_addresses_of_the_node() {
    let objects_and = |addresses| objects().chain([node(addresses)]);
    let world = start(PODS, objects_and(NODE_IP), &["--node-name", "here"], |_| ());
    every_frontend_reaches_every_pod();
    // The Node moves, and its former address has no frontend.
    let elsewhere = pod(200);
    world.set(objects_and(elsewhere), |rows| !rows.iter().any(|row| row["address"] == NODE_IP.v6.to_string()));
    for (how, index, ask) in ASKS {
        for to in elsewhere.forms(NODE_PORTS[index]) {
            all_pods_answer(&format!("{to} {how}"), || ask(to));
        }
        for to in NODE_IP.forms(NODE_PORTS[index]) {
            let error = ask(to).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NetworkUnreachable, "{to} {how}");
        }
    }
}

/// A ClusterIP refuses such a port; any other address is a separate host.
#[test]
fn a_port_that_no_service_has_goes_where_the_kernel_takes_it() {
    const OTHER: u16 = 81;
    let own = [EXTERNAL_IP, BALANCER_IP, NODE_IP];
    let mut servers = Vec::new();
    let serve = |sandbox: &Sandbox| {
        for ip in own.into_iter().chain([CLUSTER_IP]).flat_map(Host::addresses) {
            sandbox.add_address(ip);
            servers.push((
                echo::tcp(sandbox, (ip, OTHER), "the address itself"),
                echo::udp(sandbox, (ip, OTHER), "the address itself"),
            ));
        }
    };
    let flags = node_ip_flags();
    let flags: Vec<_> = flags.iter().map(String::as_str).chain(OWN_ADDRESSES).collect();
    let _world = start(PODS, objects(), &flags, serve);
    for (how, _, ask) in ASKS {
        for to in own.into_iter().flat_map(|addresses| addresses.forms(OTHER)) {
            assert_eq!(ask(to).unwrap(), "the address itself", "{to} {how}");
        }
        for to in CLUSTER_IP.forms(OTHER) {
            assert_eq!(ask(to).unwrap_err().kind(), io::ErrorKind::ConnectionRefused, "{to} {how}");
        }
    }
    // The Service's port is no port of the Node, and the node port is no port of any other address.
    for to in NODE_IP.forms(PORT) {
        let error = echo::ask_tcp(to).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{to}: no server listens");
    }
    for to in EXTERNAL_IP.forms(NODE_PORTS[0]) {
        let error = echo::ask_tcp(to).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{to}: no server listens");
    }
}

/// The only pod is that of the clients.
#[test]
fn a_pod_reaches_itself_from_its_own_address() {
    let flags = node_ip_flags();
    let own = std::iter::once(service().into()).chain(ready([1]));
    let _world = start(1, own, &flags.each_ref().map(String::as_str), |_| ());
    for (kind, addresses, ports) in FRONTENDS {
        for to in addresses.forms(ports[0]) {
            let client = echo::ask_tcp(to).unwrap().client.ip().to_canonical();
            assert!(pod(1).addresses().contains(&client), "{kind} {to}: the server sees {client}");
        }
        for to in addresses.forms(ports[1]) {
            let socket = echo::udp_client(to).unwrap();
            socket.connect(to).unwrap();
            let local = SocketAddr::ip(&socket.local_addr().unwrap()).to_canonical();
            assert!(pod(1).addresses().contains(&local), "{kind} {to}: sent from {local}");
        }
    }
}
