//! Closing of stale sockets, with real sockets of every form: the sockets that a pass closes, and above all those it
//! must not close.
//!
//! In the first half the tests connect to backends themselves and write the programs' state; in the second half the
//! programs do.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed call is a failed test")]

use std::{
    fs,
    io::{self, Read},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::PathBuf,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use aya::maps::{Array, ArrayOfMaps, HashMap, Map, MapData, SkStorage};
use cproxy_core::{Backend, Protocol, Retired, parse_address};
use cproxy_datapath::{
    bpf::{KernelReader, PinDir},
    sockets::{DiagError, Outcome, TerminateSockets, probe, terminate_stale},
};
use cproxy_ebpf::{FrontendKey, Set, SetWord, SocketState, Translation};
use cproxy_tests::{
    Server, echo,
    manifest::{self, Endpoint, Service, Slice},
    process::eventually,
    sandbox::{Netns, Sandbox},
    seccomp::{forbid_netlink, pause_before_sends},
    usage,
    world::{
        Form, PORT, SYNC, TCP, UDP, WEB, World, counter, has_pods, pod, pod_name, rows, slices, start_agent,
        wait_for_counter, web,
    },
};
use rustix::{
    io::Errno,
    net::{AddressFamily, SocketType, sockopt},
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::UnshareFlags,
};
use serde_json::Value;

/// A sandbox with pods 1 to 3 behind a Service, and an agent on the manifests.
struct Fixture {
    world: World,
    pins: PinDir,
    states: SkStorage<MapData, SocketState>,
}

/// Conditions of an endpoint: ready, serving, terminating.
type Conditions = (bool, bool, bool);

/// The Service with those of its pods 1 to 3 that have conditions.
fn objects(conditions: impl Fn(u8) -> Option<Conditions>) -> Vec<Value> {
    let pods: Vec<u8> = (1..=3).filter(|&number| conditions(number).is_some()).collect();
    let slices = slices(pods, |number, address| {
        let (ready, serving, terminating) = conditions(number).unwrap();
        Endpoint::with(address, ready, serving, terminating)
    });
    std::iter::once(web().into()).chain(slices).collect()
}

impl Fixture {
    fn start() -> Self {
        let addresses = |sandbox: &Sandbox| {
            sandbox.add_addresses((1..=3).flat_map(|number| pod(number).addresses()));
            None
        };
        let objects = objects(|_| Some((true, true, false)));
        let builder = World::builder().prepare(addresses).objects(objects);
        let world = builder.args(["--terminate-sockets", "none"]).start();
        let pins = PinDir::new(&world.sandbox.pin_dir());
        let states = MapData::from_pin(pins.object("SOCKETS")).unwrap();
        Self { world, pins, states: SkStorage::try_from(Map::SkStorage(states)).unwrap() }
    }

    /// Replaces the endpoints, by `(ready, serving, terminating)`, and waits until each frontend has the `eligible`
    /// ones followed by those that only serve.
    fn set(&self, eligible: &[u8], endpoints: impl Fn(u8) -> Option<Conditions>) {
        let serves = |pod: &u8| endpoints(*pod).is_some_and(|(_, serving, _)| serving);
        let pods: Vec<_> = eligible
            .iter()
            .copied()
            .chain((1..=3).filter(|number| serves(number) && !eligible.contains(number)))
            .collect();
        let wanted =
            [0, 1].map(|family: usize| pods.iter().map(|&number| pod(number).addresses()[family]).collect::<Vec<_>>());
        self.world.write(objects(endpoints));
        eventually(SYNC, "the table follows", || {
            let table = KernelReader::read_table(&self.pins).unwrap();
            let address = |backend: &Backend| IpAddr::from(backend.address);
            let members = |set: &u32| table.sets[set].members.backends.iter().map(address).collect::<Vec<_>>();
            // The other frontends are those of the agent's canary.
            let of_web = table.frontends.iter().filter(|(frontend, _)| frontend.port == PORT);
            let sets: Vec<_> = of_web.map(|(_, set)| members(set)).collect();
            if sets.len() == 4 && sets.iter().all(|set| wanted.contains(set)) {
                Ok(())
            } else {
                Err(format!("{sets:?}"))
            }
        });
    }

    /// Keeps these pods and removes all others.
    fn keep_pods(&self, pods: &[u8]) {
        self.set(pods, |pod| pods.contains(&pod).then_some((true, true, false)));
    }

    fn delete_service(&self) {
        self.world.set([], <[Value]>::is_empty);
    }

    fn pass(&self, mode: TerminateSockets) -> Outcome {
        terminate_stale(&self.pins, &any(mode)).unwrap()
    }

    /// The number of sockets that a pass closes. It must leave none.
    fn closes(&self, mode: TerminateSockets) -> u64 {
        let outcome = self.pass(mode);
        assert_eq!(outcome.left, 0, "{outcome:?}");
        outcome.closed
    }

    /// A UDP socket that is connected to a pod.
    fn udp(form: Form, pod: u8) -> UdpSocket {
        let socket = UdpSocket::bind(form.wildcard()).unwrap();
        socket.connect(form.pod(pod, UDP)).unwrap();
        socket
    }

    /// A UDP socket that is connected to a pod, with the state of a connection to the VIP.
    fn translated_udp(&mut self, form: Form, pod: u8) -> UdpSocket {
        let socket = Self::udp(form, pod);
        self.store_translation(&socket, form.web(), form.pod(pod, UDP));
        socket
    }

    fn translated_tcp(&mut self, form: Form, pod: u8) -> TcpStream {
        let socket = TcpStream::connect(form.pod(pod, TCP)).unwrap();
        self.store_translation(&socket, form.web(), form.pod(pod, TCP));
        socket
    }

    /// Writes the programs' state for a socket that connects to `vip` and gets `backend`.
    fn store_translation(&mut self, socket: &impl AsRawFd, vip: SocketAddr, backend: SocketAddr) {
        let (vip, vip_port) = words(vip);
        let (backend, backend_port) = words(backend);
        let peer = Translation { vip, backend, vip_port, backend_port, slot: 0 };
        self.states.insert(socket, SocketState { flags: 0, peer }, 0).unwrap();
    }

    fn tcp_servers(&self) -> Vec<Server> {
        self.servers(TCP, echo::tcp)
    }

    fn udp_servers(&self) -> Vec<Server> {
        self.servers(UDP, echo::udp)
    }

    fn servers(&self, port: u16, serve: fn(&Sandbox, SocketAddr, &str) -> Server) -> Vec<Server> {
        let addresses = (1..=3).flat_map(|number| [Form::V4, Form::V6].map(|form| (number, form.pod(number, port))));
        addresses.map(|(number, address)| serve(&self.world.sandbox, address, &pod_name(number))).collect()
    }
}

/// All backends of the protocols whose sockets the mode closes.
fn any(mode: TerminateSockets) -> Retired {
    let mut retired = Retired::any();
    retired.retain(|protocol| mode.closes(protocol));
    retired
}

/// An address and a port in the form of the maps.
fn words(address: SocketAddr) -> ([u32; 4], u16) {
    let octets = match address.ip() {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    };
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(octets.as_chunks().0) {
        *word = u32::from_ne_bytes(*bytes);
    }
    (words, address.port().to_be())
}

/// The socket's pending error, which this call clears.
fn error(socket: &impl AsFd) -> Option<Errno> {
    sockopt::socket_error(socket).unwrap().err()
}

#[track_caller]
fn assert_closed(socket: &impl AsFd) {
    assert_eq!(error(socket), Some(Errno::CONNABORTED));
    assert_eq!(rustix::net::getpeername(socket), Err(Errno::NOTCONN));
}

#[track_caller]
fn assert_untouched(socket: &impl AsFd) {
    assert_eq!(error(socket), None);
    rustix::net::getpeername(socket).unwrap();
}

#[test]
fn udp_sockets_of_every_form_are_closed_when_their_backend_goes() {
    let mut stale = Fixture::start();
    let gone = Form::ALL.map(|form| stale.translated_udp(form, 3));
    let serving = Form::ALL.map(|form| stale.translated_udp(form, 2));
    assert_eq!(stale.closes(TerminateSockets::All), 0, "all serve");
    stale.keep_pods(&[1, 2]);
    assert_eq!(stale.closes(TerminateSockets::None), 0);
    assert_eq!(stale.closes(TerminateSockets::Udp), 3);
    for (form, socket) in Form::ALL.into_iter().zip(&gone) {
        assert_closed(socket);
        socket.connect(form.pod(1, UDP)).unwrap();
        assert_untouched(socket);
    }
    serving.iter().for_each(|socket| assert_untouched(socket));
    assert_eq!(stale.closes(TerminateSockets::Udp), 0, "once is enough");
}

#[test]
fn a_blocked_receive_returns_when_its_socket_is_closed() {
    let mut stale = Fixture::start();
    let socket = stale.translated_udp(Form::V4, 3);
    socket.set_read_timeout(Some(SYNC)).unwrap();
    stale.keep_pods(&[1]);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| socket.recv(&mut [0; 16]));
        eventually(SYNC, "a thread waits in the call", || {
            let waits = fs::read_dir("/proc/self/task").unwrap().flatten().any(|thread| {
                let call = fs::read_to_string(thread.path().join("syscall")).unwrap_or_default();
                // The call is recvfrom(2) on this socket.
                call.starts_with(&format!("45 {:#x} ", socket.as_raw_fd()))
            });
            if waits || cfg!(not(target_arch = "x86_64")) { Ok(()) } else { Err("no thread does") }
        });
        assert_eq!(stale.closes(TerminateSockets::Udp), 1);
        assert_eq!(waiting.join().unwrap().unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    });
}

