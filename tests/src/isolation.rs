//! A pod whose network policy changes, and clients that call all the time: what the policy always allows passes, and
//! what it never allows does not.
//!
//! All addresses are in the pod's own network namespace. The source of a connection says whether it is the pod's or one
//! to it.

use std::{
    cell::Cell,
    io::{self, Read as _},
    net::{IpAddr, SocketAddr, TcpStream},
    path::PathBuf,
    sync::OnceLock,
    time::Duration,
};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
use serde_json::{Value, json};

use crate::{
    Server, echo,
    manifest::{self, Endpoint},
    sandbox::Sandbox,
    world::{Host, PORT, TCP, cluster_ip, pod, service, slices_of, while_repeating},
};

/// Arguments of the agents.
pub const ARGUMENTS: [&str; 6] =
    ["--policy", "enforce", "--policy-pod", "shop/web", "--pod-ip", "10.244.0.9,fd00:10:244::9"];

/// The pod.
const WEB: Host = pod(9);
/// Peers that the policy allows in one of its states.
const BEFORE: Host = pod(6);
const AFTER: Host = pod(7);
/// Peer that it never allows, and the ClusterIP of its Service.
const NEVER: Host = pod(NEVER_NUMBER);
const NEVER_NUMBER: u8 = 5;
const NEVER_VIP: Host = cluster_ip(15);

/// Peers more than there is room for in the first maps (`POLICY_ROOM_MIN`).
const CROWD: u8 = 200;

/// Limit on the wait for a server's greeting.
const PATIENCE: Duration = Duration::from_secs(30);

/// State of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// No policy selects the pod.
    Open,
    /// It allows one peer.
    Before,
    /// It allows another.
    After,
    /// As [`State::After`], with more peers than there is room for in the first maps.
    Grown,
}

/// The pod, its peers and its policy.
#[derive(Debug)]
pub struct Isolation {
    manifests: PathBuf,
    /// Pods that it always allows.
    always: Vec<u8>,
    state: Cell<State>,
    /// Whether it has been open.
    has_been_open: Cell<bool>,
    _servers: Vec<Server>,
}

impl Isolation {
    /// Gives the pod and its peers their addresses, starts their servers, and writes the policy, which always allows
    /// these pods.
    pub fn new(sandbox: &Sandbox, always: impl IntoIterator<Item = u8>) -> Self {
        let mut servers = Vec::new();
        for (host, name) in [(WEB, "web"), (BEFORE, "before"), (AFTER, "after"), (NEVER, "never")] {
            sandbox.add_addresses(host.addresses());
            servers.extend(host.addresses().map(|address| echo::tcp(sandbox, (address, TCP), name)));
        }
        let this = Self {
            manifests: sandbox.manifest_dir(),
            always: always.into_iter().collect(),
            state: Cell::new(State::Before),
            has_been_open: Cell::new(false),
            _servers: servers,
        };
        this.set(State::Before);
        this
    }

    /// Writes the policy in a state.
    pub fn set(&self, state: State) {
        self.state.set(state);
        self.has_been_open.set(self.has_been_open.get() || state == State::Open);
        manifest::write(&self.manifests, "policy.json", self.objects(state));
    }

