//! Upgrades from agents of older table layouts, with the real agents of those layouts: no call fails, and no socket
//! loses its name, whenever the new agent is killed.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed call is a failed test")]

use std::{
    env,
    net::{SocketAddr, TcpStream, UdpSocket},
    path::{Path, PathBuf},
    time::Duration,
};

use cproxy_ebpf::LAYOUT_VERSION;
use cproxy_tests::{
    Server, echo,
    faults::{Fault, Injection, TracedAgent},
    manifest,
    process::{Agent, RunningAgent, cproxy, eventually},
    random,
    sandbox::Sandbox,
    world::{Form, SYNC, has_pods, pod_number, rows, serve_pods, start_agent, web_with, while_connecting},
};

/// Variable with the agents: `LAYOUT=PATH`, separated by commas.
const VARIABLE: &str = "CPROXY_OLDER_AGENTS";

/// Pods of the Service.
const PODS: [u8; 3] = [1, 2, 3];

/// Limit on the run of an agent that is killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(60);

/// Calls of `bpf(2)` of an agent and its child before the first of which the agent is not killed any more.
const CALLS_MAX: usize = 400;

/// Agent of an older layout.
struct Older {
    layout: u32,
    binary: PathBuf,
}

/// All of them.
fn older() -> Vec<Older> {
    let value = env::var(VARIABLE).unwrap_or_else(|_| panic!("{VARIABLE} is not set: use `cargo xtask test`"));
    let read = |entry: &str| {
        let (layout, binary) = entry.split_once('=')?;
        Some(Older { layout: layout.parse().ok()?, binary: binary.into() })
    };
    value.split(',').map(|entry| read(entry).unwrap_or_else(|| panic!("{entry} in {VARIABLE}"))).collect()
}

impl Older {
    fn start(&self, sandbox: &Sandbox) -> RunningAgent {
        let mut agent = Agent::new(sandbox).binary(&self.binary).manifests(sandbox.manifest_dir()).start();
        agent.wait_ready(SYNC);
        agent
    }

    /// Directory of its pins.
    fn pins(&self, sandbox: &Sandbox) -> PathBuf {
        sandbox.pin_dir().join(format!("v{}", self.layout))
    }
}

fn start_world() -> (Sandbox, Vec<Server>) {
    let sandbox = Sandbox::for_test();
    let servers = serve_pods(&sandbox, PODS);
    write(&sandbox, &PODS);
    (sandbox, servers)
}

fn write(sandbox: &Sandbox, pods: &[u8]) {
    manifest::write(&sandbox.manifest_dir(), "web.json", web_with(pods.to_vec()));
}

fn wait_for_pods(sandbox: &Sandbox, pods: &[u8]) {
    eventually(SYNC, "the table follows", || {
        let rows = rows(sandbox, "services");
        let is_so = rows.len() == 4 && rows.iter().all(|row| has_pods(row, pods));
        if is_so { Ok(()) } else { Err(format!("{rows:#?}")) }
    });
}

/// Sockets of an application, of every kind and form.
struct Sockets {
    tcp: Vec<(SocketAddr, TcpStream)>,
    udp: Vec<(SocketAddr, UdpSocket)>,
    /// With the pod that each flow goes to.
    flows: Vec<(SocketAddr, UdpSocket, u8)>,
}

impl Sockets {
    fn open() -> Self {
        let vips = Form::ALL.map(Form::web);
        let connect_udp = |vip: SocketAddr, form: Form| {
            let socket = UdpSocket::bind(form.wildcard()).unwrap();
            socket.set_read_timeout(Some(SYNC)).unwrap();
            socket.connect(vip).unwrap();
            (vip, socket)
        };
        let flow = |form: Form| {
            let socket = UdpSocket::bind(form.wildcard()).unwrap();
            socket.set_read_timeout(Some(SYNC)).unwrap();
            let (pod, _) = echo::ask_udp_from(&socket, form.web()).unwrap();
            (form.web(), socket, pod_number(&pod))
        };
        Self {
            tcp: vips.map(|vip| (vip, echo::connect_tcp(vip).unwrap().1)).into(),
            udp: Form::ALL.map(|form| connect_udp(form.web(), form)).into(),
            flows: Form::ALL.map(flow).into(),
        }
    }

