//! The places of TCP sockets: which sockets have one, that no socket keeps one for ever, and that their number follows
//! that of the connections. Sockets that the kernel opens for itself, here those behind MPTCP connections, end without
//! the hook that frees a place.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed call is a failed test")]

use std::{
    collections::BTreeSet,
    fs,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use aya::maps::{Array, Map, MapData};
use cproxy_datapath::bpf::{PinDir, SocketStates, TCP_PLACES_MAX};
use cproxy_ebpf::{TCP_PLACES, TCP_WITHOUT_PLACE, TcpPlaceId, tcp_level_places};
use cproxy_tests::{
    Done,
    manifest::{self, Service, Slice},
    process::{Agent, RunningAgent, cproxy, eventually},
    sandbox::{Netns, Placement, Sandbox},
    seccomp::forbid_netlink,
    world::{Form, Host, PORT, SYNC, TCP, WEB, World, cluster_ip, counter, counters, pod, rows, start_agent, web_with},
};
use rustix::{
    io::Errno,
    net::{AddressFamily, SocketType, sockopt},
    process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit},
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

/// The sockets that have places now, by the levels of these, and whether a socket was ever without one.
fn owners_by_level(sandbox: &Sandbox) -> (Vec<(u32, u64)>, bool) {
    let pins = PinDir::new(&sandbox.pin_dir());
    let owners = SocketStates::open(&pins).unwrap().tcp_owners().unwrap();
    let owners = owners.into_iter().map(|place| (TcpPlaceId(place.place).level(), place.owner)).collect();
    let first = MapData::from_pin(pins.object("TCP_OWNERS")).unwrap();
    let first = Array::<_, u64>::try_from(Map::Array(first)).unwrap();
    (owners, first.get(&TCP_WITHOUT_PLACE, 0).unwrap() != 0)
}

/// Their cookies.
fn tcp_owners(sandbox: &Sandbox) -> (Vec<u64>, bool) {
    let (owners, without_place) = owners_by_level(sandbox);
    (owners.into_iter().map(|(_, owner)| owner).collect(), without_place)
}

/// Does work while an agent does nothing, not even for sockets that find no place.
fn while_stopped<R>(agent: &RunningAgent, work: impl FnOnce() -> R) -> R {
    let pid = Pid::from_raw(agent.pid() as i32).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let done = work();
    kill_process(pid, Signal::CONT).unwrap();
    done
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

    let crowded = while_stopped(&places.world.agent, || {
        places.take_all_places();
        let crowded = places.connect();
        assert!(!has_place(sandbox, &crowded.0) && shows_web(&crowded.0));
        crowded
    });
    // Nothing else wakes the agent.
    eventually(SYNC, "places of sockets that have gone are freed", || {
        let (owners, without_place) = tcp_owners(sandbox);
        assert!(without_place);
        if owners.len() == before.len() { Ok(()) } else { Err(owners.len()) }
    });
    places.wait_for_places(before.len() as u64);
    assert_eq!(counter(sandbox, "tcp_places_room"), u64::from(TCP_PLACES), "those that have gone need no more");

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

    while_stopped(&places.world.agent, || places.take_all_places());
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
    while_stopped(&places.world.agent, || places.take_all_places());
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
        assert!(
            line.starts_with("degraded ") && line.ends_with("closed MPTCP sockets keep theirs, and none are added"),
            "{line}"
        );
    };
    thread::scope(|scope| scope.spawn(on_a_poor_kernel).join()).unwrap();
    assert_eq!(tcp_owners(places.sandbox()).0.len(), TCP_PLACES as usize);
    assert!(shows_web(&places.connect().0), "it has its state in storage");
}

/// Connections of all forms to `web`, with their servers' ends.
struct Crowd {
    sandbox: Sandbox,
    agent: RunningAgent,
    listeners: [TcpListener; 2],
}

/// A connection, and what it must show.
type Member = (SocketAddr, TcpStream, TcpStream);

