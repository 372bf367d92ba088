//! The environment of the tests: pods, hosts that belong to no Service, and an agent on manifest files.

use std::{
    cell::Cell,
    fmt,
    net::{IpAddr, SocketAddr},
    process::Command,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use aya::maps::{Array, Map, MapData};
use cproxy_datapath::bpf::PinDir;
use cproxy_ebpf::TCP_PLACES;
pub(crate) use cproxy_tests::world::{Host, OWN_ADDRESSES, PORT, SocketKind, cluster_ip as vip, pod};
use cproxy_tests::{
    manifest::{self, Endpoint, Service, Slice},
    process::{self, RunningAgent, eventually},
    sandbox::{Placement, Sandbox},
    world::{SYNC, TCP, counter, rows, slices_with, start_agent_with},
};
use serde_json::{Value, json};

use crate::socket::Socket;

/// Node of the agent.
const NODE: &str = "node-a";
/// Another node.
pub(crate) const OTHER_NODE: &str = "node-b";

/// ClusterIP of the Service that is written last.
const MARKER: &str = "10.96.255.255";

/// The port of every pod.
pub(crate) const POD_PORT: u16 = TCP;

/// Form of an address in an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Form {
    V4,
    V6,
    /// IPv4, in the form of IPv6, on a socket of AF_INET6.
    Mapped,
    /// IPv4, in the form of IPv4, on a socket of AF_INET6.
    V4OnV6,
}

impl Form {
    pub(crate) const ALL: [Self; 4] = [Self::V4, Self::V6, Self::Mapped, Self::V4OnV6];

    /// The family of its sockets.
    pub(crate) fn family(self) -> libc::c_int {
        if self == Self::V4 { libc::AF_INET } else { libc::AF_INET6 }
    }

    /// Address of `host` and `port` as the application passes it.
    pub(crate) fn address(self, host: Host, port: u16) -> SocketAddr {
        let ip = match self {
            Self::V4 | Self::V4OnV6 => host.v4.into(),
            Self::V6 => host.v6.into(),
            Self::Mapped => host.v4.to_ipv6_mapped().into(),
        };
        SocketAddr::new(ip, port)
    }

    /// Address as calls return it.
    pub(crate) fn shown(self, host: Host, port: u16) -> SocketAddr {
        let form = if self == Self::V4OnV6 { Self::Mapped } else { self };
        form.address(host, port)
    }

    /// A new UDP socket.
    pub(crate) fn udp(self) -> Socket {
        self.socket(libc::SOCK_DGRAM)
    }

    /// A new TCP socket.
    pub(crate) fn tcp(self) -> Socket {
        self.socket(libc::SOCK_STREAM)
    }

    fn socket(self, kind: libc::c_int) -> Socket {
        let socket = Socket::new(self.family(), kind).unwrap();
        socket.set_timeout(patience()).unwrap();
        socket
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "v4",
            Self::V6 => "v6",
            Self::Mapped => "v4-mapped",
            Self::V4OnV6 => "v4 on AF_INET6",
        })
    }
}

/// A host without any Service.
pub(crate) const fn host(number: u8) -> Host {
    Host::new([192, 0, 2, number], [0x2001, 0xdb8, 0, 0, 0, 0, 0, number as u16])
}

/// Guard that prints the case in which a test has failed.
pub(crate) struct Case(String);

impl Case {
    pub(crate) fn new(name: impl fmt::Display) -> Self {
        Self(name.to_string())
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("this was the case {}", self.0);
        }
    }
}

/// Limit on the wait for an answer. It is shorter once several answers are missing, since the test has failed then and
/// should end.
pub(crate) fn patience() -> Duration {
    if count_of_lost_answers() < 3 { Duration::from_secs(10) } else { Duration::from_millis(500) }
}

/// Number of missing answers in this test.
pub(crate) fn count_of_lost_answers() -> u64 {
    LOST_ANSWERS.load(Ordering::Relaxed)
}

/// Records a missing answer.
pub(crate) fn count_lost_answer() {
    LOST_ANSWERS.fetch_add(1, Ordering::Relaxed);
}

static LOST_ANSWERS: AtomicU64 = AtomicU64::new(0);

/// A Service `name` with VIP `number`, and port 80 of both protocols.
pub(crate) fn service(name: &str, number: u8) -> Service {
    let service = Service::new(name).cluster_ips(vip(number).addresses());
    service.tcp("tcp", PORT, POD_PORT).udp("udp", PORT, POD_PORT)
}

