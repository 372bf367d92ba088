//! A small cluster in a sandbox: pods with echo servers, Services and slices as manifests, and an agent that follows
//! them. Larger suites build on its parts.

use std::{
    ffi::{OsStr, OsString},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use serde_json::Value;

use crate::{
    Done, echo,
    manifest::{self, Endpoint, Service, Slice},
    process::{Agent, RunningAgent, cproxy, eventually},
    sandbox::Sandbox,
    server::Server,
};

/// Limit on the time until the agent follows.
pub const SYNC: Duration = Duration::from_secs(10);

/// The port of every Service here, for TCP and UDP.
pub const PORT: u16 = 80;
/// The TCP port of pods, `http` in Services.
pub const TCP: u16 = 8080;
/// The UDP port of pods, `dns` in Services.
pub const UDP: u16 = 8081;

/// The ClusterIPs of the Service `web`.
pub const WEB: Host = cluster_ip(10);

/// The manifest that a world starts with.
const MANIFEST: &str = "web.json";

/// An IPv4 and an IPv6 address of a pod, a Service or another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// The IPv4 address.
    pub v4: Ipv4Addr,
    /// The IPv6 address.
    pub v6: Ipv6Addr,
}

impl Host {
    /// A host with these octets and segments.
    pub const fn new(v4: [u8; 4], v6: [u16; 8]) -> Self {
        let [a, b, c, d, e, f, g, h] = v6;
        Self { v4: Ipv4Addr::from_octets(v4), v6: Ipv6Addr::new(a, b, c, d, e, f, g, h) }
    }

    /// Both addresses, IPv4 first.
    pub fn addresses(self) -> [IpAddr; 2] {
        [self.v4.into(), self.v6.into()]
    }

    /// Socket addresses in the order of [`Form::ALL`].
    pub fn forms(self, port: u16) -> [SocketAddr; 3] {
        Form::ALL.map(|form| form.address(self, port))
    }

    /// Whether `address` belongs to this host, in any form.
    pub fn is_at(self, address: IpAddr) -> bool {
        self.addresses().contains(&address.to_canonical())
    }

    /// Whether a row's field `address` belongs to this host.
    pub fn is_of(self, row: &Value) -> bool {
        let address = row.get("address").and_then(Value::as_str).and_then(|text| text.parse().ok());
        address.is_some_and(|address| self.is_at(address))
    }
}

/// A pod's addresses.
pub const fn pod(number: u8) -> Host {
    Host::new([10, 244, 0, number], [0xfd00, 0x10, 0x244, 0, 0, 0, 0, number as u16])
}

/// A Service's ClusterIPs.
pub const fn cluster_ip(number: u8) -> Host {
    Host::new([10, 96, 0, number], [0xfd00, 0x10, 0x96, 0, 0, 0, 0, number as u16])
}

/// Name of a pod's servers.
pub fn pod_name(number: u8) -> String {
    format!("pod-{number}")
}

/// Number of the pod whose servers have that name.
///
/// # Panics
/// When no pod has it.
pub fn pod_number(name: &str) -> u8 {
    name.strip_prefix("pod-").and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{name:?} is no pod"))
}

/// The three forms of an address that applications use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
    /// IPv4-mapped IPv6.
    Mapped,
}

impl Form {
    /// All forms.
    pub const ALL: [Self; 3] = [Self::V4, Self::V6, Self::Mapped];

    /// A host's address and a port in this form.
    pub fn address(self, host: Host, port: u16) -> SocketAddr {
        let address = match self {
            Self::V4 => host.v4.into(),
            Self::V6 => host.v6.into(),
            Self::Mapped => host.v4.to_ipv6_mapped().into(),
        };
        SocketAddr::new(address, port)
    }

    /// A pod's address and a port in this form.
    pub fn pod(self, number: u8, port: u16) -> SocketAddr {
        self.address(pod(number), port)
    }

    /// The Service `web` in this form.
    pub fn web(self) -> SocketAddr {
        self.address(WEB, PORT)
    }

