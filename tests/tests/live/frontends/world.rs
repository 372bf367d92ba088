//! A sandbox with pods, an agent on manifests, and clients with every kind of socket.

use std::{
    io,
    net::{SocketAddr, TcpStream, UdpSocket},
};

use cproxy_tests::{
    echo,
    manifest::Service,
    sandbox::Sandbox,
    world::{Host, PORT, TCP, UDP, WEB, World},
};
use serde_json::Value;

/// Node ports of the TCP and of the UDP port.
pub(crate) const NODE_PORTS: [u16; 2] = [30080, 30081];

pub(crate) const CLUSTER_IP: Host = WEB;
pub(crate) const EXTERNAL_IP: Host = Host::new([203, 0, 113, 10], [0x2001, 0xdb8, 1, 0, 0, 0, 0, 10]);
pub(crate) const BALANCER_IP: Host = Host::new([203, 0, 113, 20], [0x2001, 0xdb8, 1, 0, 0, 0, 0, 20]);
pub(crate) const NODE_IP: Host = Host::new([192, 0, 2, 10], [0x2001, 0xdb8, 2, 0, 0, 0, 0, 10]);

/// The Service `web` with every kind of frontend.
pub(crate) fn service() -> Service {
    let [tcp, udp] = NODE_PORTS;
    let service = Service::new("web").cluster_ips(CLUSTER_IP.addresses());
    let service = service.tcp("http", PORT, TCP).node_port(tcp).udp("dns", PORT, UDP).node_port(udp);
    let service = service.spec("externalIPs", EXTERNAL_IP.addresses().map(|ip| ip.to_string()).to_vec().into());
    BALANCER_IP.addresses().into_iter().fold(service, Service::load_balancer_ip)
}

/// Kind, addresses, and TCP and UDP port of each frontend of a Service port.
pub(crate) const FRONTENDS: [(&str, Host, [u16; 2]); 4] = [
    ("ClusterIP", CLUSTER_IP, [PORT, PORT]),
    ("ExternalIP", EXTERNAL_IP, [PORT, PORT]),
    ("LoadBalancerIP", BALANCER_IP, [PORT, PORT]),
    ("NodePort", NODE_IP, NODE_PORTS),
];

/// Starts the pods 1 to `pods` and an agent, after `prepare`.
pub(crate) fn start(
    pods: u8,
    objects: impl IntoIterator<Item = Value>,
    arguments: &[&str],
    prepare: impl FnOnce(&Sandbox),
) -> World {
    let prepare = |sandbox: &Sandbox| {
        prepare(sandbox);
        None
    };
    World::builder().prepare(prepare).pods(1..=pods).objects(objects).args(arguments).start()
}

/// The rows of `get services`.
pub(crate) fn rows(sandbox: &Sandbox) -> Vec<Value> {
    cproxy_tests::world::rows(sandbox, "services")
}

/// Whether there are rows of these addresses and all have this action.
pub(crate) fn all_are(rows: &[Value], addresses: Host, action: &str) -> bool {
    let mut actions = rows.iter().filter(|row| addresses.is_of(row)).map(|row| &row["action"]).peekable();
    actions.peek().is_some() && actions.all(|found| found == action)
}

/// Sends from an unconnected socket and returns the name of the server. The source of the answer must be `to`.
fn ask_unconnected(to: SocketAddr) -> io::Result<String> {
    ask_from(&echo::udp_client(to)?, to)
}

pub(crate) fn ask_from(socket: &UdpSocket, to: SocketAddr) -> io::Result<String> {
    let (name, from) = echo::ask_udp_from(socket, to)?;
    assert_eq!(from, to);
    Ok(name)
}

/// A way to ask a frontend, with the index of the frontend's port for it.
pub(crate) type Ask = fn(SocketAddr) -> io::Result<String>;
pub(crate) const ASKS: [(&str, usize, Ask); 3] = [
    ("TCP", 0, echo::ask_name),
    ("connected UDP", 1, echo::ask_connected_udp),
    ("unconnected UDP", 1, ask_unconnected),
];

/// A TCP connection with its first answer.
pub(crate) fn connect(to: SocketAddr) -> TcpStream {
    echo::connect_tcp(to).unwrap().1
}
