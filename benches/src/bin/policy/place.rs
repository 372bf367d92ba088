//! A pod for each subject, with a network namespace, a cgroup and an agent of its own, and the servers outside, in the
//! sandbox's network namespace, which has no rules.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};
use cproxy_tests::{
    manifest,
    process::Agent,
    sandbox::{Netns, Sandbox},
};

use crate::engine::{ALLOWED, DENIED, POD, PORT, Subject};

/// Address of the first pod.
const FIRST_POD: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 1);

/// Limit on waiting for a datagram or a stream's bytes, longer than any takes.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A network namespace and a cgroup, with the pins of an agent that attaches its programs there.
pub(crate) struct Pod {
    pub(crate) address: Ipv4Addr,
    pub(crate) netns: Netns,
    pub(crate) cgroup: PathBuf,
    pub(crate) pin_dir: PathBuf,
    run_dir: PathBuf,
}

/// A TCP and a UDP socket that calls lead to.
pub(crate) struct Servers {
    pub(crate) tcp: TcpListener,
    pub(crate) udp: UdpSocket,
}

/// A pod in which a subject is in force.
pub(crate) struct Stand {
    pub(crate) subject: Subject,
    pub(crate) pod: Pod,
    pub(crate) servers: Servers,
}

impl Servers {
    fn start(address: IpAddr) -> Result<Self> {
        let address = SocketAddr::new(address, PORT);
        let tcp = TcpListener::bind(address).with_context(|| format!("listening on {address}"))?;
        let udp = UdpSocket::bind(address).with_context(|| format!("binding {address}"))?;
        udp.set_read_timeout(Some(TIMEOUT)).context("setting a timeout")?;
        Ok(Self { tcp, udp })
    }

    /// Those of an address of the sandbox.
    pub(crate) fn outside(sandbox: &Sandbox, address: Ipv4Addr) -> Result<Self> {
        sandbox.netns().run(|| Self::start(address.into()))
    }
}

/// Adds the addresses of all peers that are called, and call.
pub(crate) fn add_peers(sandbox: &Sandbox) {
    sandbox.add_addresses([ALLOWED, DENIED]);
}

impl Pod {
    /// The pod of this number, with a link to the servers.
    pub(crate) fn new(sandbox: &Sandbox, number: u8) -> Result<Self> {
        let address = Ipv4Addr::from_bits(FIRST_POD.to_bits() + u32::from(number));
        let (netns, name) = (sandbox.empty_neighbour(), format!("pod-{number}"));
        sandbox.ip(&format!(
            "link add {name} type veth peer name eth0 netns {}\nlink set {name} up\n\
             route add {address} dev {name} src {ALLOWED}\n",
            netns.path().display(),
        ));
        sandbox.ip_in(
            &netns,
            &format!(
                "link set lo up\naddress add {address}/32 dev eth0\nlink set eth0 up\n\
                 route add default dev eth0 src {address}\n"
            ),
        );
        let (cgroup, run_dir) = (sandbox.cgroup().join(&name), sandbox.dir().join(format!("run-{name}")));
        for directory in [&cgroup, &run_dir] {
            fs::create_dir(directory).with_context(|| format!("creating {}", directory.display()))?;
        }
        Ok(Self { address, netns, cgroup, pin_dir: sandbox.pin_dir().with_file_name(name), run_dir })
    }

    /// An agent without a source in this pod.
    pub(crate) fn agent<'s>(&self, sandbox: &'s Sandbox) -> Agent<'s> {
        let agent = Agent::new(sandbox).netns(&self.netns).cgroup(&self.cgroup);
        agent.pin_dir(&self.pin_dir).run_dir(&self.run_dir).arg("--pod-ip").arg(self.address.to_string())
    }

    /// Makes sockets as the pod does: in its network namespace and its cgroup. The process stays in that cgroup.
    pub(crate) fn run<R: Send>(&self, make: impl FnOnce() -> R + Send) -> Result<R> {
        enter(&self.cgroup)?;
        Ok(self.netns.run(make))
    }
}

/// Moves this process to a cgroup, which its later sockets belong to.
pub(crate) fn enter(cgroup: &Path) -> Result<()> {
    // "0" is the writing process.
    fs::write(cgroup.join("cgroup.procs"), "0").with_context(|| format!("moving to {}", cgroup.display()))
}

impl Stand {
    /// Puts the subject in force. The agent ends afterwards, so that the kernel's work alone is measured: what it has
    /// written stays.
    pub(crate) fn start(sandbox: &Sandbox, number: u8, subject: Subject) -> Result<Self> {
        let pod = Pod::new(sandbox, number)?;
        let manifests = sandbox.dir().join(format!("manifests-{number}"));
        fs::create_dir(&manifests).context("creating a directory for manifests")?;
        manifest::write(&manifests, "all.json", subject.objects(pod.address));
        let agent = pod.agent(sandbox).manifests(&manifests);
        let policy = ["--policy", "enforce", "--policy-pod", POD];
        let agent = if subject.engine.is_of_cproxy() { agent.args(policy) } else { agent };
        agent.start().stop();
        subject.engine.program(&pod.netns, subject.peers, sandbox.dir())?;
        let servers = pod.run(|| Servers::start(pod.address.into()))??;
        enter(sandbox.cgroup())?;
        Ok(Self { subject, pod, servers })
    }
}
