//! Many threads with traffic of every kind, while endpoints change all the time and the agent is killed now and then.
//! Pods that have left a Service go on running, so nothing may fail: each request succeeds, each answer is from a pod
//! that was in the Service, each source is the VIP that was asked, and no socket receives another one's answer.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write as _},
    net::{SocketAddr, UdpSocket},
    sync::{
        RwLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use cproxy_tests::{
    Done, Server, echo,
    manifest::{self, Endpoint},
    nonce,
    process::{Agent, RunningAgent, eventually},
    sandbox::{Netns, Sandbox},
    world::{self, PORT, UDP, cluster_ip, has_pods, pod, pod_name, pod_number, rows, service, slices_of},
};
use serde_json::Value;

/// Limit on every wait.
const PATIENCE: Duration = Duration::from_secs(20);
const THREADS: usize = 64;
/// Number of frontends: two protocols in two families.
const FRONTENDS: usize = 4;
const SERVICES: [u8; 6] = [1, 2, 3, 4, 5, 6];
/// Number of pods of a Service; no pod belongs to two.
const PODS_OF_SERVICE: u8 = 4;
/// A pod in no Service.
const LONER: u8 = 99;
const GENERATIONS: u64 = 60;
const AGENT_DIES_AFTER: [u64; 2] = [GENERATIONS / 3, 2 * GENERATIONS / 3];
/// Number of rounds of one unconnected socket before it is replaced.
const ROUNDS_OF_SOCKET: usize = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    /// Keeps its flows, and gets no new ones.
    Terminating,
}

/// The pods behind each Service at one time.
type Generation = BTreeMap<u8, BTreeMap<u8, State>>;

/// All generations, the latest last, and the kernel's progress as far as it is known.
struct History {
    generations: RwLock<Vec<Generation>>,
    /// Latest generation seen in the kernel, which holds none before it any more.
    confirmed: AtomicUsize,
}

impl History {
    /// Earliest generation that the kernel may have.
    fn confirmed(&self) -> usize {
        self.confirmed.load(Ordering::SeqCst)
    }

    /// A pod's states from generation `since` until now. At any time since, the kernel had one of these.
    fn states(&self, service: u8, pod: u8, since: usize) -> Vec<Option<State>> {
        self.generations.read().unwrap()[since..].iter().map(|sets| sets[&service].get(&pod).copied()).collect()
    }

    /// Whether any of the Service's pods has left it.
    fn has_lost_any(&self, service: u8, since: usize) -> bool {
        pods_of(service).any(|pod| {
            let states = self.states(service, pod, since);
            states.contains(&None) && states.iter().any(Option::is_some)
        })
    }
}

fn pods_of(service: u8) -> impl Iterator<Item = u8> {
    (1..=PODS_OF_SERVICE).map(move |pod| service * 10 + pod)
}

/// The generation of that number: each pod ready, terminating or gone. The ready pods of a Service always differ from
/// those of the generation before, so that they identify the generation in the kernel.
fn generation(number: u64) -> Generation {
    let mut random = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut draw = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    let mut generation = Generation::new();
    for service in SERVICES {
        let states = [Some(State::Ready), Some(State::Terminating), None];
        let pods = pods_of(service).zip(0..).map(|(pod, place)| match (place + number) % u64::from(PODS_OF_SERVICE) {
            0 => (pod, Some(State::Ready)),
            // Ready in the next generation, so not in this one.
            3 => (pod, states[1 + usize::try_from(draw(2)).unwrap()]),
            _ => (pod, states[usize::try_from(draw(3)).unwrap()]),
        });
        generation.insert(service, pods.filter_map(|(pod, state)| Some((pod, state?))).collect());
    }
    generation
}

fn service_name(number: u8) -> String {
    format!("service-{number}")
}

fn write(sandbox: &Sandbox, generation: &Generation) {
    let objects = generation.iter().flat_map(|(&number, pods)| {
        let slices = slices_of(&service_name(number), pods.keys().copied(), |pod, address| match pods[&pod] {
            State::Ready => Endpoint::ready(address),
            State::Terminating => Endpoint::terminating(address, true),
        });
        std::iter::once(service(&service_name(number), cluster_ip(number)).into()).chain(slices)
    });
    manifest::write(&sandbox.manifest_dir(), "services.json", objects);
}

/// Whether new connections to all frontends go to exactly the ready pods of this generation.
fn is_in_force(rows: &[Value], generation: &Generation) -> bool {
    generation.iter().all(|(&number, pods)| {
        let ready = pods.iter().filter(|(_, state)| **state == State::Ready);
        let ready: Vec<_> = ready.map(|(pod, _)| *pod).collect();
        let rows: Vec<_> = rows.iter().filter(|row| cluster_ip(number).is_of(row)).collect();
        rows.len() == FRONTENDS && rows.iter().all(|row| has_pods(row, &ready))
    })
}

