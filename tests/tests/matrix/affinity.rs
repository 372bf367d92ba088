//! Session affinity: a client, which is a network namespace, keeps its backend of a Service port.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{IpAddr, SocketAddr, TcpListener},
    process::Command,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use cproxy_tests::{
    manifest::{Endpoint, Service, Slice},
    sandbox::Netns,
};
use rustix::thread::UnshareFlags;
use serde_json::Value;

use crate::{
    choice::backend,
    servers::Servers,
    world::{Case, Form, MatrixSandbox, POD_PORT, PORT, pod, ready, service, slices, vip},
};

const PODS: [u8; 3] = [1, 2, 3];

/// Number of ports, each with its own affinity, to make chance visible at once: two clients have the same of three pods
/// at every port once in 3^32 times.
const PORTS: u16 = 32;
const FIRST_PORT: u16 = 1000;
const HOURS: u32 = 10_800;

/// Ports of a client with its backend at each.
type Backends = BTreeMap<u16, IpAddr>;

fn ports(count: u16) -> impl Iterator<Item = u16> + Clone {
    FIRST_PORT..FIRST_PORT + count
}

/// A Service of UDP ports with VIP 1.
fn many_ports(count: u16, pods: &[u8]) -> (Service, Value) {
    let mut service = Service::new("many").cluster_ips([vip(1).v4]);
    let mut slice = Slice::v4("many").ready(pods.iter().map(|&number| pod(number).v4));
    for port in ports(count) {
        let name = format!("p{port}");
        service = service.udp(&name, port, POD_PORT);
        slice = slice.udp(&name, POD_PORT);
    }
    (service, slice.into())
}

fn services_with_affinity(count: u16, pods: &[u8], seconds: u32) -> [Value; 2] {
    let (service, slice) = many_ports(count, pods);
    [service.client_ip_affinity(seconds).into(), slice]
}

/// One new connection to each port.
fn connect_each() -> Backends {
    ports(PORTS).map(|port| (port, backend((vip(1).v4, port).into()))).collect()
}

#[test]
fn a_client_keeps_its_backend() {
    let objects = |name, number| {
        let service = service(name, number).client_ip_affinity(HOURS);
        let slices = slices(name, &PODS, |_, address| Endpoint::ready(address));
        [service.into()].into_iter().chain(slices)
    };
    let _world = MatrixSandbox::start(PODS, objects("web", 1).chain(objects("unconnected", 2)));
    let listeners = Listeners::new();
    for forms in [&[Form::V4, Form::Mapped][..], &[Form::V6]] {
        let _case = Case::new(format!("{forms:?}"));
        let addresses = || forms.iter().cycle().take(200).map(|form| form.address(vip(1), PORT));
        let udp: BTreeSet<_> = addresses().map(|address| backend(address).to_canonical()).collect();
        assert_eq!(udp.len(), 1, "UDP: {udp:?}");
        let tcp: BTreeSet<_> = addresses().map(|address| listeners.backend(address)).collect();
        assert_eq!(tcp.len(), 1, "TCP: {tcp:?}");
    }
    unconnected_sockets_share_a_backend();
}

/// Sockets that never connect, and then one that does.
fn unconnected_sockets_share_a_backend() {
    let servers = Servers::of_pods(PODS);
    for form in [Form::V4, Form::V6] {
        let _case = Case::new(form);
        let to = form.address(vip(2), PORT);
        let mut servers: BTreeSet<_> = (0..50).map(|_| servers.asked_by(&form.udp(), Some(to)).0.ip()).collect();
        servers.insert(backend(to));
        assert_eq!(servers.len(), 1, "{servers:?}");
    }
}

/// Pods that take TCP connections.
struct Listeners(BTreeMap<IpAddr, TcpListener>);

impl Listeners {
    fn new() -> Self {
        let addresses = PODS.into_iter().flat_map(|number| pod(number).addresses());
        Self(addresses.map(|address| (address, TcpListener::bind((address, POD_PORT)).unwrap())).collect())
    }

    /// Address of the pod that gets a new connection.
    fn backend(&self, to: SocketAddr) -> IpAddr {
        let stream = std::net::TcpStream::connect(to).unwrap();
        let backend = stream.local_addr().unwrap().ip().to_canonical();
        self.0[&backend].accept().unwrap();
        backend
    }
}

#[test]
fn each_network_namespace_is_a_client_of_its_own() {
    let world = MatrixSandbox::start(PODS, services_with_affinity(PORTS, &PODS, HOURS));
    let here = connect_each();
    let other = other_client(&world);
    let there = other.run(connect_each);
    assert_ne!(here, there);
    for _ in 0..5 {
        assert_eq!(connect_each(), here);
        assert_eq!(other.run(connect_each), there);
    }
}