#[test]
fn sockets_that_are_not_connected_through_us_are_left_alone() {
    let mut stale = Fixture::start();
    let never_through_us = Form::ALL.map(|form| Fixture::udp(form, 3));
    let reconnected = Form::ALL.map(|form| stale.translated_udp(form, 3));
    let to_itself = Form::ALL.map(|form| {
        let socket = Fixture::udp(form, 3);
        stale.store_translation(&socket, form.pod(3, UDP), form.pod(3, UDP));
        socket
    });
    let another_port = Form::ALL.map(|form| {
        let socket = Fixture::udp(form, 3);
        stale.store_translation(&socket, form.web(), form.pod(3, UDP + 1));
        socket
    });
    let unconnected = Form::ALL.map(|form| {
        let socket = UdpSocket::bind(form.wildcard()).unwrap();
        stale.store_translation(&socket, form.web(), form.pod(3, UDP));
        socket
    });
    stale.keep_pods(&[1, 2]);
    for (form, socket) in Form::ALL.into_iter().zip(&reconnected) {
        // No Service ever had this pod address.
        socket.connect(form.pod(1, UDP + 2)).unwrap();
    }
    assert_eq!(stale.closes(TerminateSockets::All), 0);
    let connected = [never_through_us, reconnected, to_itself, another_port];
    connected.as_flattened().iter().for_each(|socket| assert_untouched(socket));
    unconnected.iter().for_each(|socket| assert_eq!(error(socket), None));
}