/// A server that greets and one that repeats questions, both in both families.
fn serve(sandbox: &Sandbox, number: u8) -> Vec<Server> {
    sandbox.add_addresses(pod(number).addresses());
    let name = pod_name(number);
    let servers =
        |ip| [echo::tcp(sandbox, (ip, world::TCP), &name), nonce::udp(sandbox, SocketAddr::new(ip, UDP), &name)];
    pod(number).addresses().into_iter().flat_map(servers).collect()
}

fn start_agent(sandbox: &Sandbox) -> RunningAgent {
    let mut agent = Agent::new(sandbox).manifests(sandbox.manifest_dir()).start();
    agent.wait_ready(PATIENCE);
    agent
}

/// State shared by all threads.
struct Storm {
    history: History,
    is_over: AtomicBool,
    counts: [AtomicU64; 6],
}

/// Names of the counts, in the order of [`Storm::counts`].
const COUNTED: [&str; 6] =
    ["TCP", "connected UDP", "closed because the pod left", "unconnected UDP", "kept", "moved because the pod left"];
const TCP: usize = 0;
const CONNECTED: usize = 1;
const CLOSED: usize = 2;
const UNCONNECTED: usize = 3;
const KEPT: usize = 4;
const MOVED: usize = 5;

impl Storm {
    fn count(&self, what: usize) -> u64 {
        self.counts[what].fetch_add(1, Ordering::Relaxed)
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}

#[test]
fn no_flow_fails_or_goes_astray_while_pods_come_and_go() {
    let first = generation(0);
    let pods: Vec<u8> = SERVICES.into_iter().flat_map(pods_of).chain([LONER]).collect();
    let sandbox = Sandbox::for_test();
    let _servers: Vec<_> = pods.into_iter().flat_map(|pod| serve(&sandbox, pod)).collect();
    write(&sandbox, &first);
    let mut agent = start_agent(&sandbox);
    let history = History { generations: RwLock::new(vec![first]), confirmed: AtomicUsize::new(0) };
    let storm = Storm { history, is_over: AtomicBool::new(false), counts: Default::default() };
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (storm, netns) = (&storm, sandbox.netns().clone());
            scope.spawn(move || rage(storm, &netns, number));
        }
        let _end = Done(&storm.is_over);
        for number in 1..=GENERATIONS {
            if storm.is_over() {
                break;
            }
            next_generation(&sandbox, &storm.history, number);
            if AGENT_DIES_AFTER.contains(&number) {
                agent.kill();
                agent = start_agent(&sandbox);
            }
        }
    });
    let counts = storm.counts.map(AtomicU64::into_inner);
    let report: Vec<_> = COUNTED.iter().zip(counts).map(|(what, count)| format!("{what} {count}")).collect();
    // Written directly to stderr, as the test harness hides the output of a test that passes.
    io::stderr().write_all(format!("churn: {}\n", report.join(", ")).as_bytes()).unwrap();
    assert!([TCP, CONNECTED, UNCONNECTED, KEPT, MOVED].iter().all(|&what| counts[what] > 100), "{report:?}");
}

fn next_generation(sandbox: &Sandbox, history: &History, number: u64) {
    let next = generation(number);
    let index = {
        let mut generations = history.generations.write().unwrap();
        generations.push(next.clone());
        generations.len() - 1
    };
    write(sandbox, &next);
    eventually(PATIENCE, "the table follows", || {
        let rows = rows(sandbox, "services");
        if is_in_force(&rows, &next) { Ok(()) } else { Err(format!("{rows:?} instead of {next:?}")) }
    });
    history.confirmed.store(index, Ordering::SeqCst);
}

/// Runs one thread: always the same kind of traffic, to changing Services in changing forms.
fn rage(storm: &Storm, netns: &Netns, thread: usize) {
    netns.enter().unwrap();
    let _end = Done(&storm.is_over);
    for turn in 0.. {
        if storm.is_over() {
            break;
        }
        let service = SERVICES[(thread + turn) % SERVICES.len()];
        let form = (thread / 4 + turn) % 3;
        let name = format!("{thread}-{turn}");
        match thread % 4 {
            0 => short_connection(storm, service, form, &name),
            1 => connected_datagram(storm, service, form, &name),
            // The sockets are one of AF_INET, and one of AF_INET6 that sends to both families.
            2 => unconnected_socket(storm, &[0], 1, &name),
            // Every other time there are more flows than fit into a socket's own storage.
            _ => unconnected_socket(storm, &[1, 2], turn % 2 + 1, &name),
        }
    }
}

fn short_connection(storm: &Storm, service: u8, form: usize, name: &str) {
    let vip = cluster_ip(service).forms(PORT)[form];
    let since = storm.history.confirmed();
    let (greeting, stream) = echo::connect_tcp(vip).unwrap_or_else(|error| panic!("TCP {vip}: {error}"));
    check_new(storm, service, pod_number(&greeting.name), since, vip);
    assert_eq!(stream.peer_addr().unwrap(), vip);
    echo::ping_tcp(&stream, name).unwrap_or_else(|error| panic!("TCP {vip}: {error}"));
    storm.count(TCP);
}

