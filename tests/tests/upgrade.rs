//! Upgrades from older agents, with the real agents of an older table layout and of the last release: no call fails,
//! and no socket loses its name, whatever call of the new agent fails or is its last. Commands and agents of two
//! versions understand each other.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed call is a failed test")]

use std::{
    io::{BufRead as _, BufReader},
    net::{SocketAddr, TcpStream, UdpSocket},
    num::NonZeroU32,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use cproxy_ebpf::LAYOUT_VERSION;
use cproxy_tests::{
    Done, Server, echo,
    faults::{Call, Fault, Injection, TracedAgent, chosen_injections, injections},
    isolation::{self, Isolation, State},
    manifest,
    older::{OlderAgent, older_agents, released_agent},
    population::Shape,
    process::{Agent, RunningAgent, cproxy, cproxy_binary, eventually, other_cproxy},
    sandbox::Sandbox,
    world::{
        Form, SYNC, has_pods, pod_number, rows, serve_pods, start_agent, start_agent_with, udp_connected_to, web_with,
        while_connecting,
    },
};
use rustix::net::{AddressFamily, Protocol, SocketType, connect, socket};

/// Pods of the Service.
const PODS: [u8; 3] = [1, 2, 3];

/// Limit on the run of an agent that is killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(60);

/// Faults of each layout's upgrade in an ordinary run.
const SAMPLE: usize = 6;

/// Services that come and go while an agent is replaced.
const OTHERS: Shape = Shape::new(20, 3);

/// Agents whose table is taken over.
fn predecessors() -> impl Iterator<Item = OlderAgent> {
    older_agents().into_iter().filter(|agent| agent.layout < LAYOUT_VERSION)
}

fn start_older(older: &OlderAgent, sandbox: &Sandbox) -> RunningAgent {
    Agent::new(sandbox).binary(&older.binary).manifests(sandbox.manifest_dir()).start()
}

/// Directory of an older agent's pins.
fn pins_of(older: &OlderAgent, sandbox: &Sandbox) -> PathBuf {
    sandbox.pin_dir().join(format!("v{}", older.layout))
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
    for older in predecessors() {
        let what = format!("layout {}", older.layout);
        let (sandbox, _servers) = start_world();
        let mut before = start_older(&older, &sandbox);
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
        // Only layout 6 has state of sockets in maps that were made anew.
        let is_kept = pins_of(&older, &sandbox).join("getpeername4").exists();
        assert_eq!(is_kept, older.layout == 6, "{what}: its sockets are still there");
        drop(sockets);
        // An agent that starts looks at once.
        while_connecting(&what, || {
            agent.stop();
            agent = start_agent(&sandbox);
        });
        eventually(SYNC, "nothing of the older layout is left", || {
            let left = pinned(&pins_of(&older, &sandbox));
            if left.is_empty() { Ok(()) } else { Err(format!("{what}: {left:?}")) }
        });
        for (vip, stream) in &newer.tcp {
            assert_eq!(stream.peer_addr().unwrap(), *vip, "{what}");
        }
        agent.stop();
        cproxy(&sandbox, &["cleanup"]).success();
        assert!(!sandbox.pin_dir().exists());
    }
}

#[test]
fn sockets_of_an_older_layout_are_closed_once_their_backend_has_left() {
    for older in predecessors() {
        let (sandbox, _servers) = start_world();
        let mut before = start_older(&older, &sandbox);
        let sockets = Form::ALL.map(|form| udp_connected_to(form, PODS[2]));
        let streams = Form::ALL.map(|form| tcp_connected_to(form, PODS[2]));
        before.stop();
        let mut agent = start_agent_with(&sandbox, ["--terminate-sockets", "all"]);
        // The kernel lists it, while it does not list those from before.
        let newer = multipath_connected_to(PODS[2]);
        write(&sandbox, &PODS[..2]);
        eventually(SYNC, format_args!("layout {}: the sockets are closed", older.layout), || {
            // The kernel disconnects sockets that are closed from outside.
            let peers = sockets.iter().map(UdpSocket::peer_addr).chain(streams.iter().map(TcpStream::peer_addr));
            let open: Vec<_> = peers.flatten().collect();
            if open.is_empty() { Ok(()) } else { Err(format!("{open:?}: {}", agent.log())) }
        });
        eventually(SYNC, format_args!("layout {}: the MPTCP connection is closed", older.layout), || {
            echo::ping_tcp(&newer, "still there").err().ok_or("it is open")
        });
        agent.stop();
        cproxy(&sandbox, &["cleanup"]).success();
    }
}

fn tcp_connected_to(form: Form, pod: u8) -> TcpStream {
    eventually(SYNC, format_args!("a socket is connected to pod {pod}"), || {
        let (greeting, stream) = echo::connect_tcp(form.web()).unwrap();
        if pod_number(&greeting.name) == pod { Ok(stream) } else { Err(greeting.name) }
    })
}

/// An MPTCP connection to a pod through the ClusterIP.
fn multipath_connected_to(pod: u8) -> TcpStream {
    const MPTCP: Protocol = Protocol::from_raw(NonZeroU32::new(262).expect("not zero"));
    eventually(SYNC, format_args!("a socket is connected to pod {pod}"), || {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, Some(MPTCP)).unwrap();
        connect(&socket, &Form::V4.web()).unwrap();
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(SYNC)).unwrap();
        // Its name and the client's address.
        let lines: Vec<_> = BufReader::new(&stream).lines().take(2).map(Result::unwrap).collect();
        if lines.first().is_some_and(|name| pod_number(name) == pod) { Ok(stream) } else { Err(format!("{lines:?}")) }
    })
}