    /// They work, show the ClusterIP, and stay with their pods.
    fn check(&self, when: &str) {
        for (vip, stream) in &self.tcp {
            assert_eq!(stream.peer_addr().unwrap(), *vip, "{when}: getpeername of TCP");
            echo::ping_tcp(stream, "still there").unwrap_or_else(|error| panic!("{when}: {vip}: {error}"));
        }
        for (vip, socket) in &self.udp {
            assert_eq!(socket.peer_addr().unwrap(), *vip, "{when}: getpeername of UDP");
            socket.send(b"name").unwrap();
            let (_, from) = socket.recv_from(&mut [0; 64]).unwrap_or_else(|error| panic!("{when}: {vip}: {error}"));
            assert_eq!(from, *vip, "{when}: the source of an answer to connected UDP");
        }
        for (vip, socket, pod) in &self.flows {
            let (answered, from) = echo::ask_udp_from(socket, *vip).unwrap();
            assert_eq!((pod_number(&answered), from), (*pod, *vip), "{when}: a flow of unconnected UDP");
        }
    }
}

#[test]
fn an_upgrade_from_an_older_layout_is_not_felt() {
    for older in older() {
        let what = format!("layout {}", older.layout);
        let (sandbox, _servers) = start_world();
        let mut before = older.start(&sandbox);
        let sockets = Sockets::open();
        sockets.check(&what);
        let mut agent = while_connecting(&what, || {
            before.stop();
            let agent = start_agent(&sandbox);
            sockets.check(&format!("{what}, after the upgrade"));
            agent
        });
        // Sockets of both kinds exist side by side, and changes reach both.
        let newer = Sockets::open();
        write(&sandbox, &PODS[..2]);
        wait_for_pods(&sandbox, &PODS[..2]);
        write(&sandbox, &PODS);
        wait_for_pods(&sandbox, &PODS);
        assert!(older.pins(&sandbox).join("getpeername4").exists(), "{what}: its sockets are still there");
        drop(sockets);
        // An agent that starts looks at once.
        while_connecting(&what, || {
            agent.stop();
            agent = start_agent(&sandbox);
        });
        // The storage of layout 5 stays while there is a process that the agent may not look into.
        if older.layout != 5 {
            eventually(SYNC, "nothing of the older layout is left", || {
                let left = pinned(&older.pins(&sandbox));
                if left.is_empty() { Ok(()) } else { Err(format!("{what}: {left:?}")) }
            });
        }
        for (vip, stream) in &newer.tcp {
            assert_eq!(stream.peer_addr().unwrap(), *vip, "{what}");
        }
        agent.stop();
        cproxy(&sandbox, &["cleanup"]).success();
        assert!(!sandbox.pin_dir().exists());
    }
}

fn pinned(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn an_upgrade_that_is_killed_at_any_call_goes_on_at_the_next_start() {
    let step = if random::is_soak() { 1 } else { 23 };
    for older in older() {
        let first = random::seed() as usize % step + 1;
        let mut call = first;
        loop {
            let what = format!("layout {}, killed at call {call} of bpf(2)", older.layout);
            let (sandbox, _servers) = start_world();
            let mut before = older.start(&sandbox);
            let sockets = Sockets::open();
            let was_killed = while_connecting(&what, || {
                before.stop();
                let was_killed = run_and_kill(&sandbox, call);
                sockets.check(&what);
                let _agent = start_agent(&sandbox);
                sockets.check(&format!("{what}, then started again"));
                was_killed
            });
            cproxy(&sandbox, &["cleanup"]).success();
            if !was_killed || call > CALLS_MAX {
                assert!(call > first, "{what}: it was never killed");
                break;
            }
            call += step;
        }
    }
}

/// Runs an agent that is killed before a call of `bpf(2)` by itself or by its child, by number. Returns false if it got
/// ready before.
fn run_and_kill(sandbox: &Sandbox, number: usize) -> bool {
    let injection = Injection { calls: "bpf", fault: Fault::Kill, number };
    let mut agent = TracedAgent::start(sandbox, "bpf", Some(injection));
    let is_ready = agent.settle();
    agent.kill();
    !is_ready
}

#[test]
fn an_older_agent_refuses_the_table_of_a_newer_one_by_name() {
    for older in older() {
        let (sandbox, _servers) = start_world();
        start_agent(&sandbox).stop();
        while_connecting(&format!("layout {}", older.layout), || {
            let mut refused = Agent::new(&sandbox).binary(&older.binary).manifests(sandbox.manifest_dir()).start();
            let status = refused.wait(KILL_TIMEOUT).unwrap();
            assert_eq!(status.code(), Some(1), "{}", refused.log());
            let expected = format!("holds table layout {LAYOUT_VERSION}");
            assert!(refused.log().contains(&expected), "{}", refused.log());
        });
    }
}
