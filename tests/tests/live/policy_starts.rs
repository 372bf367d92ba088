//! The start of a pod whose policy is there before it: a workload that waits for `cproxy wait` finds it in force with
//! its first call, and one that does not wait never gets through to a denied peer once the programs are attached.
//!
//! All addresses are in the pod's own network namespace. An ordinary run starts a few pods, `CPROXY_SOAK=1` a thousand.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::{
    io::{self, Read as _},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use cproxy_tests::{
    Done, Server, echo,
    manifest::{self, http_service},
    process::{Agent, cproxy},
    random,
    sandbox::Sandbox,
    world::{Host, TCP, UDP, pod},
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
use serde_json::json;

/// Pods that start in an ordinary run, and in a soak.
const STARTS: usize = 20;
const STARTS_OF_SOAK: usize = 1_000;

const WEB: Host = pod(9);
const FRIEND: Host = pod(1);
const STRANGER: Host = pod(2);

/// A call of the pod, or one to it. The source says which, since all addresses are in its network namespace.
#[derive(Clone, Copy, Debug)]
struct Call {
    source: IpAddr,
    to: SocketAddr,
    is_denied: bool,
    /// Error of a denied one.
    error: io::ErrorKind,
}

/// Calls of each kind, over both families, directly and through a ClusterIP.
fn calls() -> Vec<Call> {
    let mut calls = Vec::new();
    for (peer, service, is_denied) in [(FRIEND, "10.96.0.11:80", false), (STRANGER, "10.96.0.12:80", true)] {
        let [v4, v6] = peer.addresses().map(|address| SocketAddr::new(address, TCP));
        for (source, to) in [(WEB.v4.into(), v4), (WEB.v6.into(), v6), (WEB.v4.into(), service.parse().unwrap())] {
            calls.push(Call { source, to, is_denied, error: io::ErrorKind::PermissionDenied });
        }
        for (source, to) in peer.addresses().into_iter().zip(WEB.addresses()) {
            calls.push(Call { source, to: (to, TCP).into(), is_denied, error: io::ErrorKind::ConnectionRefused });
        }
    }
    calls
}

impl Call {
    /// Connects, and waits for the server's first byte.
    fn make(self) -> io::Result<()> {
        let family = if self.to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        bind(&socket, &SocketAddr::new(self.source, 0))?;
        connect(&socket, &self.to)?;
        let mut stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.read_exact(&mut [0])
    }

    /// Fails unless the outcome is that of the policy.
    fn check(self, when: &str) {
        let outcome = self.make().map_err(|error| error.kind());
        let expected = if self.is_denied { Err(self.error) } else { Ok(()) };
        assert_eq!(outcome, expected, "{when}: {self:?}");
    }
}

/// A sandbox, which is a new network namespace, a cgroup, a bpffs and directories, with the pod's peers and its policy.
fn prepare() -> (Sandbox, Vec<Server>) {
    let sandbox = Sandbox::for_test();
    let hosts = [(WEB, "web"), (FRIEND, "friend"), (STRANGER, "stranger")];
    sandbox.add_addresses(hosts.iter().flat_map(|(host, _)| host.addresses()));
    let mut servers = Vec::new();
    for (host, name) in hosts {
        servers.extend(host.addresses().map(|address| echo::tcp(&sandbox, (address, TCP), name)));
    }
    servers.extend([FRIEND, STRANGER].map(|host| echo::udp(&sandbox, (host.v4, UDP), "peer")));
    let pods = hosts.map(|(host, name)| {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "shop", "labels": {"app": name}},
            "status": {"phase": "Running", "podIPs": host.addresses().map(|address| json!({"ip": address}))},
        })
    });
    let friends = json!([{"podSelector": {"matchLabels": {"app": "friend"}}}]);
    let policy = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "friends", "namespace": "shop"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": friends}], "egress": [{"to": friends}],
        },
    });
    let services = [("friend", "10.96.0.11", FRIEND), ("stranger", "10.96.0.12", STRANGER)];
    let services = services.into_iter().flat_map(|(name, vip, host)| http_service(name, vip, [host.v4.to_string()]));
    manifest::write(&sandbox.manifest_dir(), "cluster.json", pods.into_iter().chain([policy]).chain(services));
    (sandbox, servers)
}

/// Outcomes of a call that a workload repeats from before the agent's start until after it.
#[derive(Debug, Default)]
struct Impatient {
    /// Calls before the first refusal, while no program was attached.
    before: usize,
    refused: usize,
    /// Calls that passed after a refusal.
    after: usize,
}

impl Impatient {
    fn add(&mut self, call: Call) {
        match call.make() {
            Ok(()) if self.refused == 0 => self.before += 1,
            Ok(()) => self.after += 1,
            Err(error) if error.kind() == call.error => self.refused += 1,
            // A ClusterIP of which no program knows.
            Err(error) if error.kind() == io::ErrorKind::NetworkUnreachable && self.refused == 0 => self.before += 1,
            Err(error) => panic!("{call:?}: {error}"),
        }
    }
}

/// Sends a datagram of the pod to the peer. True if it is answered.
fn is_answered(peer: Host) -> bool {
    let socket = UdpSocket::bind((WEB.v4, 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    match socket.send_to(b"?", (peer.v4, UDP)) {
        Ok(_) => socket.recv(&mut [0; 16]).is_ok(),
        Err(error) => {
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            false
        }
    }
}

#[test]
fn no_call_gets_through_a_policy_that_was_there_before_the_pod() {
    let starts = if random::is_soak() { STARTS_OF_SOAK } else { STARTS };
    let calls = calls();
    let (mut before, mut closed) = (0, 0);
    for number in 0..starts {
        let (sandbox, _servers) = prepare();
        let own = WEB.addresses().map(|address| address.to_string()).join(",");
        let agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir());
        let agent = agent.args(["--policy", "enforce", "--policy-pod", "shop/web", "--pod-ip", &own]);
        let is_over = AtomicBool::new(false);
        let impatient = || {
            sandbox.enter();
            let mut seen: Vec<_> = calls.iter().map(|_| Impatient::default()).collect();
            loop {
                let is_last = is_over.load(Ordering::Relaxed);
                seen.iter_mut().zip(&calls).for_each(|(seen, call)| seen.add(*call));
                if is_last {
                    return seen;
                }
            }
        };
        let seen = thread::scope(|scope| {
            let impatient = scope.spawn(impatient);
            let done = Done(&is_over);
            let _agent = agent.spawn();
            cproxy(&sandbox, &["wait", "--timeout", "120s"]).success();
            // The workload's first calls.
            calls.iter().for_each(|call| call.check(&format!("start {number}")));
            assert_eq!([FRIEND, STRANGER].map(is_answered), [true, false], "start {number}");
            drop(done);
            impatient.join().unwrap()
        });
        for (seen, call) in seen.iter().zip(&calls).filter(|(_, call)| call.is_denied) {
            assert_eq!(seen.after, 0, "start {number}: {call:?} got through: {seen:?}");
            assert!(seen.refused > 0, "start {number}: {call:?}: {seen:?}");
        }
        before += seen.iter().map(|seen| seen.before).sum::<usize>();
        closed +=
            seen.iter().zip(&calls).filter(|(_, call)| !call.is_denied).map(|(seen, _)| seen.refused).sum::<usize>();
    }
    let outcome = format!("{before} before anything was attached, {closed} refused although the policy allows them");
    eprintln!("{starts} starts; calls that did not wait: {outcome}");
}