fn pinned(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn an_upgrade_with_a_fault_at_any_call_is_not_felt_and_goes_on_at_the_next_start() {
    for older in predecessors() {
        let name = format!("layout {}", older.layout);
        for injection in chosen_injections(&name, &record(&older), SAMPLE) {
            let what = format!("{name}, {injection}");
            let (sandbox, _servers) = start_world();
            let mut before = start_older(&older, &sandbox);
            let sockets = Sockets::open();
            while_connecting(&what, || {
                while_others_change(&sandbox, || {
                    before.stop();
                    let mut agent = TracedAgent::start(&sandbox, Some(injection));
                    agent.settle();
                    assert!(!agent.log().contains("panicked"), "{what}: {}", agent.log());
                    agent.kill();
                    sockets.check(&what);
                });
                let _agent = start_agent(&sandbox);
                sockets.check(&format!("{what}, then started again"));
                wait_for_pods(&sandbox, &PODS);
            });
            cproxy(&sandbox, &["cleanup"]).success();
            assert!(!sandbox.pin_dir().exists(), "{what}: pins are left");
        }
    }
}

#[test]
fn a_link_of_an_older_layout_that_cannot_be_read_gets_no_second_program_beside_it() {
    // `connect6` (BPF_CGROUP_INET6_CONNECT is 11). With both programs, sockets would show the backend as their peer.
    const LINK: &str = "call 1 of child bpf OBJ_GET_INFO_BY_FD link 11";
    for older in predecessors() {
        let is_it = |injection: &Injection| {
            injection.to_string().ends_with(LINK) && injection.fault == Fault::Error(libc::EPERM)
        };
        let injection = injections(&record(&older)).into_iter().find(is_it).unwrap();
        let (sandbox, _servers) = start_world();
        start_older(&older, &sandbox).stop();
        while_connecting(&format!("layout {}", older.layout), || {
            let mut agent = TracedAgent::start(&sandbox, Some(injection));
            assert!(!agent.settle() && agent.was_hit(), "{}", agent.log());
            assert!(agent.log().contains(&format!("v{}/connect6", older.layout)), "{}", agent.log());
            drop(start_agent(&sandbox));
        });
    }
}

#[test]
fn programs_are_kept_for_older_sockets_while_their_maps_cannot_be_read() {
    for (layout, map) in [(6, "TCP_OWNERS"), (6, "TCP_PEERS")] {
        let older = predecessors().find(|older| older.layout == layout).unwrap();
        let call = format!(" of bpf OBJ_GET /bpf/cproxy/v{layout}/{map}");
        let is_it = |injection: &Injection| {
            injection.to_string().ends_with(&call) && injection.fault == Fault::Error(libc::EACCES)
        };
        let faults = |calls: &[Call]| -> Vec<_> { injections(calls).into_iter().filter(is_it).collect() };
        // A background task makes the call, maybe after the agent is ready.
        for fault in faults(&record_until(&older, &call, |calls| !faults(calls).is_empty())) {
            let what = fault.to_string();
            let (sandbox, _servers) = start_world();
            let mut before = start_older(&older, &sandbox);
            let sockets = Sockets::open();
            before.stop();
            let mut agent = TracedAgent::start(&sandbox, Some(fault));
            assert!(agent.settle(), "{what}: {}", agent.log());
            eventually(SYNC, &what, || if agent.was_hit() { Ok(()) } else { Err("the call is not made") });
            // Without the maps, a wrong agent removes the programs within milliseconds of that call.
            thread::sleep(Duration::from_millis(300));
            sockets.check(&what);
            agent.kill();
            cproxy(&sandbox, &["cleanup"]).success();
        }
    }
}

#[test]
fn an_upgrade_from_the_last_release_and_the_way_back_are_not_felt() {
    let released = released_agent();
    let (sandbox, _servers) = start_world();
    write(&sandbox, &PODS[..2]);
    let mut before = start_older(&released, &sandbox);
    let sockets = Sockets::open();
    let mut agent = while_connecting("upgrade", || {
        before.stop();
        start_agent(&sandbox)
    });
    sockets.check("after the upgrade");
    // No backend leaves, so all sockets stay open.
    write(&sandbox, &PODS);
    wait_for_pods(&sandbox, &PODS);
    let newer = Sockets::open();
    if released.layout != LAYOUT_VERSION {
        // It refuses the way back: `an_older_agent_refuses_the_table_of_a_newer_one_by_name`.
        return;
    }
    let mut after = while_connecting("downgrade", || {
        agent.stop();
        start_older(&released, &sandbox)
    });
    sockets.check("after the downgrade");
    newer.check("after the downgrade");
    write(&sandbox, &PODS[1..]);
    wait_for_pods(&sandbox, &PODS[1..]);
    after.stop();
    other_cproxy(&sandbox, &released.binary, &["cleanup"]).success();
    assert!(!sandbox.pin_dir().exists());
}

/// Commands that read the table, the run directory or the agent's answers.
const COMMANDS: [&[&str]; 9] = [
    &["get", "services", "-o", "json"],
    &["get", "backends", "-o", "wide"],
    &["get", "sockets"],
    &["get", "counters"],
    &["get", "config"],
    &["explain", "10.96.0.10:80"],
    &["explain", "default/web", "-o", "json"],
    &["check"],
    &["wait", "--for", "default/web", "--timeout", "10s"],
];

#[test]
fn commands_of_the_last_release_and_of_this_version_answer_at_an_agent_of_the_other() {
    let (released, present) = (released_agent().binary, cproxy_binary());
    for (agent, cli) in [(&released, &present), (&present, &released)] {
        let (sandbox, _servers) = start_world();
        let mut running = Agent::new(&sandbox).binary(agent).manifests(sandbox.manifest_dir()).start();
        let _sockets = Sockets::open();
        for command in COMMANDS {
            let [output, own] = [cli, agent].map(|program| other_cproxy(&sandbox, program, command));
            let what = format!("{} at an agent {}: {command:?}: {output:?}", cli.display(), agent.display());
            assert!(!output.stderr.contains("panicked"), "{what}");
            if released_agent().layout == LAYOUT_VERSION {
                assert_eq!(output.code, own.code, "{what}, instead of {own:?}");
                assert!(!output.stdout.is_empty() || own.stdout.is_empty(), "{what}");
            } else {
                // One line with the reason.
                let is_one_line = output.stdout.contains("table layout") || output.stderr.lines().count() == 1;
                assert!(output.code == 0 || is_one_line, "{what}");
            }
        }
        assert!(running.exit_status().is_none(), "{}", running.log());
        assert!(!running.log().contains("panicked"), "{}", running.log());
    }
}

/// Calls of an agent that takes over from an older one.
fn record(older: &OlderAgent) -> Vec<Call> {
    record_until(older, "ready", |_| true)
}

/// As [`record`], once the agent is ready and its calls are enough, which `what` describes.
fn record_until(older: &OlderAgent, what: &str, are_enough: impl Fn(&[Call]) -> bool) -> Vec<Call> {
    let (sandbox, _servers) = start_world();
    let mut before = start_older(older, &sandbox);
    let _sockets = Sockets::open();
    before.stop();
    let mut agent = TracedAgent::start(&sandbox, None);
    assert!(agent.settle(), "{}", agent.log());
    let mut calls = agent.take_calls();
    eventually(SYNC, what, || {
        calls.extend(agent.take_calls());
        if are_enough(&calls) { Ok(()) } else { Err("it has made other calls alone") }
    });
    agent.kill();
    cproxy(&sandbox, &["cleanup"]).success();
    calls
}

/// Other Services come and go without a pause while `work` runs. They are gone at its end.
fn while_others_change<R>(sandbox: &Sandbox, work: impl FnOnce() -> R) -> R {
    let (dir, is_over) = (sandbox.manifest_dir(), AtomicBool::new(false));
    let result = thread::scope(|scope| {
        scope.spawn(|| {
            for count in (0..=OTHERS.services).cycle() {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                manifest::write(&dir, "others.json", OTHERS.objects(0..count));
                thread::sleep(Duration::from_millis(2));
            }
        });
        let _done = Done(&is_over);
        work()
    });
    manifest::write(&dir, "others.json", []);
    result
}

/// The first agent that enforces takes over the table of one that knew no policies. Then the pod stays isolated.
#[test]
fn a_policy_comes_with_an_upgrade_and_stays() {
    for older in predecessors() {
        let what = format!("layout {}", older.layout);
        let (sandbox, _servers) = start_world();
        let isolation = Isolation::new(&sandbox, PODS);
        let mut before = start_older(&older, &sandbox);
        let sockets = Sockets::open();
        // Until its policy has come, the pod is closed: clients would notice.
        before.stop();
        let mut agent = start_agent_with(&sandbox, isolation::ARGUMENTS);
        isolation.check().unwrap_or_else(|error| panic!("{what}: {error}"));
        isolation.while_calling(&what, || {
            sockets.check(&what);
            for state in [State::After, State::Before] {
                agent.kill();
                // It refuses, and leaves all as it is.
                let mut refused = Agent::new(&sandbox).binary(&older.binary).manifests(sandbox.manifest_dir()).spawn();
                assert_eq!(refused.wait(KILL_TIMEOUT).unwrap().code(), Some(1), "{}", refused.log());
                isolation.set(state);
                agent = start_agent_with(&sandbox, isolation::ARGUMENTS);
                isolation.check().unwrap_or_else(|error| panic!("{what}: {error}"));
                sockets.check(&what);
            }
        });
        agent.stop();
        cproxy(&sandbox, &["cleanup", "--policy-too"]).success();
        assert!(!sandbox.pin_dir().exists(), "{what}: pins are left");
    }
}

#[test]
fn an_older_agent_refuses_the_table_of_a_newer_one_by_name() {
    for older in predecessors() {
        let (sandbox, _servers) = start_world();
        start_agent(&sandbox).stop();
        while_connecting(&format!("layout {}", older.layout), || {
            let mut refused = Agent::new(&sandbox).binary(&older.binary).manifests(sandbox.manifest_dir()).spawn();
            let status = refused.wait(KILL_TIMEOUT).unwrap();
            assert_eq!(status.code(), Some(1), "{}", refused.log());
            let expected = format!("holds table layout {LAYOUT_VERSION}");
            assert!(refused.log().contains(&expected), "{}", refused.log());
        });
    }
}