impl Crowd {
    fn start() -> Self {
        // An end of a connection each.
        let limit = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: limit, maximum: limit }).unwrap();
        let sandbox = Sandbox::for_test();
        sandbox.add_addresses(pod(1).addresses());
        manifest::write(&sandbox.manifest_dir(), "web.json", web_with([1]));
        let agent = start_agent(&sandbox);
        Self { sandbox, agent, listeners: pod(1).addresses().map(|address| TcpListener::bind((address, TCP)).unwrap()) }
    }

    fn connect(&self, number: usize) -> Member {
        let form = Form::ALL[number % Form::ALL.len()];
        let socket = TcpStream::connect(form.web()).unwrap();
        let listener = &self.listeners[usize::from(form == Form::V6)];
        (form.web(), socket, listener.accept().unwrap().0)
    }

    fn connect_many(&self, count: usize) -> Vec<Member> {
        (0..count).map(|number| self.connect(number)).collect()
    }

    /// The counters by which places are added, and the number of further connections.
    fn progress(&self, further: usize) -> String {
        const NAMES: [&str; 4] = ["tcp_places_room", "tcp_places", "tcp_without_place", "tcp_places_searches"];
        format!("{NAMES:?}: {:?}, {further} further connections", NAMES.map(|name| counter(&self.sandbox, name)))
    }

    fn wait_for_room(&self, expected: u32, within: Duration) {
        eventually(within, format_args!("room for {expected}"), || {
            thread::sleep(Duration::from_millis(200));
            let room = counter(&self.sandbox, "tcp_places_room");
            if room == u64::from(expected) { Ok(()) } else { Err(room) }
        });
    }
}

fn shows_vip((vip, socket, _): &Member) -> bool {
    socket.peer_addr().unwrap() == *vip
}

/// Asks the sockets for their peers all the time, while `work` runs.
fn while_asking<R>(members: &[Member], work: impl FnOnce() -> R) -> R {
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut rounds = 0;
            while !ends.load(Ordering::Relaxed) {
                let other = members.iter().find(|member| !shows_vip(member));
                assert!(other.is_none(), "{:?} in round {rounds}", other.unwrap().1);
                rounds += 1;
                thread::sleep(Duration::from_millis(1));
            }
            rounds
        });
        let done = {
            let _ends = Done(&ends);
            work()
        };
        assert!(asking.join().unwrap() > 1);
        done
    })
}

#[test]
fn more_connections_than_places_are_all_remembered_until_they_are_closed() {
    const MANY: usize = TCP_PLACES as usize * 5 / 4;
    let crowd = Crowd::start();
    let sandbox = &crowd.sandbox;
    let few = crowd.connect_many(40);
    assert!(few.iter().all(shows_vip));
    let (owners, without_place) = tcp_owners(sandbox);
    let cookies: BTreeSet<_> = few.iter().map(|(_, socket, _)| sockopt::socket_cookie(socket).unwrap()).collect();
    assert_eq!((owners.into_iter().collect(), without_place), (cookies, false));
    assert_eq!(
        ["tcp_places", "tcp_places_room", "tcp_places_max"].map(|name| counter(sandbox, name)),
        [few.len() as u64, TCP_PLACES.into(), TCP_PLACES_MAX.into()]
    );

    let many = while_stopped(&crowd.agent, || crowd.connect_many(MANY));
    assert!(few.iter().chain(&many).all(shows_vip));
    let (owners, without_place) = owners_by_level(sandbox);
    // The servers' queries for their peers' addresses take every other cookie.
    let taken = owners.iter().filter(|(level, _)| *level == 0).count();
    assert!(without_place && (TCP_PLACES as usize / 2..=TCP_PLACES as usize).contains(&taken), "{taken} places");
    let listed = rows(sandbox, "sockets");
    assert_eq!(listed.len(), few.len() + MANY);

    // Sockets without a place do not free the place of another.
    drop(many);
    assert!(few.iter().all(shows_vip));
    assert_eq!(tcp_owners(sandbox).0.len(), few.len());
    // A copy of a descriptor is the same socket.
    let copies: Vec<_> = few.iter().map(|(vip, socket, _)| (*vip, socket.try_clone().unwrap(), ())).collect();
    drop(few);
    assert!(copies.iter().all(|(vip, socket, ())| socket.peer_addr().unwrap() == *vip));
    drop(copies);
    assert!(tcp_owners(sandbox).0.is_empty());
}

/// Connects a socket anew that has a connection: the kernel takes it apart first (AF_UNSPEC, connect(2)).
fn connect_anew((vip, socket, server): &mut Member, crowd: &Crowd) {
    rustix::net::connect_unspec(&*socket).unwrap();
    rustix::net::connect(&*socket, &*vip).unwrap();
    *server = crowd.listeners[usize::from(vip.is_ipv6() && *vip == Form::V6.web())].accept().unwrap().0;
}