/// Moves one backend of each frontend from the eligible ones to those that only serve, and back.
#[test]
fn a_backend_that_still_serves_keeps_its_sockets() {
    let mut stale = Fixture::start();
    let sockets: Vec<_> = Form::ALL.into_iter().flat_map(|form| [1, 2, 3].map(|pod| (form, pod))).collect();
    let sockets: Vec<_> = sockets.into_iter().map(|(form, pod)| stale.translated_udp(form, pod)).collect();
    let map = |name: &str| MapData::from_pin(stale.pins.object(name)).unwrap();
    let of_maps = |name| Map::ArrayOfMaps(map(name));
    let frontends: ArrayOfMaps<_, HashMap<MapData, FrontendKey, u32>> = of_maps("FRONTENDS").try_into().unwrap();
    let frontends = frontends.get(&0, 0).unwrap();
    let sets: ArrayOfMaps<_, Array<MapData, Set>> = of_maps("SETS").try_into().unwrap();
    let mut sets = sets.get(&0, 0).unwrap();
    // Not the canary's: where that finds no way, the agent writes the whole table anew.
    let is_of_web = |key: &FrontendKey| key.port == PORT.to_be();
    let mut rewrite = |rewritten: fn(SetWord) -> SetWord| {
        for (_, set) in frontends.iter().map(Result::unwrap).filter(|(key, _)| is_of_web(key)) {
            let now = sets.get(&set, 0).unwrap();
            sets.set(set, Set { word: rewritten(SetWord(now.word)).0, ..now }, 0).unwrap();
        }
    };
    rewrite(|word| SetWord::new(word.first_slot(), 1, 2, false));
    assert_eq!(stale.closes(TerminateSockets::Udp), 0);
    rewrite(|word| SetWord::new(word.first_slot(), 0, 3, true));
    assert_eq!(stale.closes(TerminateSockets::Udp), 0);
    sockets.iter().for_each(|socket| assert_untouched(socket));
    rewrite(|word| SetWord::new(word.first_slot(), 1, 1, false));
    assert_eq!(stale.closes(TerminateSockets::Udp), 3, "one in each form");
}

#[test]
fn sockets_with_the_same_addresses_are_distinguished() {
    let mut stale = Fixture::start();
    let twins: Vec<_> = [false, true, true, false, true]
        .map(|is_ours| {
            let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
            sockopt::set_socket_reuseport(&socket, true).unwrap();
            rustix::net::bind(&socket, &"127.0.0.1:4660".parse::<SocketAddr>().unwrap()).unwrap();
            rustix::net::connect(&socket, &Form::V4.pod(3, UDP)).unwrap();
            if is_ours {
                stale.store_translation(&socket, Form::V4.web(), Form::V4.pod(3, UDP));
            }
            (is_ours, socket)
        })
        .into();
    stale.keep_pods(&[1]);
    let outcome = stale.pass(TerminateSockets::Udp);
    let closed: Vec<_> = twins.iter().map(|(_, socket)| error(socket).is_some()).collect();
    assert!(twins.iter().zip(&closed).all(|((is_ours, _), &closed)| *is_ours || !closed), "{closed:?}");
    let count = closed.iter().filter(|&&closed| closed).count() as u64;
    // Behind a socket that must stay open, the kernel does not find the others.
    assert_eq!((outcome.closed, outcome.left), (count, 3 - count));
}

#[test]
fn a_socket_with_many_owners_is_closed_once() {
    let mut stale = Fixture::start();
    let shared = stale.translated_udp(Form::V6, 3);
    let twin = shared.try_clone().unwrap();
    let inherited = stale.translated_udp(Form::V4, 3);
    let mut child =
        Command::new("cat").stdin(Stdio::from(OwnedFd::from(inherited))).stderr(Stdio::null()).spawn().unwrap();
    stale.keep_pods(&[1]);
    assert_eq!(stale.closes(TerminateSockets::Udp), 2);
    assert_closed(&shared);
    assert_eq!(rustix::net::getpeername(&twin), Err(Errno::NOTCONN));
    assert!(!child.wait().unwrap().success(), "its read failed");
}

/// A network namespace that only its mount keeps alive.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

/// Runs `work` in a new network namespace that has the pods' addresses too.
fn in_another_netns<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    let entered = || {
        // SAFETY: CLONE_NEWNET changes which network the thread sees; it neither unshares memory nor descriptors.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        let ip = "ip link set lo up && ip route add local 10.244.0.0/24 dev lo";
        assert!(Command::new("sh").args(["-c", ip]).status().unwrap().success());
        work()
    };
    thread::scope(|scope| scope.spawn(entered).join()).unwrap()
}