    /// Wildcard address for a client's socket.
    pub fn wildcard(self) -> SocketAddr {
        let address: IpAddr =
            if self == Self::V4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        SocketAddr::new(address, 0)
    }
}

/// Kind of an application's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SocketKind {
    /// TCP.
    Tcp,
    /// UDP, with `connect()`.
    UdpConnected,
    /// UDP, with an address for each datagram.
    UdpUnconnected,
}

impl SocketKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::UdpConnected, Self::UdpUnconnected];
}

/// A Service with [`PORT`] for TCP and UDP, at both addresses of `address`.
pub fn service(name: &str, address: Host) -> Service {
    Service::new(name).cluster_ips(address.addresses()).tcp("http", PORT, TCP).udp("dns", PORT, UDP)
}

/// The slices of a Service in both families, with an endpoint of each pod's address.
pub fn slices_of(
    service: &str,
    pods: impl IntoIterator<Item = u8> + Clone,
    endpoint: impl Fn(u8, IpAddr) -> Endpoint,
) -> [Value; 2] {
    slices_with(service, |slice| slice.tcp("http", TCP).udp("dns", UDP), pods, endpoint)
}

/// Like [`slices_of`], with other ports.
pub fn slices_with(
    service: &str,
    add_ports: impl Fn(Slice) -> Slice,
    pods: impl IntoIterator<Item = u8> + Clone,
    endpoint: impl Fn(u8, IpAddr) -> Endpoint,
) -> [Value; 2] {
    [(Slice::v4(service), 0), (Slice::v6(service), 1)].map(|(slice, family): (Slice, usize)| {
        let addresses = pods.clone().into_iter().map(|number| (number, pod(number).addresses()));
        let endpoints = addresses.map(|(number, [v4, v6])| endpoint(number, if family == 0 { v4 } else { v6 }));
        endpoints.fold(add_ports(slice), Slice::endpoint).into()
    })
}

/// The Service `web`.
pub fn web() -> Service {
    service("web", WEB)
}

/// The slices of `web`.
pub fn slices(pods: impl IntoIterator<Item = u8> + Clone, endpoint: impl Fn(u8, IpAddr) -> Endpoint) -> [Value; 2] {
    slices_of("web", pods, endpoint)
}

/// The slices of `web` with these pods, all ready.
pub fn ready(pods: impl IntoIterator<Item = u8> + Clone) -> [Value; 2] {
    slices(pods, |_, address| Endpoint::ready(address))
}

/// `web` and its slices with these pods, all ready.
pub fn web_with(pods: impl IntoIterator<Item = u8> + Clone) -> Vec<Value> {
    std::iter::once(web().into()).chain(ready(pods)).collect()
}

/// Gives each pod its addresses and starts a TCP and a UDP echo server at both.
pub fn serve_pods(sandbox: &Sandbox, pods: impl IntoIterator<Item = u8>) -> Vec<Server> {
    let mut servers = Vec::new();
    for number in pods {
        sandbox.add_addresses(pod(number).addresses());
        for address in pod(number).addresses() {
            servers.push(echo::tcp(sandbox, (address, TCP), &pod_name(number)));
            servers.push(echo::udp(sandbox, (address, UDP), &pod_name(number)));
        }
    }
    servers
}

/// Servers at a pod and at a VIP itself, which only untranslated connections reach.
///
/// # Panics
/// When one of them is no address.
pub fn serve_pod_and_vip(sandbox: &Sandbox, pod: &str, vip: &str) -> [Server; 2] {
    sandbox.add_addresses([pod, vip]);
    let at = |address: &str, port| (address.parse::<IpAddr>().expect("an address"), port);
    [echo::tcp(sandbox, at(pod, TCP), "pod"), echo::tcp(sandbox, at(vip, PORT), "the VIP itself")]
}