    /// Objects of a cluster in which the policy has a state.
    pub fn objects(&self, state: State) -> Vec<Value> {
        let of_pod = |name: &str, label: &str, host: Host| {
            json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": name, "namespace": "shop", "labels": {"app": label}},
                "status": {"phase": "Running", "podIPs": host.addresses().map(|address| json!({"ip": address}))},
            })
        };
        let named = [(WEB, "web"), (BEFORE, "before"), (AFTER, "after"), (NEVER, "never")];
        let mut objects: Vec<_> = named.map(|(host, name)| of_pod(name, name, host)).into();
        objects.push(service("never", NEVER_VIP).into());
        objects.extend(slices_of("never", [NEVER_NUMBER], |_, address| Endpoint::ready(address)));
        let crowd = if state == State::Grown { CROWD } else { 0 };
        let always = self.always.iter().copied().chain(20..20 + crowd);
        objects.extend(always.map(|number| of_pod(&format!("pod-{number}"), "always", pod(number))));
        if state == State::Open {
            return objects;
        }
        let other = if state == State::Before { "before" } else { "after" };
        let peers = json!([{"podSelector": {"matchExpressions": [
            {"key": "app", "operator": "In", "values": ["always", other]},
        ]}}]);
        objects.push(json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"name": "peers", "namespace": "shop"},
            "spec": {
                "podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"from": peers}], "egress": [{"to": peers}],
            },
        }));
        objects
    }

    /// Checks that the policy as it is written is in force, and that Services still lead to its verdicts.
    ///
    /// # Errors
    /// A peer finds another state.
    pub fn check(&self) -> Result<(), String> {
        let state = self.state.get();
        let (is_before, is_open) = (state == State::Before, state == State::Open);
        let peers = [(BEFORE, is_before || is_open), (AFTER, !is_before), (NEVER, is_open)];
        let always = self.always.iter().map(|number| (pod(*number), true));
        for (peer, expected) in peers.into_iter().chain(always) {
            let passes = passes(peer)?;
            if passes != expected {
                return Err(format!("{state:?}: {peer:?} passes: {passes}"));
            }
        }
        match never_by_service() {
            Ok(()) if is_open => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !is_open => Ok(()),
            other => Err(format!("{state:?}: through a ClusterIP: {other:?}")),
        }
    }

    /// Connects all the time while `work` runs.
    ///
    /// # Panics
    /// When a call is denied that both states allow, or passes although neither does.
    pub fn while_calling<R>(&self, what: &str, work: impl FnOnce() -> R) -> R {
        let always = self.always.iter().map(|number| (pod(*number), true));
        let is_closed = !self.has_been_open.get();
        let peers: Vec<_> = always.chain(is_closed.then_some((NEVER, false))).collect();
        let call_all = |failure: &OnceLock<String>| {
            for &(peer, expected) in &peers {
                match passes(peer) {
                    Ok(passes) if passes == expected => {}
                    other => drop(failure.get_or_init(|| format!("{peer:?}: {other:?}"))),
                }
            }
            if is_closed && never_by_service().is_ok() {
                failure.get_or_init(|| "a denied peer is reached through its Service".to_owned());
            }
        };
        while_repeating(what, call_all, work)
    }
}

/// Connects the pod and a peer over both families, in both directions. Whether all of it passes, or none.
fn passes(peer: Host) -> Result<bool, String> {
    let mut outcomes = Vec::new();
    for (own, other) in WEB.addresses().into_iter().zip(peer.addresses()) {
        outcomes.push((own, other, call(own, (other, TCP).into()), io::ErrorKind::PermissionDenied));
        outcomes.push((other, own, call(other, (own, TCP).into()), io::ErrorKind::ConnectionRefused));
    }
    let mut passed = Vec::new();
    for (from, to, outcome, denied) in outcomes {
        passed.push(match outcome {
            Ok(()) => true,
            Err(error) if error.kind() == denied => false,
            Err(error) => return Err(format!("from {from} to {to}: {error}")),
        });
    }
    match &passed[..] {
        [true, true, true, true] => Ok(true),
        [false, false, false, false] => Ok(false),
        other => Err(format!("a part passes: {other:?}")),
    }
}

/// Connects, and waits for the server's first byte.
fn call(from: IpAddr, to: SocketAddr) -> io::Result<()> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddr::new(from, 0))?;
    connect(&socket, &to)?;
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.read_exact(&mut [0])
}

/// A call of the pod to the ClusterIP of the peer that is never allowed.
fn never_by_service() -> io::Result<()> {
    call(WEB.v4.into(), (NEVER_VIP.v4, PORT).into())
}