#[test]
fn sockets_in_every_network_namespace_are_closed() {
    let mut stale = Fixture::start();
    let here = stale.translated_udp(Form::V4, 3);
    let mount = stale.world.sandbox.dir().join("a netns");
    fs::write(&mount, "").unwrap();
    let mounted = in_another_netns(|| {
        rustix::mount::mount_bind("/proc/thread-self/ns/net", &mount).unwrap();
        Fixture::udp(Form::V4, 3)
    });
    let mount = Mounted(mount);
    stale.store_translation(&mounted, Form::V4.web(), Form::V4.pod(3, UDP));
    let (occupied, netns) = in_another_netns(|| ([2, 3].map(|pod| Fixture::udp(Form::V4, pod)), Netns::current()));
    for (pod, socket) in [2, 3].into_iter().zip(&occupied) {
        stale.store_translation(socket, Form::V4.web(), Form::V4.pod(pod, UDP));
    }
    stale.keep_pods(&[1, 2]);
    let (leave, stay) = mpsc::channel::<()>();
    let (entered, enter) = mpsc::channel();
    let outcome = thread::scope(|scope| {
        scope.spawn(move || {
            netns.enter().unwrap();
            entered.send(()).unwrap();
            stay.recv().unwrap_err()
        });
        enter.recv().unwrap();
        let outcome = stale.pass(TerminateSockets::Udp);
        drop(leave);
        outcome
    });
    assert_eq!((outcome.closed, outcome.left), (3, 0));
    assert!(outcome.namespaces >= 3, "{outcome:?}");
    assert_closed(&here);
    assert_closed(&mounted);
    assert_untouched(&occupied[0]);
    assert_closed(&occupied[1]);
    let still = fs::read_link("/proc/thread-self/ns/net").unwrap();
    assert_eq!(still, fs::read_link(stale.world.sandbox.netns().path()).unwrap(), "the caller stays where it was");
    drop(mount);
}

#[test]
fn one_pass_closes_thousands() {
    const MANY: usize = 5_000;
    setrlimit(Resource::Nofile, Rlimit { current: Some(2 * MANY as u64), ..getrlimit(Resource::Nofile) }).unwrap();
    let mut stale = Fixture::start();
    let mut measure = |count: usize| {
        let sockets: Vec<_> =
            (0..count).map(|index| stale.translated_udp(Form::ALL[index % 3], 2 + index as u8 % 2)).collect();
        let pass = |what: &str| {
            let start = Instant::now();
            let closed = stale.closes(TerminateSockets::Udp);
            eprintln!("{count} connected sockets, {what}: {:?}", start.elapsed());
            closed
        };
        assert_eq!(pass("none is stale"), 0);
        stale.keep_pods(&[1, 2]);
        let gone: Vec<_> = sockets.iter().skip(1).step_by(2).collect();
        assert_eq!(pass("half of them are stale"), gone.len() as u64);
        gone.into_iter().for_each(|socket| assert_closed(socket));
        sockets.iter().step_by(2).for_each(|socket| assert_untouched(socket));
        stale.keep_pods(&[1, 2, 3]);
    };
    [0, 100, MANY].into_iter().for_each(&mut measure);
}

#[test]
fn sockets_that_a_kernel_cannot_close_are_counted() {
    let mut stale = Fixture::start();
    let _servers = stale.tcp_servers();
    let udp = Form::ALL.map(|form| stale.translated_udp(form, 3));
    let tcp = Form::ALL.map(|form| stale.translated_tcp(form, 3));
    let others =
        Form::ALL.map(|form| (stale.translated_udp(form, 2), Fixture::udp(form, 3), stale.translated_tcp(form, 2)));
    stale.keep_pods(&[1, 2]);
    let pins = &stale.pins;
    let on_a_poor_kernel = || {
        forbid_netlink();
        let counts = [TerminateSockets::Udp, TerminateSockets::All]
            .map(|mode| terminate_stale(pins, &any(mode)).map(|outcome| (outcome.closed, outcome.left)));
        (counts.map(Result::unwrap), probe(Some(pins)))
    };
    let (counts, can) = thread::scope(|scope| scope.spawn(on_a_poor_kernel).join()).unwrap();
    assert_eq!(counts, [(0, 3), (0, 6)]);
    let lacks = |option| Err(DiagError::MissingOption(option));
    assert_eq!((can.udp_diag, can.tcp_diag), (lacks("CONFIG_INET_UDP_DIAG"), lacks("CONFIG_INET_DIAG")));
    assert_eq!(can.destroy, lacks("CONFIG_INET_UDP_DIAG"));
    can.storages.unwrap();
    udp.iter().for_each(|socket| assert_untouched(socket));
    assert_eq!(stale.closes(TerminateSockets::All), 6, "here they can be closed");
    tcp.iter().for_each(|socket| assert_eq!(error(socket), Some(Errno::CONNABORTED)));
    others.iter().for_each(|(udp, direct, tcp)| {
        assert_untouched(udp);
        assert_untouched(direct);
        assert_untouched(tcp);
    });
}

#[test]
fn this_kernel_can_do_everything() {
    let stale = Fixture::start();
    for pins in [None, Some(&stale.pins), Some(&PinDir::new(&stale.world.sandbox.dir().join("nothing")))] {
        let can = probe(pins);
        assert_eq!([can.udp_diag, can.tcp_diag, can.destroy], [Ok(()); 3]);
        can.storages.unwrap();
    }
}

#[test]
fn without_a_table_there_is_no_pass() {
    let sandbox = Sandbox::for_test();
    let error = terminate_stale(&PinDir::new(&sandbox.pin_dir()), &any(TerminateSockets::Udp)).unwrap_err().to_string();
    assert!(error.starts_with("cannot tell stale sockets: cannot use ") && error.contains("FRONTENDS"), "{error}");
}

/// A UDP socket that has connected to the VIP while `pod` was the only backend.
fn connect_udp(form: Form, pod: u8) -> UdpSocket {
    let socket = UdpSocket::bind(form.wildcard()).unwrap();
    socket.set_read_timeout(Some(SYNC)).unwrap();
    socket.connect(form.web()).unwrap();
    assert_eq!(echo::ask_peer(&socket).unwrap(), format!("pod-{pod}"));
    socket
}