/// A UDP socket that is connected to a pod through the ClusterIP of `web`.
///
/// # Panics
/// When `web` does not answer, or no socket gets that pod.
pub fn udp_connected_to(form: Form, pod: u8) -> UdpSocket {
    eventually(SYNC, format_args!("a socket is connected to pod {pod}"), || {
        let socket = echo::udp_client(form.web()).expect("a UDP socket can be made");
        socket
            .connect(form.web())
            .and_then(|()| echo::ask_peer(&socket))
            .map_err(|error| error.to_string())
            .and_then(|answered| if pod_number(&answered) == pod { Ok(socket) } else { Err(answered) })
    })
}

/// Arguments with the VM's own addresses, which are those of pod 1.
pub const OWN_ADDRESSES: [&str; 4] = ["--pod-ip", "10.244.0.1", "--pod-ip", "fd00:10:244::1"];

/// Starts an agent on the sandbox's manifests and waits until it is ready.
pub fn start_agent(sandbox: &Sandbox) -> RunningAgent {
    start_agent_with(sandbox, [""; 0])
}

/// Like [`start_agent`], with more arguments.
pub fn start_agent_with<S: AsRef<OsStr>>(sandbox: &Sandbox, arguments: impl IntoIterator<Item = S>) -> RunningAgent {
    Agent::new(sandbox).manifests(sandbox.manifest_dir()).args(arguments).start()
}

/// The rows of `cproxy get WHAT`.
pub fn rows(sandbox: &Sandbox, what: &str) -> Vec<Value> {
    match cproxy(sandbox, &["get", what, "-o", "json"]).success().json() {
        Value::Array(rows) => rows,
        other => panic!("no rows: {other}"),
    }
}

/// Whether a row of `get services` has these pods as its backends, and no others.
pub fn has_pods(row: &Value, pods: &[u8]) -> bool {
    let backends = row.get("backends").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    backends.len() == pods.len() && pods.iter().all(|&number| backends.iter().any(|backend| pod(number).is_of(backend)))
}

/// All counters of `cproxy get counters`.
pub fn counters(sandbox: &Sandbox) -> Value {
    cproxy(sandbox, &["get", "counters", "-o", "json"]).success().json()
}

/// One counter of `cproxy get counters`.
///
/// # Panics
/// When there is no such counter.
pub fn counter(sandbox: &Sandbox, name: &str) -> u64 {
    let counters = counters(sandbox);
    counters.get(name).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {name} in {counters}"))
}

/// Waits until a counter of `cproxy get counters` has a value: what is counted after a pass, a test can see before.
///
/// # Panics
/// When it has another value in the end.
pub fn wait_for_counter(sandbox: &Sandbox, name: &str, expected: u64) {
    eventually(SYNC, name, || {
        let now = counter(sandbox, name);
        if now == expected { Ok(()) } else { Err(format!("{now}, not {expected}")) }
    });
}

/// Connects to `web` without a pause while `work` runs, by every kind of socket and form of address.
///
/// # Panics
/// When a pod has not answered, or the peer is not the ClusterIP.
pub fn while_connecting<R>(what: &str, work: impl FnOnce() -> R) -> R {
    let connect_all = |failure: &OnceLock<String>| {
        for (form, kind) in Form::ALL.into_iter().flat_map(|form| SocketKind::ALL.map(|kind| (form, kind))) {
            let answer = match kind {
                SocketKind::Tcp => echo::ask_name(form.web()),
                SocketKind::UdpConnected => echo::ask_connected_udp(form.web()),
                SocketKind::UdpUnconnected => echo::ask_udp(form.web()).map(|(name, _)| name),
            };
            if let Err(error) = answer {
                failure.get_or_init(|| format!("{form:?} {kind:?}: {error}"));
            }
        }
    };
    while_repeating(what, connect_all, work)
}

/// Repeats calls without a pause while `work` runs: at least once, and once more after its end. They note the first
/// failure.
///
/// # Panics
/// With that failure.
pub(crate) fn while_repeating<R>(what: &str, calls: impl Fn(&OnceLock<String>) + Sync, work: impl FnOnce() -> R) -> R {
    let (ends, failure) = (AtomicBool::new(false), OnceLock::new());
    let result = thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                let is_last = ends.load(Ordering::Relaxed);
                calls(&failure);
                if is_last {
                    return;
                }
            }
        });
        let _done = Done(&ends);
        work()
    });
    assert_eq!(failure.get(), None, "{what}");
    result
}

