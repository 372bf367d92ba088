//! Side-by-side measurement of peers: the same servers behind the same Services, and for each peer a network namespace
//! of its own with a link to the servers, so that no peer's rules slow another.
//!
//! The servers are in the sandbox's namespace, which has no rules at all. cproxy's programs see only the clients of
//! cproxy, which are in the sandbox's cgroup; all other clients are outside of it.

pub mod worker;

use std::{
    ffi::OsStr,
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use cproxy_tests::{
    control_plane::{ControlPlane, NODE},
    echo::{self, Server},
    manifest::{self, Service, Slice},
    population::Shape,
    process::{Agent, Daemon, RunningAgent, cproxy},
    sandbox::{Netns, Placement, Sandbox},
    usage::cpu_time,
    writer::Writer,
};
use rustix::process::Signal;
use serde_json::Value;

use self::worker::Worker;
use crate::{kube_proxy::KubeProxy, node, rest};

/// Limit on waiting for a peer to follow the API server, longer than any peer takes.
const TIMEOUT: Duration = Duration::from_secs(900);
/// Time after which a wait prints its reason.
const REMARK: Duration = Duration::from_secs(30);
/// Pause between two polls.
const PAUSE: Duration = Duration::from_millis(50);
/// Time without noticeable CPU use after which a process counts as at rest.
const REST: Duration = Duration::from_secs(2);

/// The kernel's table of IPVS, if it has IPVS.
const IPVS: &str = "/proc/net/ip_vs";

/// First ClusterIP of the markers, which show that everything before them is in force.
const FIRST_MARKER: Ipv4Addr = Ipv4Addr::new(10, 96, 1, 0);
/// Backend of the marker.
const MARKER_BACKEND: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 244, 255, 1)), 8080);

/// Way of a connection to its backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Peer {
    /// No proxy: the client connects to the pod.
    Direct,
    /// cproxy.
    Cproxy,
    /// cproxy with `--balance round-robin`. It cannot run beside the other mode, since both use the same cgroup.
    CproxyRoundRobin,
    /// kube-proxy's mode iptables, with legacy iptables.
    Iptables,
    /// kube-proxy's mode nftables.
    Nftables,
    /// kube-proxy's mode ipvs.
    Ipvs,
}

impl Peer {
    /// Peers that run on common developer kernels; few of those have IPVS.
    pub const USUAL: [Self; 4] = [Self::Direct, Self::Cproxy, Self::Iptables, Self::Nftables];

    fn is_cproxy(self) -> bool {
        matches!(self, Self::Cproxy | Self::CproxyRoundRobin)
    }

    /// The mode's name in kube-proxy's configuration.
    fn mode(self) -> Option<&'static str> {
        match self {
            Self::Direct | Self::Cproxy | Self::CproxyRoundRobin => None,
            Self::Iptables => Some("iptables"),
            Self::Nftables => Some("nftables"),
            Self::Ipvs => Some("ipvs"),
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Direct => "direct",
            Self::Cproxy => "cproxy",
            Self::CproxyRoundRobin => "cproxy, round robin",
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
            Self::Ipvs => "ipvs",
        })
    }
}

/// A Service that is measured.
#[derive(Clone, Copy, Debug)]
pub struct Subject {
    /// Its name.
    pub name: &'static str,
    /// Its ClusterIP and port.
    pub vip: SocketAddr,
    /// Its endpoints.
    pub backends: &'static [SocketAddr],
    /// Whether the port also exists for UDP.
    pub is_udp_too: bool,
}

impl Subject {
    /// The Service and its slice.
    #[must_use]
    pub fn objects(&self) -> [Value; 2] {
        let port = self.backends.first().map_or(0, SocketAddr::port);
        let mut service = Service::new(self.name).cluster_ips([self.vip.ip()]).tcp("tcp", self.vip.port(), port);
        let mut slice = Slice::v4(self.name).tcp("tcp", port).ready(self.backends.iter().map(SocketAddr::ip));
        if self.is_udp_too {
            service = service.udp("udp", self.vip.port(), port);
            slice = slice.udp("udp", port);
        }
        [service.into(), slice.into()]
    }
}

/// Source of the Services, which all peers follow.
pub enum Cluster<'s> {
    /// An API server in the sandbox.
    Local(Box<LocalCluster<'s>>),
    /// An API server that another process has filled.
    Remote {
        /// Kubeconfig of the agent.
        agent_kubeconfig: PathBuf,
        /// kube-proxy with its own kubeconfig.
        kube_proxy: KubeProxy,
    },
    /// The sandbox's directory of manifests. kube-proxy cannot follow it. An API server takes longer for each Service
    /// the more Services it has: half an hour for tens of thousands.
    Manifests,
}