/// Slices of a Service: `endpoint` makes an endpoint from each pod's address.
pub(crate) fn slices(
    service: &str,
    pods: &[u8],
    endpoint: impl Fn(u8, IpAddr) -> Endpoint,
) -> impl Iterator<Item = Value> {
    let add_ports = |slice: Slice| slice.tcp("tcp", POD_PORT).udp("udp", POD_PORT);
    slices_with(service, add_ports, pods.iter().copied(), endpoint).into_iter()
}

/// A Service and its slices with ready endpoints.
pub(crate) fn ready(name: &str, number: u8, pods: &[u8]) -> Vec<Value> {
    let service = Value::from(service(name, number));
    std::iter::once(service).chain(slices(name, pods, |_, address| Endpoint::ready(address))).collect()
}

/// A sandbox with an optional agent.
pub(crate) struct MatrixSandbox {
    // Dropped first.
    agent: Option<RunningAgent>,
    /// Number of writes to the manifest.
    generation: Cell<u16>,
    pub(crate) sandbox: Sandbox,
}

impl MatrixSandbox {
    /// A sandbox with addresses for these hosts, without programs.
    pub(crate) fn new(hosts: impl IntoIterator<Item = Host>) -> Self {
        LOST_ANSWERS.store(0, Ordering::Relaxed);
        let sandbox = Sandbox::for_test();
        sandbox.add_addresses(hosts.into_iter().flat_map(Host::addresses));
        Self { agent: None, generation: Cell::new(0), sandbox }
    }

    /// A sandbox with these pods and host 3, and an agent that has read `objects`.
    pub(crate) fn start(pods: impl IntoIterator<Item = u8>, objects: impl IntoIterator<Item = Value>) -> Self {
        let mut world = Self::new(pods.into_iter().map(pod).chain([host(3)]));
        world.write(objects);
        world.start_agent();
        world
    }

    /// Replaces the manifest, with a marker Service that shows when the kernel's table has followed.
    pub(crate) fn write(&self, objects: impl IntoIterator<Item = Value>) {
        self.generation.set(self.generation.get() + 1);
        let marker = Service::new("marker").cluster_ips([MARKER]).udp("", self.generation.get(), POD_PORT);
        manifest::write(&self.sandbox.manifest_dir(), "all.json", objects.into_iter().chain([marker.into()]));
    }

    /// Replaces the manifest and waits until the kernel has it.
    pub(crate) fn update(&self, objects: impl IntoIterator<Item = Value>) {
        self.write(objects);
        eventually(SYNC, "the table follows the manifest", || {
            let rows = rows(&self.sandbox, "services");
            let is_marker = |row: &Value| row["address"] == json!(MARKER) && row["port"] == self.generation.get();
            if rows.iter().any(is_marker) { Ok(()) } else { Err(format!("{rows:?}")) }
        });
    }

    /// Fills all places for TCP sockets with entries of sockets that do not exist.
    pub(crate) fn occupy_tcp_places(&self) {
        let owners = MapData::from_pin(PinDir::new(&self.sandbox.pin_dir()).object("TCP_OWNERS")).unwrap();
        let mut owners = Array::<_, u64>::try_from(Map::Array(owners)).unwrap();
        (0..TCP_PLACES).for_each(|place| owners.set(place, u64::MAX, 0).unwrap());
    }

    /// Starts an agent and waits until it has written the table.
    pub(crate) fn start_agent(&mut self) {
        self.start_agent_with(&[]);
    }

    /// Starts an agent with more flags and waits until it has written the table.
    pub(crate) fn start_agent_with(&mut self, flags: &[&str]) {
        let flags = ["--node-name", NODE].iter().chain(flags);
        self.agent = Some(start_agent_with(&self.sandbox, flags));
    }

    /// Kills the agent with SIGKILL.
    pub(crate) fn kill_agent(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            agent.kill();
        }
    }

    /// One of the counters that `cproxy get counters` prints.
    pub(crate) fn counter(&self, name: &str) -> u64 {
        counter(&self.sandbox, name)
    }

    /// Runs `ip`.
    pub(crate) fn ip(&self, arguments: &str) {
        let mut command = Command::new("ip");
        command.args(arguments.split(' '));
        process::run(&self.sandbox, Placement::Unhooked, command, "", SYNC).success();
    }
}
