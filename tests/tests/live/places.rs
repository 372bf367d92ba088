//! The places of TCP sockets: which sockets have one, and that no socket keeps one for ever. Sockets that the kernel
//! opens for itself, here those behind MPTCP connections, end without the hook that frees a place.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed call is a failed test")]

use std::{
    collections::BTreeSet,
    fs,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use aya::maps::{Array, Map, MapData};
use cproxy_datapath::bpf::PinDir;
use cproxy_ebpf::{TCP_PLACE_FREE, TCP_PLACES, TCP_WITHOUT_PLACE};
use cproxy_tests::{
    manifest::{self, Service, Slice},
    process::{Agent, cproxy, eventually},
    sandbox::{Netns, Placement, Sandbox},
    seccomp::forbid_netlink,
    world::{Form, Host, PORT, SYNC, TCP, WEB, World, cluster_ip, counter, counters, pod, rows, start_agent, web_with},
};
use rustix::{
    io::Errno,
    net::{AddressFamily, SocketType, sockopt},
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::UnshareFlags,
};
use serde_json::Value;

/// ClusterIP of a Service whose pod refuses connections.
const REFUSING: Host = cluster_ip(11);
/// That pod.
const REFUSING_POD: u8 = 9;
/// Connects between two looks. The cookies of one CPU's sockets take all places, unless the thread changes its CPU.
const CONNECTS: usize = TCP_PLACES as usize;
/// Most looks until all places are taken.
const LOOKS_MAX: usize = 64;

const MPTCP: rustix::net::Protocol = rustix::net::Protocol::from_raw(std::num::NonZeroU32::new(262).expect("not zero"));

/// A pod behind `web` that accepts connections, one behind the other Service that refuses them, and an agent.
struct Fixture {
    world: World,
    listener: TcpListener,
}

impl Fixture {
    fn start() -> Self {
        let builder = World::builder().prepare(|sandbox| {
            sandbox.add_addresses([pod(1), pod(REFUSING_POD)].map(|pod| pod.v4));
            None
        });
        let world = builder.objects(objects()).start();
        Self { world, listener: TcpListener::bind((pod(1).v4, TCP)).unwrap() }
    }

    fn sandbox(&self) -> &Sandbox {
        &self.world.sandbox
    }

    /// An ordinary connection to `web`.
    fn connect(&self) -> (TcpStream, TcpStream) {
        (TcpStream::connect(Form::V4.web()).unwrap(), self.listener.accept().unwrap().0)
    }

    /// Takes all places by MPTCP connections that are refused.
    fn take_all_places(&self) {
        let are_taken = |_| {
            for _ in 0..CONNECTS {
                let socket = stream(MPTCP);
                assert_eq!(rustix::net::connect(&socket, &Form::V4.address(REFUSING, PORT)), Err(Errno::CONNREFUSED));
            }
            tcp_owners(self.sandbox()).0.len() == TCP_PLACES as usize
        };
        assert!((0..LOOKS_MAX).any(are_taken), "places are left");
    }

    /// Waits until the agent's own sockets, which test the programs, have given back their places, and so many are
    /// left.
    fn wait_for_owners(&self, expected: usize) -> Vec<u64> {
        eventually(SYNC, "the agent has no socket", || {
            let owners = tcp_owners(self.sandbox()).0;
            if owners.len() == expected { Ok(owners) } else { Err(owners.len()) }
        })
    }

    /// Waits until the agent, which each `get counters` wakes, has freed places and this many are left.
    fn wait_for_places(&self, expected: u64) {
        eventually(SYNC, "places of sockets that have gone are freed", || {
            let counters = counters(self.sandbox());
            if counters["tcp_places_freed"] != 0 && counters["tcp_places"] == expected { Ok(()) } else { Err(counters) }
        });
    }
}

/// `web` with pod 1, and the Service whose pod refuses.
fn objects() -> Vec<Value> {
    let refusing = Service::new("refusing").cluster_ips([REFUSING.v4]).tcp("http", PORT, TCP);
    let slice = Slice::v4("refusing").name("refusing-1").tcp("http", TCP).ready([pod(REFUSING_POD).v4]);
    web_with([1]).into_iter().chain([refusing.into(), slice.into()]).collect()
}

/// An IPv4 socket. Without MPTCP in the kernel (CONFIG_MPTCP) the tests fail here.
fn stream(protocol: rustix::net::Protocol) -> OwnedFd {
    rustix::net::socket(AddressFamily::INET, SocketType::STREAM, Some(protocol)).unwrap()
}

/// Cookies of the sockets that have places now, and whether a socket was ever without one.
fn tcp_owners(sandbox: &Sandbox) -> (Vec<u64>, bool) {
    let owners = MapData::from_pin(PinDir::new(&sandbox.pin_dir()).object("TCP_OWNERS")).unwrap();
    let owners = Array::<_, u64>::try_from(Map::Array(owners)).unwrap();
    let mut all: Vec<_> = owners.iter().map(Result::unwrap).collect();
    let without_place = all.remove(TCP_WITHOUT_PLACE as usize);
    all.retain(|&owner| owner != TCP_PLACE_FREE);
    (all, without_place != 0)
}

fn has_place(sandbox: &Sandbox, socket: &impl AsFd) -> bool {
    tcp_owners(sandbox).0.contains(&sockopt::socket_cookie(socket).unwrap())
}

fn shows_web(socket: &TcpStream) -> bool {
    socket.peer_addr().unwrap() == Form::V4.web()
}

#[test]
fn refused_mptcp_connects_cost_later_sockets_nothing() {
    let places = Fixture::start();
    let sandbox = places.sandbox();
    let ordinary = places.connect();
    let multipath = stream(MPTCP);
    rustix::net::connect(&multipath, &Form::V4.web()).unwrap();
    let _accepted = places.listener.accept().unwrap();
    // The ordinary connection and the first subflow.
    let before = places.wait_for_owners(2);
    assert_eq!(counter(sandbox, "tcp_places_searches"), 0, "places are not scarce");

    places.take_all_places();
    let crowded = places.connect();
    assert!(!has_place(sandbox, &crowded.0) && shows_web(&crowded.0));
    assert!(counter(sandbox, "tcp_without_place") > 0);
    places.wait_for_places(before.len() as u64);

    assert_eq!(BTreeSet::from_iter(places.wait_for_owners(before.len())), BTreeSet::from_iter(before));
    assert!(shows_web(&ordinary.0) && shows_web(&crowded.0));
    // An MPTCP connection shows the pod itself, but the list knows its Service.
    let listed = rows(sandbox, "sockets");
    let is_web = |row: &&Value| row["protocol"] == "TCP" && WEB.is_of(row) && row["port"] == PORT;
    assert_eq!(listed.iter().filter(is_web).count(), 3, "{listed:#?}");
    let later: Vec<_> = (0..100).map(|_| places.connect()).collect();
    assert!(later.iter().all(|(socket, _)| has_place(sandbox, socket) && shows_web(socket)));
    assert_eq!((counter(sandbox, "tcp_places_searches"), counter(sandbox, "tcp_places_unseen")), (1, 0));
}

/// A network namespace that is mounted.
struct Mounted(PathBuf);

impl Mounted {
    fn of(netns: &Netns, at: PathBuf) -> Self {
        rustix::mount::mount_bind(netns.path(), &at).unwrap();
        Self(at)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

/// No process is in them.
#[test]
fn connections_in_every_network_namespace_keep_their_places() {
    let places = Fixture::start();
    let sandbox = places.sandbox();
    let connect_there = || {
        // SAFETY: CLONE_NEWNET changes which network the thread sees; it unshares neither memory nor descriptors.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        let ip = "ip link set lo up && ip route add local 10.244.0.0/24 dev lo";
        assert!(Command::new("sh").args(["-c", ip]).status().unwrap().success());
        let listener = TcpListener::bind((pod(1).v4, TCP)).unwrap();
        (TcpStream::connect(Form::V4.web()).unwrap(), listener, Netns::current())
    };
    let connect_in_another = || thread::scope(|scope| scope.spawn(connect_there).join()).unwrap();
    let (hidden, _hidden_listener, netns) = connect_in_another();
    // Only its sockets keep it alive.
    drop(netns);
    let (mounted, _mounted_listener, netns) = connect_in_another();
    let mount = sandbox.dir().join("a netns");
    fs::write(&mount, "").unwrap();
    let mount = Mounted::of(&netns, mount);
    drop(netns);

    places.take_all_places();
    places.wait_for_places(2);
    drop(mount);
    for socket in [&hidden, &mounted] {
        assert!(has_place(sandbox, socket) && shows_web(socket));
    }
}

/// Its place goes to others while it is closed: it has no peer to show.
#[test]
fn a_refused_socket_that_connects_again_gets_another_place() {
    let places = Fixture::start();
    let sandbox = places.sandbox();
    let refused = stream(rustix::net::ipproto::TCP);
    assert_eq!(rustix::net::connect(&refused, &Form::V4.address(REFUSING, PORT)), Err(Errno::CONNREFUSED));
    assert!(has_place(sandbox, &refused));
    places.take_all_places();
    places.wait_for_places(0);
    rustix::net::connect(&refused, &Form::V4.web()).unwrap();
    assert!(has_place(sandbox, &refused) && shows_web(&TcpStream::from(refused)));
}

#[test]
fn a_kernel_that_cannot_list_sockets_frees_no_place_and_says_so() {
    let mut places = Fixture::start();
    places.world.agent.kill();
    places.take_all_places();
    let on_a_poor_kernel = || {
        forbid_netlink();
        let mut agent = start_agent(places.sandbox());
        agent.wait_log("places of TCP sockets that have gone stay taken: cannot list sockets", SYNC);
        let checked = cproxy(places.sandbox(), &["check"]).success();
        let line = checked.stdout.lines().find(|line| line.contains(" tcp_places ")).unwrap();
        assert!(line.starts_with("degraded ") && line.ends_with("closed MPTCP sockets keep theirs"), "{line}");
    };
    thread::scope(|scope| scope.spawn(on_a_poor_kernel).join()).unwrap();
    assert_eq!(tcp_owners(places.sandbox()).0.len(), TCP_PLACES as usize);
    assert!(shows_web(&places.connect().0), "it has its state in storage");
}

#[test]
fn more_connections_than_places_are_all_remembered_until_they_are_closed() {
    const MANY: usize = TCP_PLACES as usize * 5 / 4;
    setrlimit(Resource::Nofile, Rlimit { current: Some(3 * MANY as u64), ..getrlimit(Resource::Nofile) }).unwrap();
    let sandbox = Sandbox::for_test();
    sandbox.add_addresses(pod(1).addresses());
    manifest::write(&sandbox.manifest_dir(), "web.json", web_with([1]));
    let _agent = start_agent(&sandbox);
    let forms = Form::ALL.map(|form| (form, form.web()));
    let listeners = pod(1).addresses().map(|address| TcpListener::bind((address, TCP)).unwrap());
    let connect = |number: usize| {
        let (form, vip) = forms[number % forms.len()];
        let socket = TcpStream::connect(vip).unwrap();
        let listener = &listeners[usize::from(form == Form::V6)];
        (vip, socket, listener.accept().unwrap())
    };
    let shows_vip = |(vip, socket, _): &(SocketAddr, TcpStream, _)| socket.peer_addr().unwrap() == *vip;

    let few: Vec<_> = (0..40).map(connect).collect();
    assert!(few.iter().all(shows_vip));
    let (owners, without_place) = tcp_owners(&sandbox);
    let cookies: BTreeSet<_> = few.iter().map(|(_, socket, _)| sockopt::socket_cookie(socket).unwrap()).collect();
    assert_eq!((owners.into_iter().collect(), without_place), (cookies, false));
    assert_eq!(
        (counter(&sandbox, "tcp_places"), counter(&sandbox, "tcp_places_max")),
        (few.len() as u64, TCP_PLACES.into())
    );

    let many: Vec<_> = (0..MANY).map(connect).collect();
    assert!(few.iter().chain(&many).all(shows_vip));
    let (owners, without_place) = tcp_owners(&sandbox);
    // The servers' queries for their peers' addresses take every other cookie.
    let taken = owners.len();
    assert!(without_place && (TCP_PLACES as usize / 2..=TCP_PLACES as usize).contains(&taken), "{taken} places");
    let listed = rows(&sandbox, "sockets");
    assert_eq!(listed.len(), few.len() + MANY);

    // Sockets without a place do not free the place of another.
    drop(many);
    assert!(few.iter().all(shows_vip));
    assert_eq!(tcp_owners(&sandbox).0.len(), few.len());
    // A copy of a descriptor is the same socket.
    let copies: Vec<_> = few.iter().map(|(vip, socket, _)| (*vip, socket.try_clone().unwrap(), ())).collect();
    drop(few);
    assert!(copies.iter().all(|(vip, socket, ())| socket.peer_addr().unwrap() == *vip));
    drop(copies);
    assert!(tcp_owners(&sandbox).0.is_empty());
}

/// The programs do not see the release of sockets in a cgroup that they have left.
#[test]
fn sockets_of_another_cgroup_keep_no_place() {
    let mut live = World::start(1..=3);
    let sockets: Vec<_> = Form::ALL.iter().map(|form| (form.web(), TcpStream::connect(form.web()).unwrap())).collect();
    assert_eq!(tcp_owners(&live.sandbox).0.len(), sockets.len());
    let start_on = |cgroup: &Path| {
        let agent = Agent::new(&live.sandbox).cgroup(cgroup).manifests(live.sandbox.manifest_dir());
        agent.placement(Placement::Unhooked).start()
    };
    live.agent.kill();
    let mut agent = start_on(live.sandbox.cgroup_beside());
    assert_eq!(tcp_owners(&live.sandbox).0, [] as [u64; 0]);
    agent.kill();
    // The return to the first cgroup starts without names; a restart on the same cgroup keeps them.
    start_on(live.sandbox.cgroup()).kill();
    assert!(sockets.iter().all(|(vip, socket)| socket.peer_addr().unwrap() != *vip), "their names are lost");
    let socket = TcpStream::connect(Form::V4.web()).unwrap();
    start_on(live.sandbox.cgroup()).kill();
    assert_eq!((tcp_owners(&live.sandbox).0.len(), socket.peer_addr().unwrap()), (1, Form::V4.web()));
}