/// An API server in the sandbox.
pub struct LocalCluster<'s> {
    control_plane: ControlPlane<'s>,
    writer: Writer,
}

impl<'s> Cluster<'s> {
    /// A control plane in the sandbox.
    #[must_use]
    pub fn start(sandbox: &'s Sandbox) -> Self {
        let control_plane = ControlPlane::start(sandbox);
        node::create(sandbox, &control_plane);
        let writer = Writer::new(&control_plane);
        Self::Local(Box::new(LocalCluster { control_plane, writer }))
    }

    /// kube-proxy, unless the source is manifests.
    fn kube_proxy(&self) -> Option<KubeProxy> {
        match self {
            Self::Local(local) => Some(KubeProxy {
                binary: local.control_plane.binary("kube-proxy"),
                kubeconfig: local.control_plane.kubeconfig_for("system:kube-proxy"),
            }),
            Self::Remote { kube_proxy, .. } => Some(kube_proxy.clone()),
            Self::Manifests => None,
        }
    }

    fn agent(&self, sandbox: &'s Sandbox) -> Agent<'s> {
        match self {
            Self::Local(local) => Agent::new(sandbox).kubeconfig(local.control_plane.agent_kubeconfig()),
            Self::Remote { agent_kubeconfig, .. } => Agent::new(sandbox).kubeconfig(agent_kubeconfig),
            Self::Manifests => Agent::new(sandbox).manifests(sandbox.manifest_dir()),
        }
    }

    /// Replaces existing objects of an API server in the sandbox.
    pub fn replace(&self, objects: impl IntoIterator<Item = Value>) {
        if let Self::Local(local) = self {
            local.writer.replace(objects);
        }
    }

    /// Creates objects; `name` describes them in messages.
    fn create(&self, sandbox: &Sandbox, name: &str, objects: impl IntoIterator<Item = Value>) {
        match self {
            Self::Local(local) => local.writer.create(objects),
            Self::Remote { .. } => {}
            Self::Manifests => drop(manifest::write(&sandbox.manifest_dir(), &format!("{name}.json"), objects)),
        }
    }
}

/// A peer's network namespace and the process that programs it from the API server.
pub struct Stand<'s> {
    sandbox: &'s Sandbox,
    /// The peer that runs here.
    pub peer: Peer,
    /// Network namespace of its clients.
    pub netns: Netns,
    /// A client.
    pub worker: Worker,
    process: Process,
}

/// A client outside its node's network namespace.
#[derive(Debug)]
pub struct Pod {
    /// The client.
    pub worker: Worker,
    _netns: Netns,
}

enum Process {
    None,
    Cproxy(Box<RunningAgent>),
    KubeProxy(Daemon),
}

/// All peers with their Services.
pub struct Arena<'s> {
    sandbox: &'s Sandbox,
    cluster: Cluster<'s>,
    /// One for each peer that could be started.
    pub stands: Vec<Stand<'s>>,
    services: u32,
    markers: u32,
    _marker_backend: Server,
}

impl<'s> Arena<'s> {
    /// Starts all peers and creates the measured Services.
    ///
    /// # Errors
    /// A peer does not start.
    pub fn new(sandbox: &'s Sandbox, cluster: Cluster<'s>, peers: &[Peer], subjects: &[Subject]) -> Result<Self> {
        sandbox.add_address(MARKER_BACKEND.ip());
        let marker_backend = echo::tcp(sandbox, MARKER_BACKEND, "marker");
        cluster.create(sandbox, "subjects", subjects.iter().flat_map(Subject::objects));
        let stands = peers.iter().map(|&peer| Stand::start(sandbox, &cluster, peer)).collect::<Result<_>>()?;
        Ok(Self { sandbox, cluster, stands, services: 0, markers: 0, _marker_backend: marker_backend })
    }

