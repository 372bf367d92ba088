//! A sandbox with pods and an agent on manifests, and clients for every kind of socket.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use cproxy_tests::{
    Server, echo,
    manifest::{self, Service, Slice},
    process::{Agent, RunningAgent, cproxy, eventually},
    sandbox::Sandbox,
};
use serde_json::Value;

pub(crate) const SYNC: Duration = Duration::from_secs(10);

/// The number that each of the Service's two ports has.
pub(crate) const PORT: u16 = 80;
/// Node ports of the TCP and of the UDP port.
pub(crate) const NODE_PORTS: [u16; 2] = [30080, 30081];

/// An address of each family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    pub(crate) v4: Ipv4Addr,
    pub(crate) v6: Ipv6Addr,
}

const fn pair(v4: [u8; 4], v6: [u16; 8]) -> Pair {
    let [a, b, c, d, e, f, g, h] = v6;
    Pair { v4: Ipv4Addr::new(v4[0], v4[1], v4[2], v4[3]), v6: Ipv6Addr::new(a, b, c, d, e, f, g, h) }
}

pub(crate) const CLUSTER_IP: Pair = pair([10, 96, 0, 10], [0xfd00, 0x10, 0x96, 0, 0, 0, 0, 10]);
pub(crate) const EXTERNAL_IP: Pair = pair([203, 0, 113, 10], [0x2001, 0xdb8, 1, 0, 0, 0, 0, 10]);
pub(crate) const BALANCER_IP: Pair = pair([203, 0, 113, 20], [0x2001, 0xdb8, 1, 0, 0, 0, 0, 20]);
pub(crate) const NODE_IP: Pair = pair([192, 0, 2, 10], [0x2001, 0xdb8, 2, 0, 0, 0, 0, 10]);

/// The address of a pod, from 1.
pub(crate) const fn pod(number: u8) -> Pair {
    pair([10, 244, 0, number], [0xfd00, 0x10, 0x244, 0, 0, 0, 0, number as u16])
}

impl Pair {
    pub(crate) fn both(self) -> [IpAddr; 2] {
        [self.v4.into(), self.v6.into()]
    }

    /// In the forms that applications use, with the port.
    pub(crate) fn forms(self, port: u16) -> [SocketAddr; 3] {
        [self.v4.into(), self.v6.into(), self.v4.to_ipv6_mapped().into()].map(|ip: IpAddr| SocketAddr::new(ip, port))
    }
}

/// A Service with a TCP and a UDP port of the same number, and every kind of frontend.
pub(crate) fn service() -> Service {
    let [tcp, udp] = NODE_PORTS;
    let service = Service::new("web").cluster_ips(CLUSTER_IP.both());
    let service = service.tcp("http", PORT, 8080).node_port(tcp).udp("http-udp", PORT, 8081).node_port(udp);
    let service = service.spec("externalIPs", EXTERNAL_IP.both().map(|ip| ip.to_string()).to_vec().into());
    BALANCER_IP.both().into_iter().fold(service, Service::load_balancer_ip)
}

pub(crate) fn slices(pods: impl IntoIterator<Item = u8> + Clone) -> [Value; 2] {
    let ports = |slice: Slice| slice.tcp("http", 8080).udp("http-udp", 8081);
    [
        ports(Slice::v4("web")).ready(pods.clone().into_iter().map(|number| pod(number).v4)).into(),
        ports(Slice::v6("web")).ready(pods.into_iter().map(|number| pod(number).v6)).into(),
    ]
}

/// A Service port's frontends for TCP and for UDP: kind, addresses, and the port for either.
pub(crate) const FRONTENDS: [(&str, Pair, [u16; 2]); 4] = [
    ("ClusterIP", CLUSTER_IP, [PORT, PORT]),
    ("ExternalIP", EXTERNAL_IP, [PORT, PORT]),
    ("LoadBalancerIP", BALANCER_IP, [PORT, PORT]),
    ("NodePort", NODE_IP, NODE_PORTS),
];

/// Pods that say their number, and an agent.
pub(crate) struct World {
    pub(crate) agent: RunningAgent,
    _servers: Vec<Server>,
    pub(crate) sandbox: Sandbox,
}