#[test]
fn vip_an_application_reconnects_to_a_serving_backend() {
    let stale = Fixture::start();
    let _servers = stale.udp_servers();
    stale.keep_pods(&[3]);
    let sockets = Form::ALL.map(|form| connect_udp(form, 3));
    let direct = Form::ALL.map(|form| Fixture::udp(form, 3));
    stale.keep_pods(&[1]);
    assert_eq!(stale.closes(TerminateSockets::Udp), 3);
    for (form, socket) in Form::ALL.into_iter().zip(&sockets) {
        // A waiting receiver gets the reason; a sender only learns that there is no peer.
        assert_eq!(socket.recv(&mut [0; 64]).unwrap_err().kind(), io::ErrorKind::ConnectionAborted, "{form:?}");
        let not_connected = Errno::DESTADDRREQ.raw_os_error();
        assert_eq!(socket.send(b"who").unwrap_err().raw_os_error(), Some(not_connected), "{form:?}");
        socket.connect(form.web()).unwrap();
        assert_eq!(echo::ask_peer(socket).unwrap(), "pod-1", "{form:?}");
    }
    direct.iter().for_each(|socket| assert_untouched(socket));
    assert_eq!(stale.closes(TerminateSockets::Udp), 0);
}

/// The socket has a flow to the VIP with its connected backend, but was connected to that directly.
#[test]
fn vip_a_socket_that_only_sends_to_the_vip_as_well_is_left_alone() {
    let stale = Fixture::start();
    let _servers = stale.udp_servers();
    stale.keep_pods(&[3]);
    let sockets = Form::ALL.map(|form| {
        let socket = Fixture::udp(form, 3);
        socket.send_to(b"who", form.web()).unwrap();
        socket
    });
    stale.keep_pods(&[1]);
    assert_eq!(stale.closes(TerminateSockets::Udp), 0);
    sockets.iter().for_each(|socket| assert_untouched(socket));
}

#[test]
fn vip_a_change_of_readiness_closes_no_socket() {
    let stale = Fixture::start();
    let _servers = stale.udp_servers();
    stale.keep_pods(&[3]);
    let sockets = Form::ALL.map(|form| connect_udp(form, 3));
    // The backend is first not ready and then terminating, but always serving.
    for third in [(false, true, false), (true, true, false), (false, true, true)] {
        let eligible: &[u8] = if third.0 { &[1, 3] } else { &[1] };
        stale.set(eligible, |pod| [Some((true, true, false)), None, Some(third)][usize::from(pod) - 1]);
        assert_eq!(stale.closes(TerminateSockets::Udp), 0, "{third:?}");
        sockets.iter().for_each(|socket| assert_eq!(echo::ask_peer(socket).unwrap(), "pod-3", "{third:?}"));
    }
    stale.set(&[1], |pod| [Some((true, true, false)), None, Some((false, false, true))][usize::from(pod) - 1]);
    assert_eq!(stale.closes(TerminateSockets::Udp), 3);
}

/// The local port of the socket that a netlink message asks to close.
fn port_to_close(message: &[u8]) -> Option<u16> {
    const SOCK_DESTROY: u16 = 21;
    // `struct nlmsghdr` has the type at 4; `struct inet_diag_req_v2` follows, with the port at 8.
    let field = |at: usize| message[at..at + 2].try_into().unwrap();
    (u16::from_ne_bytes(field(4)) == SOCK_DESTROY).then(|| u16::from_be_bytes(field(24)))
}

/// Stops a pass at its first request to close a socket, when it has already chosen all of them.
#[test]
fn vip_a_backend_that_returns_during_a_pass_keeps_its_sockets() {
    /// More than the age of the sets that a pass relies on.
    const AGE: Duration = Duration::from_millis(50);
    let stale = Fixture::start();
    let _servers = stale.udp_servers();
    stale.keep_pods(&[3]);
    let connect = |form| {
        let socket = connect_udp(form, 3);
        (socket.local_addr().unwrap().port(), form, socket)
    };
    let mut sockets: Vec<_> = Form::ALL.repeat(4).into_iter().map(connect).collect();
    stale.keep_pods(&[1]);
    let mut closed = None;
    let pass = || terminate_stale(&stale.pins, &any(TerminateSockets::Udp)).unwrap();
    let outcome = pause_before_sends(pass, |message| {
        let port = port_to_close(message);
        if port.is_none() || closed.is_some() {
            return;
        }
        closed = port;
        stale.keep_pods(&[3]);
        // Some applications connect the same socket again, and others use a new one.
        let chosen = sockets.iter().filter(|(port, ..)| Some(*port) != closed);
        chosen.step_by(2).for_each(|(_, form, socket)| socket.connect(form.web()).unwrap());
        sockets.extend(Form::ALL.map(connect));
        thread::sleep(AGE);
    });
    assert_eq!((outcome.closed, outcome.left), (1, 0), "only the socket that the pass was about to close");
    for (port, form, socket) in &sockets {
        if Some(*port) == closed {
            assert_closed(socket);
        } else {
            assert_eq!(echo::ask_peer(socket).unwrap(), "pod-3", "{form:?}");
        }
    }
}

#[test]
fn vip_sockets_that_have_moved_on_are_left_alone() {
    let stale = Fixture::start();
    let _servers = stale.udp_servers();
    stale.keep_pods(&[3]);
    let sockets = Form::ALL.map(|form| connect_udp(form, 3));
    for (form, socket) in Form::ALL.into_iter().zip(&sockets) {
        // The same pod, but past the Service.
        socket.connect(form.pod(3, UDP)).unwrap();
    }
    stale.keep_pods(&[1]);
    assert_eq!(stale.closes(TerminateSockets::Udp), 0);
    sockets.iter().for_each(|socket| assert_eq!(echo::ask_peer(socket).unwrap(), "pod-3"));
}