fn connected_datagram(storm: &Storm, service: u8, form: usize, name: &str) {
    let vip = cluster_ip(service).forms(PORT)[form];
    let since = storm.history.confirmed();
    let socket = socket_for(vip);
    let talk = || -> io::Result<_> {
        socket.connect(vip)?;
        let peer = socket.peer_addr()?;
        socket.send(name.as_bytes())?;
        Ok((peer, nonce::answer(&socket)?))
    };
    match talk() {
        Ok((peer, (pod, question, from))) => {
            assert_eq!((peer, question.as_str(), from), (vip, name, vip));
            check_new(storm, service, pod_number(&pod), since, vip);
            storm.count(CONNECTED);
        }
        // The agent closes the sockets of pods that have left.
        Err(error) if is_closed(&error) && storm.history.has_lost_any(service, since) => drop(storm.count(CLOSED)),
        Err(error) => panic!("connected UDP {vip}: {error}"),
    }
}

/// Whether the error is that of a connected UDP socket closed from outside: ECONNABORTED once, and then not connected.
fn is_closed(error: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::CONNABORTED, Errno::NOTCONN, Errno::DESTADDRREQ]
        .iter()
        .any(|closed| error.raw_os_error() == Some(closed.raw_os_error()))
}

fn check_new(storm: &Storm, service: u8, pod: u8, since: usize, vip: SocketAddr) {
    let states = storm.history.states(service, pod, since);
    assert!(
        states.contains(&Some(State::Ready)),
        "{vip}: pod {pod} was not ready since generation {since}: {states:?}"
    );
}

fn socket_for(vip: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(if vip.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// One flow of an unconnected socket: its last backend, and the kernel's earliest generation at that question.
#[derive(Clone, Copy)]
struct Flow {
    pod: u8,
    since: usize,
}

/// One socket and one Service in one form of `forms_used` out of each `stride`. In each round it asks them all and a
/// pod in no Service, and then receives the answers in any order.
fn unconnected_socket(storm: &Storm, forms_used: &[usize], stride: usize, name: &str) {
    let targets: Vec<_> = SERVICES
        .into_iter()
        .flat_map(|service| forms_used.iter().map(move |&form| (service, cluster_ip(service).forms(PORT)[form])))
        .step_by(stride)
        .collect();
    let loner = SocketAddr::new(pod(LONER).addresses()[forms_used[0]], UDP);
    let socket = socket_for(loner);
    let mut flows = BTreeMap::new();
    for round in 0..ROUNDS_OF_SOCKET {
        if storm.is_over() {
            break;
        }
        let since = storm.history.confirmed();
        let question = |target: usize| format!("{name}-{round}-{target}");
        for (target, address) in targets.iter().map(|(_, vip)| *vip).chain([loner]).enumerate() {
            nonce::ask(&socket, &question(target), address)
                .unwrap_or_else(|error| panic!("unconnected UDP {address}: {error}"));
        }
        let mut missing: BTreeSet<_> = (0..=targets.len()).collect();
        while !missing.is_empty() {
            let (pod, repeated, from) =
                nonce::answer(&socket).unwrap_or_else(|error| panic!("no answer for {name}: {error}"));
            let target = missing.iter().copied().find(|target| question(*target) == repeated);
            let target = target.unwrap_or_else(|| panic!("{name} got {repeated:?}, which it never asked"));
            missing.remove(&target);
            let pod = pod_number(&pod);
            let Some(&(service, vip)) = targets.get(target) else {
                assert_eq!((pod, from), (LONER, loner));
                continue;
            };
            assert_eq!(from, vip, "answered by pod {pod}");
            check_flow(storm, service, vip, flows.insert(target, Flow { pod, since }), Flow { pod, since });
            storm.count(UNCONNECTED);
        }
    }
}

/// Checks that a flow stays with its pod for as long as that serves, and goes to a ready one after that.
fn check_flow(storm: &Storm, service: u8, vip: SocketAddr, last: Option<Flow>, now: Flow) {
    let Some(last) = last else { return check_new(storm, service, now.pod, now.since, vip) };
    if now.pod == last.pod {
        let states = storm.history.states(service, now.pod, now.since);
        assert!(states.iter().any(Option::is_some), "{vip}: pod {} has left", now.pod);
        storm.count(KEPT);
    } else {
        check_new(storm, service, now.pod, now.since, vip);
        let states = storm.history.states(service, last.pod, last.since);
        assert!(states.contains(&None), "{vip}: moved from pod {} to {}, for nothing", last.pod, now.pod);
        storm.count(MOVED);
    }
}
