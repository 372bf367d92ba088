//! A pod for each subject, and the servers outside, in the sandbox's network namespace, which has no rules.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result};
use cproxy_benches::pod::{Pod, enter};
use cproxy_tests::{manifest, process::Daemon, sandbox::Sandbox};
use rustix::net::sockopt::{self, Timeout};

use crate::engine::{ALLOWED, DENIED, POD, PORT, Subject};

/// Limit on waiting for a connection, a datagram or a stream's bytes, longer than any takes.
const TIMEOUT: Duration = Duration::from_secs(10);

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
    /// The engine that the kernel asks, if any.
    _queue: Option<Daemon>,
}

impl Servers {
    fn start(address: IpAddr) -> Result<Self> {
        let address = SocketAddr::new(address, PORT);
        let tcp = TcpListener::bind(address).with_context(|| format!("listening on {address}"))?;
        sockopt::set_socket_timeout(&tcp, Timeout::Recv, Some(TIMEOUT)).context("setting a timeout")?;
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

impl Stand {
    /// Puts the subject in force. The agent ends afterwards, so that the kernel's work alone is measured: what it has
    /// written stays.
    pub(crate) fn start(sandbox: &Sandbox, number: u8, subject: Subject) -> Result<Self> {
        let pod = Pod::new(sandbox, number, ALLOWED)?;
        let manifests = sandbox.dir().join(format!("manifests-{number}"));
        fs::create_dir(&manifests).context("creating a directory for manifests")?;
        manifest::write(&manifests, "all.json", subject.objects(pod.address));
        let agent = pod.agent(sandbox).manifests(&manifests);
        let policy = ["--policy", "enforce", "--policy-pod", POD];
        let agent = if subject.engine.is_of_cproxy() { agent.args(policy) } else { agent };
        agent.start().stop();
        let queue = subject.enforce(sandbox, &pod.netns, pod.address)?;
        let servers = pod.run(|| Servers::start(pod.address.into()))??;
        enter(sandbox.cgroup())?;
        Ok(Self { subject, pod, servers, _queue: queue })
    }
}