    /// Brings the number of unmeasured Services to that of `shape`, and waits until every peer has them in force.
    ///
    /// # Errors
    /// A peer does not follow.
    pub fn grow(&mut self, shape: Shape) -> Result<()> {
        if self.services == shape.services {
            return Ok(());
        }
        // Half-written objects must not cost any peer work.
        self.stop();
        eprintln!("creating {} Services with {} endpoints each", shape.services, shape.endpoints);
        let create = |name: &str, objects: &mut dyn Iterator<Item = Value>| {
            self.cluster.create(self.sandbox, &format!("{}-{name}", shape.services), objects);
        };
        create("services", &mut shape.objects(self.services..shape.services));
        create("marker", &mut marker(self.markers).objects().into_iter());
        self.services = shape.services;
        self.resume();
        let marker = marker(self.markers);
        self.markers += 1;
        for stand in &mut self.stands {
            stand.wait_for(marker.vip).with_context(|| format!("{} with {} Services", stand.peer, shape.services))?;
        }
        for stand in &mut self.stands {
            stand.wait_for_rest()?;
            // kube-proxy in mode ipvs writes its rules one by one, so the marker may answer before the last rule is
            // there.
            stand.wait_for(marker.vip).with_context(|| format!("{}, once at rest", stand.peer))?;
        }
        Ok(())
    }

    /// Creates further objects, and waits until every peer serves this ClusterIP of theirs, the last one.
    ///
    /// # Errors
    /// A peer does not follow.
    pub fn add(&mut self, name: &str, objects: impl IntoIterator<Item = Value>, vip: SocketAddr) -> Result<()> {
        self.cluster.create(self.sandbox, name, objects);
        for stand in &mut self.stands {
            stand.wait_for(vip).with_context(|| format!("{}, {name}", stand.peer))?;
        }
        self.wait_for_rest()
    }

    /// Waits until the peers' processes have nothing left to do.
    ///
    /// # Errors
    /// One stays busy.
    pub fn wait_for_rest(&mut self) -> Result<()> {
        self.stands.iter_mut().try_for_each(Stand::wait_for_rest)
    }

    /// Stops the processes that follow the API server, so that they do not disturb a measurement. Their rules stay in
    /// force.
    pub fn stop(&mut self) {
        self.stands.iter_mut().for_each(Stand::stop);
    }

    /// Continues the processes that [`Arena::stop`] has stopped.
    pub fn resume(&mut self) {
        self.stands.iter_mut().for_each(Stand::resume);
    }

    /// A peer and the source of the Services.
    pub fn stand_and_source(&mut self, index: usize) -> Option<(&mut Stand<'s>, &Cluster<'s>)> {
        Some((self.stands.get_mut(index)?, &self.cluster))
    }

    /// The number of Services besides the measured ones.
    #[must_use]
    pub fn services(&self) -> u32 {
        self.services
    }

    /// kube-proxy, unless the source is manifests.
    #[must_use]
    pub fn kube_proxy(&self) -> Option<KubeProxy> {
        self.cluster.kube_proxy()
    }

    /// A client in a pod on a macvlan interface of a peer's namespace, which is its node.
    ///
    /// # Errors
    /// This kernel has no macvlan.
    pub fn behind_macvlan(&self, stand: &Stand<'_>, number: u8) -> Result<Pod> {
        let netns = self.sandbox.behind_macvlan(&stand.netns, number)?;
        let worker = Worker::start(client(self.sandbox, &netns, stand.peer, own_program()?))?;
        Ok(Pod { worker, _netns: netns })
    }

    /// The sandbox of all peers.
    #[must_use]
    pub fn sandbox(&self) -> &'s Sandbox {
        self.sandbox
    }
}

/// The Service that shows that the first `number` steps are in force.
#[must_use]
pub fn marker(number: u32) -> Subject {
    const NAMES: [&str; 8] =
        ["marker-0", "marker-1", "marker-2", "marker-3", "marker-4", "marker-5", "marker-6", "marker-7"];
    let address = Ipv4Addr::from_bits(FIRST_MARKER.to_bits() + number);
    Subject {
        name: NAMES.into_iter().cycle().nth(number as usize).unwrap_or_default(),
        vip: SocketAddr::new(address.into(), 80),
        backends: &[MARKER_BACKEND],
        is_udp_too: false,
    }
}

