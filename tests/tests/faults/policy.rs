//! Faults of an agent that enforces a network policy: nothing passes that neither the state before nor the one after
//! allows, nothing is denied that both allow, and in the end the policy is in force.
//!
//! All addresses are in the pod's own network namespace. The source of a connection says whether it is the pod's or one
//! to it.

use std::{
    cell::Cell,
    io::{self, Read as _},
    net::{IpAddr, SocketAddr, TcpStream},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use cproxy_tests::{
    Done, Server, echo, manifest,
    world::{Host, TCP, pod},
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
use serde_json::{Value, json};

use crate::{PODS, World, first_starts, restarts};

/// Arguments of the agents.
pub(crate) const ARGUMENTS: [&str; 6] =
    ["--policy", "enforce", "--policy-pod", "shop/web", "--pod-ip", "10.244.0.9,fd00:10:244::9"];

/// Maps of which each generation has one, by the names that the kernel has for them. The programs keep another one.
pub(crate) const GENERATIONS: [&str; 3] = ["POLICY_PEERS", "POLICY_RANGES", "POLICY_INTERVAL"];

/// The pod.
const WEB: Host = pod(9);
/// Peers that the policy allows in one of its states.
const BEFORE: Host = pod(3);
const AFTER: Host = pod(4);
/// Peer that it never allows. Those that it always allows are the pods of the Service.
const NEVER: Host = pod(5);

/// Peers more than there is room for in the first maps (`POLICY_ROOM_MIN`).
const CROWD: u8 = 200;

/// Faults in an ordinary run of a test.
const SAMPLE: usize = 3;

/// State of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No policy selects the pod.
    Open,
    Before,
    After,
    /// As [`State::After`], with [`CROWD`] peers more.
    Grown,
}

/// A policy that agents enforce.
pub(crate) struct Enforced {
    state: Cell<State>,
    /// Whether it has been open.
    has_been_open: Cell<bool>,
    _servers: Vec<Server>,
}

impl World {
    fn with_policy() -> Self {
        let world = Self { sample: SAMPLE, ..Self::new() };
        let mut servers = Vec::new();
        for (host, name) in [(WEB, "web"), (BEFORE, "before"), (AFTER, "after"), (NEVER, "never")] {
            world.sandbox.add_addresses(host.addresses());
            servers.extend(host.addresses().map(|address| echo::tcp(&world.sandbox, (address, TCP), name)));
        }
        let (state, has_been_open) = (Cell::new(State::Before), Cell::new(false));
        let policy = Enforced { state, has_been_open, _servers: servers };
        let world = Self { policy: Some(policy), ..world };
        world.set(State::Before);
        world
    }

    /// Writes the policy in a state.
    fn set(&self, state: State) {
        self.enforced().state.set(state);
        self.enforced().has_been_open.set(self.enforced().has_been_open.get() || state == State::Open);
        manifest::write(&self.sandbox.manifest_dir(), "policy.json", objects(state));
    }

    fn enforced(&self) -> &Enforced {
        self.policy.as_ref().unwrap()
    }
}

fn objects(state: State) -> Vec<Value> {
    let of_pod = |name: &str, label: &str, addresses: [IpAddr; 2]| {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "shop", "labels": {"app": label}},
            "status": {"phase": "Running", "podIPs": addresses.map(|address| json!({"ip": address}))},
        })
    };
    let named = [(WEB, "web"), (BEFORE, "before"), (AFTER, "after"), (NEVER, "never")];
    let mut objects: Vec<_> = named.map(|(host, name)| of_pod(name, name, host.addresses())).into();
    objects.extend(PODS.map(|number| of_pod(&format!("pod-{number}"), "always", pod(number).addresses())));
    if state == State::Grown {
        objects
            .extend((20..20 + CROWD).map(|number| of_pod(&format!("pod-{number}"), "always", pod(number).addresses())));
    }
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

/// Connects the pod and a peer over both families, in both directions. Whether all of it passes, or none.
fn passes(peer: Host) -> Result<bool, String> {
    let mut outcomes = Vec::new();
    for (own, other) in WEB.addresses().into_iter().zip(peer.addresses()) {
        outcomes.push((own, other, call(own, other), io::ErrorKind::PermissionDenied));
        outcomes.push((other, own, call(other, own), io::ErrorKind::ConnectionRefused));
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
fn call(from: IpAddr, to: IpAddr) -> io::Result<()> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddr::new(from, 0))?;
    connect(&socket, &SocketAddr::new(to, TCP))?;
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.read_exact(&mut [0])
}

impl Enforced {
    /// Whether the policy as it is written is in force.
    pub(crate) fn check(&self) -> Result<(), String> {
        let state = self.state.get();
        let (is_before, is_open) = (state == State::Before, state == State::Open);
        let peers = [(BEFORE, is_before || is_open), (AFTER, !is_before), (NEVER, is_open), (pod(PODS[0]), true)];
        for (peer, expected) in peers {
            let passes = passes(peer)?;
            if passes != expected {
                return Err(format!("{state:?}: {peer:?} passes: {passes}"));
            }
        }
        Ok(())
    }

    /// Connects all the time while `work` runs. What both states allow passes, and what none allows does not.
    pub(crate) fn while_calling<R>(&self, what: &str, work: impl FnOnce() -> R) -> R {
        let (ends, failure) = (AtomicBool::new(false), OnceLock::new());
        let mut peers = vec![(pod(PODS[0]), true), (pod(PODS[1]), true)];
        if !self.has_been_open.get() {
            peers.push((NEVER, false));
        }
        let result = thread::scope(|scope| {
            scope.spawn(|| {
                loop {
                    let is_last = ends.load(Ordering::Relaxed);
                    for &(peer, expected) in &peers {
                        match passes(peer) {
                            Ok(passes) if passes == expected => {}
                            other => drop(failure.get_or_init(|| format!("{peer:?}: {other:?}"))),
                        }
                    }
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
}

#[test]
fn a_first_start_with_a_policy_and_a_fault_can_be_repeated() {
    first_starts(&World::with_policy());
}

#[test]
fn a_restart_with_a_fault_opens_and_closes_nothing() {
    restarts(&World::with_policy());
}

#[test]
fn a_change_of_the_policy_with_a_fault_is_made_good() {
    let world = World::with_policy();
    world.with_faults(
        "change of the policy",
        || world.set(State::Before),
        || world.set(State::After),
        || world.enforced().check(),
    );
}

#[test]
fn a_pod_that_becomes_isolated_with_a_fault_is_so_later() {
    let world = World::with_policy();
    world.with_faults("isolation", || world.set(State::Open), || world.set(State::Before), || world.enforced().check());
}

#[test]
fn a_pod_that_is_no_longer_isolated_with_a_fault_opens_later() {
    let world = World::with_policy();
    world.with_faults(
        "end of isolation",
        || world.set(State::Before),
        || world.set(State::Open),
        || world.enforced().check(),
    );
}

#[test]
fn a_policy_that_outgrows_its_maps_with_a_fault_is_made_good() {
    let world = World::with_policy();
    world.with_faults(
        "growth of the policy",
        || {
            world.clean_up("growth of the policy");
            world.set(State::Before);
        },
        || world.set(State::Grown),
        || world.enforced().check(),
    );
}