/// A network namespace with routes to the pods.
fn other_client(world: &MatrixSandbox) -> Netns {
    let batch = world.sandbox.dir().join("other-client");
    let add = |number| format!("address add {}/32 dev lo\n", pod(number).v4);
    fs::write(&batch, format!("link set lo up\n{}", PODS.map(add).concat())).unwrap();
    let make = move || {
        // SAFETY: it changes which network this thread, which ends at once, sees.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        assert!(Command::new("ip").arg("-batch").arg(batch).status().unwrap().success());
        Netns::current()
    };
    thread::spawn(make).join().unwrap()
}

/// Sixteen threads connect for the first time, at once, a hundred times.
#[test]
fn threads_that_race_for_the_first_connection_agree() {
    const THREADS: usize = 16;
    const ROUNDS: u16 = 100;
    let _world = MatrixSandbox::start(PODS, services_with_affinity(ROUNDS, &PODS, HOURS));
    let barrier = Barrier::new(THREADS);
    let race = || {
        let connect = |port| {
            barrier.wait();
            backend((vip(1).v4, port).into())
        };
        ports(ROUNDS).map(connect).collect::<Vec<_>>()
    };
    let seen: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(race)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (round, first) in seen[0].iter().enumerate() {
        let all: BTreeSet<_> = seen.iter().map(|thread| thread[round]).collect();
        assert_eq!(all, [*first].into(), "round {round}");
    }
}

/// A connection counts only if it is certain that less than a second has passed since the one before.
#[test]
fn a_client_is_forgotten_when_it_is_idle_and_not_before() {
    const TIMEOUT: Duration = Duration::from_secs(1);
    let _world = MatrixSandbox::start(PODS, services_with_affinity(PORTS, &PODS, 1));
    let mut before = (Instant::now(), connect_each());
    let (start, first) = before.clone();
    let mut in_time = true;
    while start.elapsed() < 3 * TIMEOUT {
        thread::sleep(Duration::from_millis(300));
        let begun = Instant::now();
        let now = connect_each();
        in_time &= before.0.elapsed() < TIMEOUT;
        assert!(!in_time || now == first, "after {:?} without a second's pause: {now:?}", start.elapsed());
        before = (begun, now);
    }
    thread::sleep(TIMEOUT + Duration::from_millis(200));
    assert_ne!(connect_each(), before.1, "it is forgotten");
}

#[test]
fn affinity_outlives_the_agent() {
    let mut world = MatrixSandbox::start(PODS, services_with_affinity(PORTS, &PODS, HOURS));
    let before = connect_each();
    world.kill_agent();
    assert_eq!(connect_each(), before, "while there is none");
    world.start_agent();
    assert_eq!(connect_each(), before, "under the next one");
}

#[test]
fn a_client_whose_backend_goes_gets_another_and_keeps_that() {
    let world = MatrixSandbox::start(PODS, services_with_affinity(PORTS, &PODS, HOURS));
    let before = connect_each();
    world.update(services_with_affinity(PORTS, &[2, 3], HOURS));
    let after = connect_each();
    let gone = IpAddr::from(pod(1).v4);
    assert!(before.values().any(|backend| *backend == gone), "none of {PORTS} ports had it");
    for (port, backend) in &after {
        assert_ne!(*backend, gone, "port {port}");
        assert!(before[port] == gone || before[port] == *backend, "port {port} has moved without need");
    }
    assert_eq!(connect_each(), after);
    world.update(services_with_affinity(PORTS, &PODS, HOURS));
    assert_eq!(connect_each(), after, "the old one is back");
}

#[test]
fn affinity_begins_and_ends_with_the_next_connection() {
    let world = MatrixSandbox::start(PODS, services_with_affinity(PORTS, &PODS, HOURS));
    let first = connect_each();
    assert_eq!(connect_each(), first);
    let (service, slice) = many_ports(PORTS, &PODS);
    world.update([service.into(), slice]);
    let seen: BTreeSet<_> = (0..4).map(|_| connect_each()).collect();
    assert_eq!(seen.len(), 4, "each time others");
    world.update(services_with_affinity(PORTS, &PODS, HOURS));
    assert_eq!(connect_each(), connect_each());
}

/// Services without affinity store nothing.
#[test]
fn connections_of_other_services_are_not_remembered() {
    let _world = MatrixSandbox::start(PODS, ready("web", 1, &PODS));
    let seen: BTreeSet<_> = (0..100).map(|_| backend(Form::V4.address(vip(1), PORT))).collect();
    assert_eq!(seen.len(), PODS.len());
}