#[test]
fn vip_tcp_connections_are_closed_in_mode_all() {
    let mut stale = Fixture::start();
    // The servers do not accept, so they do not answer the half-closed connections with a FIN.
    let pods = [2, 3].map(|pod| [Form::V4, Form::V6].map(|form| form.pod(pod, TCP)));
    let _listeners: Vec<_> = pods.as_flattened().iter().map(|pod| TcpListener::bind(pod).unwrap()).collect();
    let connect = || Form::ALL.map(|form| TcpStream::connect(form.web()).unwrap());
    stale.keep_pods(&[2]);
    let serving = connect();
    stale.keep_pods(&[3]);
    let (mut gone, half_closed) = (connect(), connect());
    half_closed.iter().for_each(|socket| socket.shutdown(Shutdown::Write).unwrap());
    let without_place = Form::ALL.map(|form| stale.translated_tcp(form, 3));
    let direct = Form::ALL.map(|form| TcpStream::connect(form.pod(3, TCP)).unwrap());
    stale.keep_pods(&[1, 2]);
    assert_eq!(stale.closes(TerminateSockets::Udp), 0);
    gone.iter().chain(&half_closed).chain(&without_place).for_each(|socket| assert_untouched(socket));
    assert_eq!(stale.closes(TerminateSockets::All), 9);
    for socket in &mut gone {
        assert_eq!(socket.read(&mut [0; 1]).unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }
    half_closed.iter().chain(&without_place).for_each(|socket| assert_eq!(error(socket), Some(Errno::CONNABORTED)));
    serving.iter().chain(&direct).for_each(|socket| assert_untouched(socket));
}

#[test]
fn vip_a_deleted_service_ends_its_udp_sockets_but_no_tcp() {
    let mut stale = Fixture::start();
    let _servers = [stale.tcp_servers(), stale.udp_servers()];
    stale.keep_pods(&[1]);
    let udp = Form::ALL.map(|form| connect_udp(form, 1));
    let tcp = Form::ALL.map(|form| echo::connect_tcp(form.web()).unwrap().1);
    let without_place = Form::ALL.map(|form| stale.translated_tcp(form, 1));
    stale.delete_service();
    assert_eq!(stale.closes(TerminateSockets::All), 3);
    udp.iter().for_each(|socket| assert_closed(socket));
    tcp.iter().for_each(|stream| echo::ping_tcp(stream, "still there").unwrap());
    without_place.iter().for_each(|socket| assert_untouched(socket));
}

const MPTCP: rustix::net::Protocol = rustix::net::Protocol::from_raw(std::num::NonZeroU32::new(262).expect("not zero"));

fn mptcp(form: Form) -> OwnedFd {
    let family = if form == Form::V4 { AddressFamily::INET } else { AddressFamily::INET6 };
    rustix::net::socket(family, SocketType::STREAM, Some(MPTCP)).unwrap()
}

/// An MPTCP connection to the VIP.
fn connect_mptcp(form: Form) -> OwnedFd {
    let socket = mptcp(form);
    rustix::net::connect(&socket, &form.web()).unwrap();
    socket
}

/// MPTCP servers at a pod that do not accept.
fn mptcp_listeners(pod: u8) -> [OwnedFd; 2] {
    [Form::V4, Form::V6].map(|form| {
        let socket = mptcp(form);
        rustix::net::bind(&socket, &form.pod(pod, TCP)).unwrap();
        rustix::net::listen(&socket, 16).unwrap();
        socket
    })
}

/// Backends and states of TCP connections in `get sockets`.
fn listed_backends(sandbox: &Sandbox) -> Vec<(Value, Value)> {
    let rows = rows(sandbox, "sockets").into_iter().filter(|row| row["protocol"] == "TCP");
    rows.map(|row| (row["backend"].clone(), row["state"].clone())).collect()
}

/// With a server without MPTCP, the connection continues and ends as TCP.
#[test]
fn vip_mptcp_connections_to_servers_without_it_end_at_once() {
    let stale = Fixture::start();
    let _servers = stale.tcp_servers();
    stale.keep_pods(&[2, 3]);
    // With this many connections, both pods get some.
    let sockets: Vec<_> = Form::ALL.into_iter().cycle().take(48).map(|form| (form, connect_mptcp(form))).collect();
    let of_pod = |number: u8| {
        let listed = listed_backends(&stale.world.sandbox);
        let is_of =
            |(backend, state): &&(Value, Value)| pod(number).is_of(backend) && (*state == "stale") == (number == 3);
        listed.iter().filter(is_of).count()
    };
    stale.keep_pods(&[2]);
    let (serving, gone) = (of_pod(2), of_pod(3));
    assert!(serving != 0 && gone != 0 && serving + gone == sockets.len(), "{serving} and {gone}");
    assert_eq!(stale.closes(TerminateSockets::Udp), 0);
    assert_eq!(stale.closes(TerminateSockets::All), gone as u64);
    let ended = sockets.iter().filter(|(_, socket)| error(socket) == Some(Errno::CONNABORTED)).count();
    assert_eq!(ended, gone);
    assert_eq!((of_pod(2), of_pod(3), stale.closes(TerminateSockets::All)), (serving, 0, 0));
}

/// With a server that supports MPTCP, the kernel gives the connection some time for another subflow.
#[test]
fn vip_mptcp_connections_lose_all_their_subflows() {
    let stale = Fixture::start();
    let listeners = mptcp_listeners(3);
    let _others = mptcp_listeners(2);
    // The setting is of this network namespace, in seconds. Without it the time is a minute.
    fs::write("/proc/sys/net/mptcp/close_timeout", "1").ok();
    stale.world.sandbox.add_address("10.244.7.7");
    let ip = "ip mptcp limits set subflows 8 add_addr_accepted 8 && ip mptcp endpoint add 10.244.7.7 dev lo subflow";
    assert!(Command::new("sh").args(["-c", ip]).status().unwrap().success());
    stale.keep_pods(&[3]);
    let sockets = [Form::V4, Form::V6].map(connect_mptcp);
    let direct = mptcp(Form::V4);
    rustix::net::connect(&direct, &Form::V4.pod(3, TCP)).unwrap();
    let accepted = listeners.each_ref().map(|listener| rustix::net::accept(listener).unwrap());
    for (socket, accepted) in sockets.iter().zip(&accepted) {
        // Only after data from the server may the connection have more subflows.
        rustix::io::write(accepted, b"x").unwrap();
        rustix::io::read(socket, &mut [0; 1]).unwrap();
    }
    let subflows = || {
        let output = Command::new("ss").args(["-tnHe", "state", "established"]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let inode = |socket: &OwnedFd| format!("ino:{} ", rustix::fs::fstat(socket).unwrap().st_ino);
        let count = |socket: &OwnedFd| text.lines().filter(|line| line.contains(&inode(socket))).count();
        [count(&sockets[0]), count(&sockets[1]), count(&direct)]
    };
    eventually(SYNC, "there is another subflow", || {
        let now = subflows();
        if now[0] == 2 { Ok(()) } else { Err(format!("{now:?}")) }
    });
    let before = subflows();
    stale.keep_pods(&[2]);
    assert_eq!(stale.closes(TerminateSockets::All), 2);
    assert_eq!(subflows(), [0, 0, before[2]], "{before:?} before");
    for socket in &sockets {
        // A blocked read() returns when the kernel gives up.
        let told = rustix::io::read(socket, &mut [0; 1]);
        assert!(told.is_err(), "{told:?}");
    }
    assert_eq!(stale.closes(TerminateSockets::All), 0, "once is enough");
    assert_untouched(&direct);
}

/// Their data is still under way.
#[test]
fn vip_connections_that_their_application_has_closed_end_by_themselves() {
    let mut stale = Fixture::start();
    let _listener = TcpListener::bind(Form::V4.pod(3, TCP)).unwrap();
    stale.keep_pods(&[3]);
    let stored = OwnedFd::from(stale.translated_tcp(Form::V4, 3));
    let sockets = [stored, TcpStream::connect(Form::V4.web()).unwrap().into()];
    for socket in &sockets {
        rustix::io::ioctl_fionbio(socket, true).unwrap();
        while rustix::io::write(socket, &[0; 65_536]).is_ok() {}
    }
    drop(sockets);
    stale.keep_pods(&[1]);
    assert_eq!(stale.closes(TerminateSockets::All), 0);
    assert_eq!(listed_backends(&stale.world.sandbox), []);
    let still =
        Command::new("ss").args(["-tnH", "state", "fin-wait-1", "dst", &pod(3).v4.to_string()]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&still.stdout).lines().count(), 2);
}

fn retired(protocol: Protocol, pods: &[u8]) -> Retired {
    let port = if protocol == Protocol::Tcp { TCP } else { UDP };
    let mut retired = Retired::default();
    for address in pods.iter().flat_map(|&number| pod(number).addresses()) {
        retired.add(protocol, [Backend { address: parse_address(&address.to_string()).unwrap(), port }]);
    }
    retired
}

#[test]
fn only_sockets_to_retired_backends_are_closed() {
    let mut stale = Fixture::start();
    let _servers = stale.tcp_servers();
    let udp = [2, 3].map(|pod| Form::ALL.map(|form| stale.translated_udp(form, pod)));
    let tcp = [2, 3].map(|pod| Form::ALL.map(|form| stale.translated_tcp(form, pod)));
    let pass = |stale: &Fixture, retired| {
        let Outcome { closed, left, .. } = terminate_stale(&stale.pins, &retired).unwrap();
        (closed, left)
    };
    // A backend that retires from one frontend may serve another.
    assert_eq!(pass(&stale, retired(Protocol::Udp, &[2, 3])), (0, 0));
    stale.keep_pods(&[1]);
    assert_eq!(pass(&stale, Retired::default()), (0, 0));
    assert_eq!(pass(&stale, retired(Protocol::Udp, &[1])), (0, 0));
    assert_eq!(pass(&stale, retired(Protocol::Udp, &[3])), (3, 0));
    udp[0].iter().for_each(|socket| assert_untouched(socket));
    udp[1].iter().for_each(|socket| assert_closed(socket));
    assert_eq!(pass(&stale, retired(Protocol::Tcp, &[2])), (3, 0));
    tcp[0].iter().for_each(|socket| assert_eq!(error(socket), Some(Errno::CONNABORTED)));
    tcp[1].iter().for_each(|socket| assert_untouched(socket));
    // Hundreds of other backends retire at the same time.
    let mut many = retired(Protocol::Udp, &[2]);
    let address = parse_address("10.9.9.9").unwrap();
    many.add(Protocol::Udp, (1..=200).map(|port| Backend { address, port }));
    many.add_all(retired(Protocol::Tcp, &[3]));
    assert_eq!(pass(&stale, many), (6, 0));
}

/// Writes the backends of port 80 for TCP and for UDP, IPv4 only.
fn write_backends(sandbox: &Sandbox, tcp: &[u8], udp: &[u8]) {
    let service = Service::new("web").cluster_ips([WEB.v4]).tcp("http", PORT, TCP).udp("dns", PORT, UDP);
    let pods = |pods: &[u8]| pods.iter().map(|&number| pod(number).v4).collect::<Vec<_>>();
    let tcp = Slice::v4("web").name("web-1").tcp("http", TCP).ready(pods(tcp));
    let udp = Slice::v4("web").name("web-2").udp("dns", UDP).ready(pods(udp));
    manifest::write(&sandbox.manifest_dir(), "web.json", [Value::from(service), tcp.into(), udp.into()]);
}

/// Writes the backends and waits until the table has them.
fn set_backends(sandbox: &Sandbox, tcp: &[u8], udp: &[u8]) {
    write_backends(sandbox, tcp, udp);
    eventually(SYNC, "the table follows", || {
        let rows = rows(sandbox, "services");
        let follows = |protocol: &str, pods| rows.iter().any(|row| row["protocol"] == protocol && has_pods(row, pods));
        if follows("TCP", tcp) && follows("UDP", udp) { Ok(()) } else { Err(format!("{rows:?}")) }
    });
}

#[test]
fn no_pass_is_made_for_backends_that_close_no_socket() {
    let sandbox = Sandbox::for_test();
    write_backends(&sandbox, &[1, 2], &[1, 2]);
    let mut agent = start_agent(&sandbox);
    // The wait is long enough for an unexpected pass to happen.
    let assert_passes = |expected: u64| {
        wait_for_counter(&sandbox, "sockets_passes", expected);
        thread::sleep(Duration::from_millis(300));
        assert_eq!(counter(&sandbox, "sockets_passes"), expected);
    };
    assert_passes(0); // There were no connections before.
    set_backends(&sandbox, &[1], &[1, 2]);
    assert_passes(0);
    set_backends(&sandbox, &[1, 2, 3], &[1, 2, 3]);
    assert_passes(0);
    set_backends(&sandbox, &[1, 2, 3], &[1, 2]);
    assert_passes(1);
    agent.kill();
    let _agent = start_agent(&sandbox);
    wait_for_counter(&sandbox, "sockets_passes", 1);
}

#[test]
fn the_memory_of_a_pass_does_not_grow_with_sockets() {
    // The first number is more than are kept at a time.
    const MANY: [u64; 2] = [4_500, 12_000];
    let descriptors = MANY.iter().sum::<u64>() + 1_000;
    setrlimit(Resource::Nofile, Rlimit { current: Some(descriptors), ..getrlimit(Resource::Nofile) }).unwrap();
    let sandbox = Sandbox::for_test();
    sandbox.add_addresses((1..=3).map(|number| pod(number).v4));
    write_backends(&sandbox, &[1], &[3]);
    let mut agent = start_agent(&sandbox);
    let mut closed = 0;
    let [(few, _first), (many, sockets)] = MANY.map(|count| {
        set_backends(&sandbox, &[1], &[3]);
        let connect = |number: u64| {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.connect(if number.is_multiple_of(2) { Form::V4.web() } else { Form::V4.pod(3, UDP) }).unwrap();
            socket
        };
        let sockets: Vec<_> = (0..count).map(connect).collect();
        set_backends(&sandbox, &[1], &[1]);
        closed += count / 2;
        wait_for_counter(&sandbox, "sockets_closed", closed);
        for (number, socket) in sockets.iter().enumerate() {
            assert_eq!(socket.peer_addr().is_err(), number % 2 == 0, "{number}");
        }
        (usage::Memory::of(agent.pid()).peak, sockets)
    });
    assert!(many < few + (1 << 20), "{few} bytes with {} sockets, {many} with {}", MANY[0], MANY[1]);

    let of = format!(" stale sockets of {}/UDP\n", Form::V4.web());
    assert!(agent.log().contains(&of), "{}", agent.tail());

    // A pass after a restart checks all sockets.
    agent.kill();
    let agent = start_agent(&sandbox);
    wait_for_counter(&sandbox, "sockets_passes", 1);
    let restarted = usage::Memory::of(agent.pid()).peak;
    assert!(restarted < few + (1 << 20), "{few} bytes before the restart, {restarted} with {} sockets", sockets.len());
}

#[test]
fn sockets_left_open_are_counted_until_they_are_closed() {
    let sandbox = Sandbox::for_test();
    sandbox.add_addresses((1..=3).map(|number| pod(number).v4));
    write_backends(&sandbox, &[1], &[3]);
    let on_a_poor_kernel = || {
        forbid_netlink();
        let _agent = start_agent(&sandbox);
        sandbox.enter();
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect(Form::V4.web()).unwrap();
        set_backends(&sandbox, &[1], &[1, 2]);
        wait_for_counter(&sandbox, "sockets_left", 1);
        set_backends(&sandbox, &[1], &[1]);
        wait_for_counter(&sandbox, "sockets_passes", 2);
        assert_eq!(counter(&sandbox, "sockets_left"), 1, "the other one that has retired had no sockets");
        assert_untouched(&socket);
        drop(socket);
        set_backends(&sandbox, &[1], &[2]);
        wait_for_counter(&sandbox, "sockets_left", 0);
        assert_eq!(counter(&sandbox, "sockets_closed"), 0);
    };
    thread::scope(|scope| scope.spawn(on_a_poor_kernel).join()).unwrap();
}