impl World {
    /// With the pods 1 to `pods`; `prepare` does what comes before the agent.
    pub(crate) fn start(
        pods: u8,
        objects: impl IntoIterator<Item = Value>,
        flags: &[&str],
        prepare: impl FnOnce(&Sandbox),
    ) -> Self {
        let sandbox = Sandbox::new("cproxy-test");
        prepare(&sandbox);
        let servers = (1..=pods).flat_map(|number| serve(&sandbox, number)).collect();
        manifest::write(&sandbox.manifest_dir(), "web.json", objects);
        let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).args(flags).start();
        agent.wait_ready(SYNC);
        Self { agent, _servers: servers, sandbox }
    }

    /// Other objects; waits until `is_so` is true of the kernel's rows.
    pub(crate) fn set(&self, objects: impl IntoIterator<Item = Value>, is_so: impl Fn(&[Value]) -> bool) {
        manifest::write(&self.sandbox.manifest_dir(), "web.json", objects);
        self.wait(is_so);
    }

    /// Waits until `is_so` is true of the kernel's rows.
    pub(crate) fn wait(&self, is_so: impl Fn(&[Value]) -> bool) {
        eventually(SYNC, "the table follows", || {
            let rows = self.rows();
            if is_so(&rows) { Ok(()) } else { Err(format!("{rows:#?}")) }
        });
    }

    pub(crate) fn rows(&self) -> Vec<Value> {
        rows(&self.sandbox)
    }
}

/// The kernel's rows.
pub(crate) fn rows(sandbox: &Sandbox) -> Vec<Value> {
    cproxy(sandbox, &["get", "services", "-o", "json"]).json().as_array().unwrap().clone()
}

/// Whether the rows of an address, one or more, all have this action.
pub(crate) fn all_are(rows: &[Value], addresses: Pair, action: &str) -> bool {
    let is_meant = |row: &&Value| addresses.both().iter().any(|ip| row["address"] == ip.to_string());
    let mut actions = rows.iter().filter(is_meant).map(|row| &row["action"]).peekable();
    actions.peek().is_some() && actions.all(|found| found == action)
}

fn serve(sandbox: &Sandbox, number: u8) -> Vec<Server> {
    sandbox.add_addresses(pod(number).both());
    let name = number.to_string();
    let servers = |ip| [echo::tcp(sandbox, (ip, 8080), &name), echo::udp(sandbox, (ip, 8081), &name)];
    pod(number).both().into_iter().flat_map(servers).collect()
}

/// Connects by TCP: who answers. The peer is who was asked for.
pub(crate) fn ask_tcp(to: SocketAddr) -> io::Result<String> {
    let (greeting, stream) = echo::connect_tcp(to)?;
    assert_eq!(stream.peer_addr()?, to);
    Ok(greeting.name)
}

/// Connects by UDP: who answers. The peer is who was asked for.
pub(crate) fn ask_connected(to: SocketAddr) -> io::Result<String> {
    let socket = udp(to)?;
    socket.connect(to)?;
    assert_eq!(socket.peer_addr()?, to);
    ask_peer(&socket)
}

/// Who answers on a UDP socket that is connected.
pub(crate) fn ask_peer(socket: &UdpSocket) -> io::Result<String> {
    socket.send(b"who")?;
    let mut answer = [0; 64];
    let length = socket.recv(&mut answer)?;
    Ok(String::from_utf8_lossy(answer.get(..length).unwrap()).into_owned())
}

/// Sends from a socket that is not connected: who answers. It answers as who was asked.
pub(crate) fn ask_unconnected(to: SocketAddr) -> io::Result<String> {
    ask_from(&udp(to)?, to)
}

pub(crate) fn ask_from(socket: &UdpSocket, to: SocketAddr) -> io::Result<String> {
    let (name, from) = echo::ask_udp_from(socket, to)?;
    assert_eq!(from, to);
    Ok(name)
}

/// A UDP socket for talking to an address.
pub(crate) fn udp(to: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    Ok(socket)
}

/// Every way to ask, and which of a frontend's two ports it is for.
pub(crate) type Ask = fn(SocketAddr) -> io::Result<String>;
pub(crate) const ASKS: [(&str, usize, Ask); 3] =
    [("TCP", 0, ask_tcp), ("connected UDP", 1, ask_connected), ("unconnected UDP", 1, ask_unconnected)];

/// The first answer on a TCP connection that stands.
pub(crate) fn connect(to: SocketAddr) -> TcpStream {
    echo::connect_tcp(to).unwrap().1
}