/// A running world.
#[derive(Debug)]
pub struct World {
    /// The agent, which ends first.
    pub agent: RunningAgent,
    /// The pods' servers.
    pub servers: Vec<Server>,
    /// Sandbox of the world.
    pub sandbox: Sandbox,
}

impl World {
    /// A builder with an empty sandbox.
    pub fn builder() -> Builder {
        Builder { servers: Vec::new(), arguments: Vec::new(), sandbox: Sandbox::for_test() }
    }

    /// A world with these pods, all ready behind `web`.
    pub fn start(pods: impl IntoIterator<Item = u8> + Clone) -> Self {
        Self::builder().pods(pods.clone()).objects(web_with(pods)).start()
    }

    /// Replaces the world's initial manifest.
    pub fn write(&self, objects: impl IntoIterator<Item = Value>) {
        manifest::write(&self.sandbox.manifest_dir(), MANIFEST, objects);
    }

    /// Replaces the manifest and waits until `is_so` is true of the rows of `get services`.
    pub fn set(&self, objects: impl IntoIterator<Item = Value>, is_so: impl Fn(&[Value]) -> bool) {
        self.write(objects);
        self.wait(is_so);
    }

    /// Waits until `is_so` is true of the rows of `get services`.
    ///
    /// # Panics
    /// After [`SYNC`].
    pub fn wait(&self, is_so: impl Fn(&[Value]) -> bool) {
        eventually(SYNC, "the table follows", || {
            let rows = self.rows();
            if is_so(&rows) { Ok(()) } else { Err(format!("{rows:#?}")) }
        });
    }

    /// Replaces the pods behind `web`, and waits until the kernel has them.
    pub fn set_pods(&self, pods: impl IntoIterator<Item = u8> + Clone) {
        self.write(web_with(pods.clone()));
        self.wait_for_pods(pods);
    }

    /// Waits until the kernel has these pods, and no others, behind each of the four frontends of `web`.
    pub fn wait_for_pods(&self, pods: impl IntoIterator<Item = u8>) {
        let pods: Vec<u8> = pods.into_iter().collect();
        self.wait(|rows| rows.len() == 4 && rows.iter().all(|row| has_pods(row, &pods)));
    }

    /// The rows of `get services`.
    pub fn rows(&self) -> Vec<Value> {
        rows(&self.sandbox, "services")
    }

    /// One counter.
    pub fn counter(&self, name: &str) -> u64 {
        counter(&self.sandbox, name)
    }
}

/// A world without its agent. Ends with [`Builder::start`].
#[derive(Debug)]
pub struct Builder {
    servers: Vec<Server>,
    arguments: Vec<OsString>,
    sandbox: Sandbox,
}

impl Builder {
    /// Adds pods, as [`serve_pods`] does.
    #[must_use]
    pub fn pods(mut self, pods: impl IntoIterator<Item = u8>) -> Self {
        self.servers.extend(serve_pods(&self.sandbox, pods));
        self
    }

    /// Adds other servers, or any other work before the start of the agent.
    #[must_use]
    pub fn prepare<I: IntoIterator<Item = Server>>(mut self, prepare: impl FnOnce(&Sandbox) -> I) -> Self {
        self.servers.extend(prepare(&self.sandbox));
        self
    }

    /// Sets the objects of the manifest.
    #[must_use]
    pub fn objects(self, objects: impl IntoIterator<Item = Value>) -> Self {
        manifest::write(&self.sandbox.manifest_dir(), MANIFEST, objects);
        self
    }

    /// Adds arguments of the agent.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// Starts the agent and waits until it is ready.
    pub fn start(self) -> World {
        let agent = start_agent_with(&self.sandbox, &self.arguments);
        World { agent, servers: self.servers, sandbox: self.sandbox }
    }
}