#[test]
fn places_follow_the_connections_up_and_down() {
    const FEW: usize = 1_500;
    const MANY: usize = 6_500;
    const LEFT: usize = 200;
    let crowd = Crowd::start();
    let sandbox = &crowd.sandbox;
    let start = Instant::now();
    let mut all = crowd.connect_many(FEW);
    // More come while the agent adds places.
    let more = while_asking(&all, || {
        let mut more = Vec::new();
        // A search that has seen the first of them keeps the next one away for ten seconds. Few of those that come
        // meanwhile stay: each takes two descriptors.
        eventually(Duration::from_secs(30), "places are added", || {
            more.extend(crowd.connect_many(1));
            drop(crowd.connect_many(20));
            let room = counter(sandbox, "tcp_places_room");
            if room > TCP_PLACES.into() { Ok(()) } else { Err(crowd.progress(more.len())) }
        });
        more
    });
    all.extend(more);
    println!("{} connections and more places after {:?}", all.len(), start.elapsed());
    all.extend(crowd.connect_many(MANY));
    println!("{} connections after {:?}", all.len(), start.elapsed());
    // Some find no place in two levels, so that there is a third one: those whose cookies come round to the places of
    // others. Most of them need not stay.
    let extra = while_asking(&all, || {
        let mut extra = Vec::new();
        eventually(Duration::from_secs(180), "all levels", || {
            extra.push(crowd.connect(extra.len()));
            drop(crowd.connect_many(100));
            let room = counter(sandbox, "tcp_places_room");
            if room == u64::from(TCP_PLACES_MAX) { Ok(()) } else { Err(crowd.progress(extra.len())) }
        });
        extra
    });
    all.extend(extra);
    println!("all levels after {:?}", start.elapsed());
    assert!(all.iter().all(shows_vip));
    // From now on, sockets have places.
    let without_place = counter(sandbox, "tcp_without_place");
    let late = crowd.connect_many(300);
    assert_eq!(counter(sandbox, "tcp_without_place"), without_place);
    assert!(late.iter().all(|(_, socket, _)| has_place(sandbox, socket)));
    assert_eq!(rows(sandbox, "sockets").len(), all.len() + late.len());

    // Connections of each level are left, which have to move.
    let (owners, _) = owners_by_level(sandbox);
    let levels = [0, 1, 2].map(|level| owners.iter().filter(|(of, _)| *of == level).count());
    println!("connections by level: {levels:?}");
    let is_higher = |(_, socket, _): &Member| {
        let cookie = sockopt::socket_cookie(socket).unwrap();
        owners.iter().any(|(level, owner)| *level > 0 && *owner == cookie)
    };
    all.extend(late);
    let (mut left, others): (Vec<_>, Vec<_>) = all.into_iter().partition(is_higher);
    left.truncate(LEFT);
    drop(others);
    assert_eq!(left.len(), LEFT);
    let mut restless = left.split_off(LEFT / 2);
    while_asking(&left, || {
        let deadline = Instant::now() + Duration::from_secs(180);
        for round in 0.. {
            // Moves of these are cancelled at times.
            restless.iter_mut().for_each(|member| connect_anew(member, &crowd));
            assert!(restless.iter().all(shows_vip), "round {round}");
            thread::sleep(Duration::from_millis(300));
            let room = counter(sandbox, "tcp_places_room");
            if room == u64::from(TCP_PLACES) {
                break;
            }
            assert!(Instant::now() < deadline, "{room} places are left");
        }
    });
    println!("the first level is left after {:?}", start.elapsed());
    assert!(left.iter().chain(&restless).all(shows_vip));
    let cookies = left.iter().chain(&restless).map(|(_, socket, _)| (0, sockopt::socket_cookie(socket).unwrap()));
    assert_eq!(owners_by_level(sandbox).0.into_iter().collect::<BTreeSet<_>>(), cookies.collect());
    drop((left, restless));
    assert!(tcp_owners(sandbox).0.is_empty());
    crowd.wait_for_room(TCP_PLACES, SYNC);
    assert_eq!(tcp_level_places(0), TCP_PLACES);
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
    assert_eq!(socket.peer_addr().unwrap(), Form::V4.web());
    // An agent of another test that searches may hold sockets of the last agent for a moment.
    eventually(SYNC, "only this socket has a place", || {
        let owners = tcp_owners(&live.sandbox).0;
        if owners == [sockopt::socket_cookie(&socket).unwrap()] { Ok(()) } else { Err(format!("{owners:?}")) }
    });
}