impl<'s> Stand<'s> {
    fn start(sandbox: &'s Sandbox, cluster: &Cluster<'s>, peer: Peer) -> Result<Self> {
        let netns = sandbox.neighbour::<IpAddr>([]);
        for (name, value) in SYSCTLS {
            netns.run(|| std::fs::write(name, value)).with_context(|| name.to_owned())?;
        }
        let process = match peer.mode() {
            None if peer.is_cproxy() => {
                let how = if peer == Peer::CproxyRoundRobin { "round-robin" } else { "random" };
                let agent = cluster.agent(sandbox).args(["--node-name", NODE, "--balance", how]);
                Process::Cproxy(Box::new(agent.spawn()))
            }
            None => Process::None,
            Some(mode) => {
                ensure!(
                    peer != Peer::Ipvs || Path::new(IPVS).exists(),
                    "this kernel has no IPVS; that of `cargo xtask bench guest` has"
                );
                let kube_proxy = cluster.kube_proxy().context("kube-proxy follows API servers alone")?;
                Process::KubeProxy(kube_proxy.spawn(sandbox, &netns, mode)?)
            }
        };
        let worker = Worker::start(client(sandbox, &netns, peer, own_program()?))?;
        Ok(Self { sandbox, peer, netns, worker, process })
    }

    /// Address to which this peer's clients connect.
    #[must_use]
    pub fn address(&self, subject: &Subject) -> SocketAddr {
        match (self.peer, subject.backends) {
            (Peer::Direct, [first, ..]) => *first,
            _ => subject.vip,
        }
    }

    /// A command that runs as a client of this peer.
    #[must_use]
    pub fn client(&self, program: impl AsRef<OsStr>) -> Command {
        client(self.sandbox, &self.netns, self.peer, program)
    }

    fn daemon(&mut self) -> Option<&mut Daemon> {
        match &mut self.process {
            Process::None => None,
            Process::Cproxy(agent) => Some(agent),
            Process::KubeProxy(daemon) => Some(daemon),
        }
    }

    /// Stops the process that follows the API server. Its rules stay in force.
    pub fn stop(&mut self) {
        self.signal(Signal::STOP);
    }

    /// Continues the process.
    pub fn resume(&mut self) {
        self.signal(Signal::CONT);
    }

    fn signal(&mut self, signal: Signal) {
        if let Some(daemon) = self.daemon() {
            daemon.signal(signal);
        }
    }

    /// Waits until its process has nothing left to do.
    fn wait_for_rest(&mut self) -> Result<()> {
        let peer = self.peer;
        let Some(daemon) = self.daemon() else { return Ok(()) };
        let pid = daemon.pid();
        let rest = rest::wait(1, REST, TIMEOUT, || cpu_time(pid));
        rest.with_context(|| format!("{peer}: {}", daemon.tail()))?;
        Ok(())
    }

    /// Waits until a backend answers behind a ClusterIP.
    fn wait_for(&mut self, vip: SocketAddr) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        let mut said = Instant::now();
        while self.peer != Peer::Direct && self.worker.connect(1, vip).is_err() {
            let peer = self.peer;
            let Some(daemon) = self.daemon() else { return Ok(()) };
            if let Some(status) = daemon.exit_status() {
                anyhow::bail!("it has ended ({status}): {}", daemon.tail());
            }
            let now = Instant::now();
            ensure!(now < deadline, "not in force within {TIMEOUT:?}: {}", daemon.tail());
            if now > said + REMARK {
                said = now;
                eprintln!("{peer}: not in force yet: {}", daemon.tail());
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }
}

fn own_program() -> Result<PathBuf> {
    std::env::current_exe().context("this program has no path")
}

/// A command in a peer's namespace: for cproxy in the cgroup with the programs, for all others in another one.
fn client(sandbox: &Sandbox, netns: &Netns, peer: Peer, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", netns.path().display())).arg(program);
    sandbox.place(&mut command, if peer.is_cproxy() { Placement::Hooked } else { Placement::Beside });
    command
}

/// Settings of the clients' namespaces. Many short connections to one address must not run out of ports because of
/// connections in TIME_WAIT, for any peer.
const SYSCTLS: [(&str, &str); 2] =
    [("/proc/sys/net/ipv4/ip_local_port_range", "1024 65535"), ("/proc/sys/net/ipv4/tcp_tw_reuse", "1")];

impl Drop for Stand<'_> {
    fn drop(&mut self) {
        // A stopped process would not handle the signal to end.
        if let Some(daemon) = self.daemon()
            && daemon.exit_status().is_none()
        {
            daemon.signal(Signal::CONT);
        }
        match &mut self.process {
            Process::None => {}
            Process::Cproxy(agent) => {
                agent.stop();
                cproxy(self.sandbox, &["cleanup"]);
            }
            Process::KubeProxy(daemon) => drop(daemon.kill()),
        }
    }
}
