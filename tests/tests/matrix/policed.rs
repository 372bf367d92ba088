//! Every call under a network policy: those that it allows pass, those that it does not are refused and reach nobody,
//! to the pod and from it, directly and through a ClusterIP.
//!
//! All addresses are in the pod's own network namespace, so that this also runs where there are no links between
//! namespaces. A policy knows its peers by their addresses: for traffic to the pod the sockets are bound to those.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write as _},
    net::{IpAddr, SocketAddr, UdpSocket},
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    thread,
};

use cproxy_datapath::bpf::{PinDir, PolicyPins, PolicyReader};
use cproxy_tests::{
    Server, echo,
    process::eventually,
    sandbox::Netns,
    witness::{Token, Witness, parse_answer},
    world::{SYNC, counter, rows},
};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde_json::{Value, json};

use crate::{
    handles::{self, in_child, receive_descriptor, send_descriptor},
    message::Buffer,
    opening::{FORMS, set_tcp_option},
    play::{error_name, fresh_token},
    socket::{SendCall, Socket, poll},
    world::{Case, Form, MatrixSandbox, POD_PORT, PORT, patience, pod, ready, vip},
};

/// The pod.
const WEB: u8 = 9;
/// A pod that the policy allows in both directions, and one that it does not name.
const FRIEND: u8 = 1;
const STRANGER: u8 = 2;

const IPPROTO_MPTCP: libc::c_int = 262;

/// `Sendto` and so on are calls with MSG_FASTOPEN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamCall {
    Connect,
    ConnectByUring,
    NonBlocking,
    /// From a bound socket.
    Bound,
    /// Of a socket that was connected to another peer, and to none.
    Again,
    FastOpen(SendCall),
    /// With TCP_FASTOPEN_CONNECT: the first data open the connection.
    FastOpenConnect,
    /// Of MPTCP.
    Multipath,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DatagramCall {
    /// Connects, and sends to no address.
    Connected(SendCall),
    ConnectedByUring,
    ConnectedAgain,
    /// Sends to the address from a socket that is connected to the pod itself.
    Aside,
    Unconnected(SendCall),
}

impl StreamCall {
    const ALL: [Self; 10] = [
        Self::Connect,
        Self::ConnectByUring,
        Self::NonBlocking,
        Self::Bound,
        Self::Again,
        Self::FastOpen(SendCall::Sendto),
        Self::FastOpen(SendCall::Sendmsg),
        Self::FastOpen(SendCall::UringSendmsg),
        Self::FastOpenConnect,
        Self::Multipath,
    ];
}

impl DatagramCall {
    const ALL: [Self; 11] = [
        Self::Connected(SendCall::Send),
        Self::Connected(SendCall::SendmsgCmsg),
        Self::ConnectedByUring,
        Self::ConnectedAgain,
        Self::Aside,
        Self::Unconnected(SendCall::Sendto),
        Self::Unconnected(SendCall::Sendmsg),
        Self::Unconnected(SendCall::SendmsgCmsg),
        Self::Unconnected(SendCall::Sendmmsg),
        Self::Unconnected(SendCall::UringSend),
        Self::Unconnected(SendCall::UringSendmsg),
    ];

    fn is_connected(self) -> bool {
        !matches!(self, Self::Aside | Self::Unconnected(_))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    ToPod,
    FromPod,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Direct,
    ClusterIp,
}

/// Traffic between the pod and a peer.
#[derive(Clone, Copy, Debug)]
struct Traffic {
    direction: Direction,
    way: Way,
    peer: u8,
    form: Form,
}

impl Traffic {
    fn all(forms: &[Form]) -> impl Iterator<Item = Self> {
        let ways = |direction| [Way::Direct, Way::ClusterIp].map(|way| (direction, way));
        let peers = |(direction, way)| [FRIEND, STRANGER].map(|peer| (direction, way, peer));
        let of = |(direction, way, peer)| forms.iter().map(move |&form| Self { direction, way, peer, form });
        [Direction::ToPod, Direction::FromPod].into_iter().flat_map(ways).flat_map(peers).flat_map(of)
    }

    fn target(self) -> u8 {
        if self.direction == Direction::ToPod { WEB } else { self.peer }
    }

    fn destination(self) -> SocketAddr {
        match self.way {
            Way::Direct => self.form.address(pod(self.target()), POD_PORT),
            Way::ClusterIp => self.form.address(vip(self.target()), PORT),
        }
    }

    /// The destination as calls return it.
    fn shown(self) -> SocketAddr {
        match self.way {
            Way::Direct => self.form.shown(pod(self.target()), POD_PORT),
            Way::ClusterIp => self.form.shown(vip(self.target()), PORT),
        }
    }

    /// The sender's address, for `bind()`.
    fn source(self) -> SocketAddr {
        let sender = if self.direction == Direction::ToPod { self.peer } else { WEB };
        self.form.shown(pod(sender), 0)
    }

    /// The sender's address in control data.
    fn source_of_control(self) -> IpAddr {
        let sender = if self.direction == Direction::ToPod { self.peer } else { WEB };
        self.form.address(pod(sender), 0).ip()
    }

    /// The pod itself, with which it may always talk.
    fn itself(self) -> SocketAddr {
        self.form.address(pod(WEB), POD_PORT)
    }

    fn is_denied(self) -> bool {
        self.peer == STRANGER
    }
}

struct World {
    witness: Witness,
    world: MatrixSandbox,
    _servers: Vec<Server>,
}

impl World {
    /// The pod with its peers, and an agent with these flags.
    fn start(flags: &[&str]) -> Self {
        let mut this = Self::without_agent();
        this.start_agent(flags);
        this
    }

    fn without_agent() -> Self {
        let (world, witness) = (MatrixSandbox::new([WEB, FRIEND, STRANGER].map(pod)), Witness::default());
        // Data go with the first segment, without a cookie.
        for (file, value) in [
            ("ipv4/tcp_fastopen", "1543"),
            // Each refusal of a datagram is answered.
            ("ipv4/icmp_ratemask", "0"),
            ("ipv6/icmp/ratelimit", "0"),
        ] {
            fs::write(format!("/proc/sys/net/{file}"), value).unwrap();
        }
        let mut servers = Vec::new();
        for number in [WEB, FRIEND, STRANGER] {
            for address in pod(number).addresses() {
                let at = (address, POD_PORT).into();
                servers.push(witness.tcp(&world.sandbox, at, &name(number)));
                servers.push(witness.udp(&world.sandbox, at, &name(number)));
            }
        }
        world.write(objects(&[policy()]));
        Self { witness, world, _servers: servers }
    }

    fn start_agent(&mut self, flags: &[&str]) {
        let own = pod(WEB).addresses().map(|address| address.to_string()).join(",");
        let all = ["--policy-pod", "shop/web", "--pod-ip", &own];
        self.world.start_agent_with(&[&all, flags].concat());
    }

    /// Makes a call, and says what has become of it.
    fn stream(&self, call: StreamCall, traffic: Traffic, token: Token) -> io::Result<String> {
        let Traffic { form, .. } = traffic;
        let protocol = if call == StreamCall::Multipath { IPPROTO_MPTCP } else { 0 };
        let kind = if call == StreamCall::NonBlocking { libc::SOCK_NONBLOCK } else { 0 };
        let socket = Socket::of_protocol(form.family(), libc::SOCK_STREAM | kind, protocol)?;
        socket.set_timeout(patience())?;
        if call == StreamCall::Bound || traffic.direction == Direction::ToPod {
            socket.bind(traffic.source())?;
        }
        let to = traffic.destination();
        match call {
            StreamCall::Connect | StreamCall::Bound | StreamCall::Multipath => socket.connect(to)?,
            StreamCall::ConnectByUring => socket.connect_by_uring(to)?,
            StreamCall::NonBlocking => connect_without_waiting(&socket, to)?,
            StreamCall::Again => {
                // A stranger's connection to the pod is refused also then.
                socket.connect(traffic.itself()).ok();
                socket.disconnect()?;
                socket.connect(to)?;
            }
            StreamCall::FastOpen(call) => {
                socket.fast_open(call, &mut Buffer::sending(&token, Some(to)))?;
            }
            StreamCall::FastOpenConnect => {
                set_tcp_option(&socket, libc::TCP_FASTOPEN_CONNECT, 1);
                socket.connect(to)?;
            }
        }
        if !matches!(call, StreamCall::FastOpen(_)) {
            socket.send_bytes(&token)?;
        }
        if call == StreamCall::NonBlocking {
            assert!(poll(&[&socket], libc::POLLIN, patience())?.is_some(), "no answer");
        }
        let answer = answer_to(&socket, token)?;
        // A socket of MPTCP shows the backend.
        if call != StreamCall::Multipath {
            assert_eq!(socket.peer()?, traffic.shown());
        }
        Ok(answer.0)
    }

    /// Makes a call, and says what has become of it.
    fn datagram(&self, call: DatagramCall, traffic: Traffic, token: Token) -> io::Result<String> {
        let Traffic { form, direction, .. } = traffic;
        let (socket, to) = (form.udp(), traffic.destination());
        let is_bound = match call {
            // The source in control data is enough.
            DatagramCall::Unconnected(SendCall::SendmsgCmsg) => false,
            // A connected socket gets answers to its own address alone.
            DatagramCall::Connected(SendCall::SendmsgCmsg) => true,
            _ => direction == Direction::ToPod,
        };
        if is_bound {
            socket.bind(traffic.source())?;
        }
        tell_errors(&socket, form);
        match call {
            DatagramCall::Connected(_) => socket.connect(to)?,
            DatagramCall::ConnectedByUring => socket.connect_by_uring(to)?,
            DatagramCall::ConnectedAgain => {
                socket.connect(traffic.itself())?;
                socket.disconnect()?;
                // Its source address stays that of the pod otherwise.
                if direction == Direction::FromPod {
                    socket.connect(form.address(pod(FRIEND), POD_PORT))?;
                }
                socket.connect(to)?;
            }
            DatagramCall::Aside => {
                socket.connect(traffic.itself())?;
                socket.send_one(&token, Some(to))?;
                // The answer is not of the socket's peer.
                return match &self.witness.wait(token, patience())[..] {
                    [receipt] => Ok(receipt.server.clone()),
                    other => Err(io::Error::other(format!("received by {other:?}"))),
                };
            }
            DatagramCall::Unconnected(_) => {}
        }
        if call.is_connected() {
            assert_eq!(socket.peer()?, traffic.shown());
        }
        match call {
            DatagramCall::Connected(SendCall::SendmsgCmsg) => {
                let mut message = Buffer::sending(&token, None);
                message.control(traffic.source_of_control());
                socket.send(SendCall::SendmsgCmsg, &mut [message])?;
            }
            DatagramCall::Unconnected(SendCall::Sendmmsg) => {
                let first = Buffer::sending(&fresh_token(), Some(traffic.itself()));
                let sent = socket.send(SendCall::Sendmmsg, &mut [first, Buffer::sending(&token, Some(to))])?;
                if sent == 1 {
                    // The error of the second message is that of the next call.
                    socket.send(SendCall::Sendmmsg, &mut [Buffer::sending(&token, Some(to))])?;
                }
            }
            DatagramCall::Unconnected(call) => {
                let mut message = Buffer::sending(&token, Some(to));
                if call == SendCall::SendmsgCmsg {
                    message.control(traffic.source_of_control());
                }
                socket.send(call, &mut [message])?;
            }
            _ => drop(socket.send_bytes(&token)?),
        }
        let (server, from) = answer_to(&socket, token)?;
        assert_eq!(from, Some(traffic.shown()), "the source of the answer");
        Ok(server)
    }

    /// Plays all calls, and returns those whose outcome is another one than `expected` says, with the number of all.
    fn play(&self, expected: impl Fn(&Traffic, bool) -> Option<&'static str>) -> (usize, Vec<String>) {
        let (mut count, mut differ) = (0, Vec::new());
        let mut compare = |name: String, outcome: io::Result<String>, traffic: Traffic, at_call, token| {
            count += 1;
            let outcome = outcome.unwrap_or_else(|error| error_name(&error));
            let expected = expected(&traffic, at_call);
            let wanted = expected.map_or_else(|| self::name(traffic.target()), str::to_owned);
            let receipts = self.witness.receipts(token);
            if outcome != wanted || receipts.len() != usize::from(expected.is_none()) {
                differ.push(format!("{name}: {outcome}, not {wanted}; received by {receipts:?}"));
            }
        };
        let has_mptcp = Socket::of_protocol(libc::AF_INET, libc::SOCK_STREAM, IPPROTO_MPTCP).is_ok();
        for traffic in Traffic::all(&FORMS) {
            for call in StreamCall::ALL.into_iter().filter(|call| has_mptcp || *call != StreamCall::Multipath) {
                let (name, token) = (format!("{traffic:?} {call:?}"), fresh_token());
                let _case = Case::new(&name);
                compare(name, self.stream(call, traffic, token), traffic, true, token);
            }
        }
        for traffic in Traffic::all(&Form::ALL) {
            // To the pod, this call goes to the socket's own peer.
            let has = |call: &DatagramCall| *call != DatagramCall::Aside || traffic.direction == Direction::FromPod;
            for call in DatagramCall::ALL.into_iter().filter(has) {
                let (name, token) = (format!("{traffic:?} {call:?}"), fresh_token());
                let _case = Case::new(&name);
                compare(name, self.datagram(call, traffic, token), traffic, !call.is_connected(), token);
            }
        }
        if !has_mptcp {
            eprintln!("this kernel has no MPTCP");
        }
        (count, differ)
    }
}

fn name(number: u8) -> String {
    format!("pod-{number}")
}

/// The cluster: the pods, a Service for each, and policies.
fn objects(policies: &[Value]) -> Vec<Value> {
    let of_pod = |number: u8, name: &str| {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "shop", "labels": {"app": name}},
            "status": {"phase": "Running", "podIPs": pod(number).addresses().map(|ip| json!({"ip": ip}))},
        })
    };
    let named = [(WEB, "web"), (FRIEND, "friend"), (STRANGER, "stranger")];
    let services = named.iter().flat_map(|&(number, name)| ready(name, number, &[number]));
    named.iter().map(|&(number, name)| of_pod(number, name)).chain(services).chain(policies.iter().cloned()).collect()
}

/// FRIEND may call the pod's port, and be called. Answers to other ports pass as replies alone.
fn policy() -> Value {
    let friends = json!([{"podSelector": {"matchLabels": {"app": "friend"}}}]);
    let ports = json!([{"port": POD_PORT}, {"port": POD_PORT, "protocol": "UDP"}]);
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "friends", "namespace": "shop"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": friends, "ports": ports}],
            "egress": [{"to": friends, "ports": ports}],
        },
    })
}

fn connect_without_waiting(socket: &Socket, to: SocketAddr) -> io::Result<()> {
    match socket.connect(to) {
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        other => return other,
    }
    assert!(poll(&[socket], libc::POLLOUT, patience())?.is_some(), "no answer to a segment");
    Ok(rustix::net::sockopt::socket_error(socket)??)
}

/// Makes an unconnected datagram socket hear of refusals, as a connected one does.
fn tell_errors(socket: &Socket, form: Form) {
    let families = [(libc::IPPROTO_IP, libc::IP_RECVERR), (libc::IPPROTO_IPV6, libc::IPV6_RECVERR)];
    let count = if form.family() == libc::AF_INET { 1 } else { 2 };
    families[..count].iter().for_each(|&(level, option)| socket.set_option(level, option, 1).unwrap());
}

/// The server that answers the token, and the answer's source.
fn answer_to(socket: &Socket, token: Token) -> io::Result<(String, Option<SocketAddr>)> {
    loop {
        let answer = socket.receive_one()?;
        match parse_answer(answer.bytes()) {
            Some((of, server)) if of == token => return Ok((server, answer.name())),
            // That of another message.
            Some(_) => {}
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

#[test]
fn every_call_that_the_policy_denies_is_refused_and_reaches_nobody() {
    let world = World::start(&["--policy", "enforce"]);
    let (count, differ) = world.play(|traffic, at_call| match (traffic.is_denied(), traffic.direction) {
        (false, _) => None,
        (true, Direction::FromPod) if at_call => Some("EPERM"),
        (true, _) => Some("ECONNREFUSED"),
    });
    eprintln!("{count} calls");
    assert!(differ.is_empty(), "{} of {count} calls differ:\n{}", differ.len(), differ.join("\n"));
}

#[test]
fn an_audited_policy_refuses_no_call() {
    let world = World::start(&["--policy", "audit"]);
    let (count, differ) = world.play(|_, _| None);
    assert!(differ.is_empty(), "{} of {count} calls differ:\n{}", differ.len(), differ.join("\n"));
}

/// An outcome of a connect to the stranger or the friend, in words.
fn connect(socket: &Socket, to: u8) -> String {
    let result = socket.connect(Form::V4.address(pod(to), POD_PORT));
    result.map_or_else(|error| error_name(&error), |()| "ok".to_owned())
}

#[test]
fn a_socket_of_another_network_namespace_has_no_policy() {
    let world = World::start(&["--policy", "enforce"]);
    let other = world.world.sandbox.empty_neighbour();
    let addresses = [FRIEND, STRANGER, WEB].map(|number| format!("address add {}/32 dev lo\n", pod(number).v4));
    world.world.sandbox.ip_in(&other, &format!("link set lo up\n{}", addresses.concat()));
    let _servers = [STRANGER, WEB].map(|number| echo::tcp_in(&other, (pod(number).v4, POD_PORT), &name(number)));
    let socket_in = |netns: &Netns| netns.run(|| Form::V4.tcp());
    assert_eq!(connect(&socket_in(&other), STRANGER), "ok", "from it");
    let caller = socket_in(&other);
    caller.bind((pod(STRANGER).v4, 0).into()).unwrap();
    assert_eq!(connect(&caller, WEB), "ok", "to the pod's address in it");
    // The socket's namespace counts, not that of the thread that uses it.
    let own = socket_in(world.world.sandbox.netns());
    assert_eq!(other.run(|| connect(&own, STRANGER)), "EPERM");
}

/// Passes a new socket of the pod's address to a child process, which is perhaps moved to a cgroup, and connects it.
fn connect_in_child(members: Option<&fs::File>, to: u8, expected: Option<i32>) {
    let socket = Form::V4.tcp();
    socket.bind((pod(WEB).v4, 0).into()).unwrap();
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    send_descriptor(&ours, &socket);
    drop(socket);
    let to = Form::V4.address(pod(to), POD_PORT);
    in_child(|| {
        if let Some(mut members) = members {
            // "0" is the writing process.
            members.write_all(b"0").map_err(|_| handles::Step::Descriptor)?;
        }
        let socket = Socket::from(receive_descriptor(&theirs)?);
        let error = socket.connect(to).err().and_then(|error| error.raw_os_error());
        handles::check(handles::Step::Send, error == expected)
    });
}

fn members(cgroup: &std::path::Path) -> fs::File {
    fs::OpenOptions::new().write(true).open(cgroup.join("cgroup.procs")).unwrap()
}

#[test]
fn a_socket_passed_to_another_process_or_cgroup_keeps_its_policy() {
    let world = World::start(&["--policy", "enforce"]);
    let sandbox = &world.world.sandbox;
    let beside = members(sandbox.cgroup_beside());
    for members in [None, Some(&beside)] {
        let _case = Case::new(format!("in another cgroup: {}", members.is_some()));
        connect_in_child(members, STRANGER, Some(libc::EPERM));
        connect_in_child(members, FRIEND, None);
    }
}

#[test]
fn calls_of_a_process_in_an_exempt_cgroup_are_not_looked_at() {
    let mut world = World::without_agent();
    let exempt = world.world.sandbox.cgroup().join("exempt");
    let below = exempt.join("below");
    fs::create_dir_all(&below).unwrap();
    world.start_agent(&["--policy", "enforce", "--policy-exempt-cgroup", exempt.to_str().unwrap()]);
    for cgroup in [&exempt, &below] {
        connect_in_child(Some(&members(cgroup)), STRANGER, None);
    }
    assert_eq!(connect(&Form::V4.tcp(), STRANGER), "EPERM", "elsewhere");
    // A datagram of an exempt process lets no other process send from that port.
    let (socket, to) = (UdpSocket::bind((pod(WEB).v4, 0)).unwrap(), SocketAddr::from((pod(STRANGER).v4, POD_PORT)));
    let mut members = members(&exempt);
    in_child(|| {
        members.write_all(b"0").map_err(|_| handles::Step::Descriptor)?;
        handles::check(handles::Step::Send, socket.send_to(b"x", to).is_ok())
    });
    let error = socket.send_to(b"x", to).err().and_then(|error| error.raw_os_error());
    assert_eq!(error, Some(libc::EPERM));
    // A service manager removes the cgroup of a service that it restarts, and makes it again.
    for cgroup in [&below, &exempt] {
        fs::remove_dir(cgroup).unwrap();
    }
    fs::create_dir(&exempt).unwrap();
    let pins = PolicyPins::new(&PinDir::new(&world.world.sandbox.pin_dir()));
    let id = fs::metadata(&exempt).unwrap().ino();
    eventually(SYNC, "it is exempt again", || {
        let state = PolicyReader::new(pins.clone()).unwrap().state().unwrap();
        if state.exempt_cgroups.contains(&id) { Ok(()) } else { Err(format!("{:?}", state.exempt_cgroups)) }
    });
    connect_in_child(Some(&self::members(&exempt)), STRANGER, None);
}

/// Peers that get a datagram each, and denied ones, that the programs remember after more of them.
const PEERS: u16 = 4_000;
const DENIED_PEERS: u16 = 256;
/// Ports of the pod and of its peers.
const OWN_PORT: u16 = 5_000;
const PEER_PORT: u16 = 5_001;

/// Address in 10.77.0.0/16, whose peers the pod may call, or in 10.78.0.0/16.
fn peer(is_denied: bool, number: u16) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    IpAddr::from([10, if is_denied { 78 } else { 77 }, high, low])
}

/// Calls `work` with each number, those of a CPU on a thread on it. The first CPU has half of them.
fn on_all_cpus(count: u16, work: impl Fn(u16) + Sync) {
    let cpus = thread::available_parallelism().unwrap().get();
    thread::scope(|scope| {
        for cpu in 0..cpus {
            let work = &work;
            scope.spawn(move || {
                let mut set = rustix::thread::CpuSet::new();
                set.set(cpu);
                rustix::thread::sched_setaffinity(None, &set).unwrap();
                let of_cpu = |number: u16| {
                    let number = usize::from(number);
                    if number % 2 == 0 { cpu == 0 } else { number / 2 % cpus == cpu }
                };
                (0..count).filter(|number| of_cpu(*number)).for_each(work);
            });
        }
    });
}

/// Each CPU takes elements of the programs' maps in advance, so that others may find none that is free.
#[test]
fn replies_and_denials_of_many_peers_are_remembered_by_all_cpus() {
    let mut world = World::without_agent();
    let rule = json!({"to": [{"ipBlock": {"cidr": "10.77.0.0/16"}}]});
    let policy = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "peers", "namespace": "shop"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress", "Egress"], "egress": [rule],
        },
    });
    world.world.write(objects(&[policy]));
    world.world.ip("route add local 10.76.0.0/14 dev lo");
    world.start_agent(&["--policy", "enforce"]);
    let own = SocketAddr::new(pod(WEB).v4.into(), OWN_PORT);
    let socket = UdpSocket::bind(own).unwrap();
    set_receive_buffer(&socket);
    let send = |number| assert_eq!(socket.send_to(b"?", (peer(false, number), PEER_PORT)).unwrap(), 1);
    on_all_cpus(2 * PEERS, |number| send(2 * PEERS + number));
    on_all_cpus(PEERS, send);
    let mut missing: BTreeSet<_> = (0..PEERS).map(|number| peer(false, number)).collect();
    for address in &missing {
        UdpSocket::bind((*address, PEER_PORT)).unwrap().send_to(b"!", own).unwrap();
    }
    socket.set_read_timeout(Some(patience())).unwrap();
    while !missing.is_empty() {
        let Ok((_, from)) = socket.recv_from(&mut [0; 4]) else { break };
        missing.remove(&from.ip());
    }
    assert!(missing.is_empty(), "the replies of {} of {PEERS} peers are lost", missing.len());
    // One that got nothing.
    let other = UdpSocket::bind((peer(false, PEERS), PEER_PORT)).unwrap();
    other.set_read_timeout(Some(patience())).unwrap();
    other.connect(own).unwrap();
    other.send(b"!").unwrap();
    assert_eq!(error_name(&other.recv(&mut [0; 4]).unwrap_err()), "ECONNREFUSED");
    let deny = |number| {
        let error = socket.send_to(b"?", (peer(true, number), PEER_PORT)).unwrap_err();
        assert_eq!(error_name(&error), "EPERM");
    };
    on_all_cpus(2 * DENIED_PEERS, |number| deny(DENIED_PEERS + number));
    on_all_cpus(DENIED_PEERS, deny);
    let denials = rows(&world.world.sandbox, "denials");
    let denied: BTreeSet<_> = denials.iter().filter_map(|row| row["peer"].as_str()?.parse::<IpAddr>().ok()).collect();
    let forgotten = (0..DENIED_PEERS).filter(|number| !denied.contains(&peer(true, *number))).count();
    assert_eq!(forgotten, 0, "of {DENIED_PEERS} denied peers");
    eprintln!("{} CPUs", thread::available_parallelism().unwrap());
}

/// Makes room for all replies at once.
fn set_receive_buffer(socket: &UdpSocket) {
    let bytes: libc::c_int = 16 << 20;
    let length = size_of_val(&bytes) as libc::socklen_t;
    let (level, option) = (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE);
    // SAFETY: the pointer and the length are those of a live integer.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const bytes).cast(), length) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

/// Kinds and protocols of sockets whose packets no hook sees: UDP-Lite, SCTP, and DCCP.
const HIDDEN: [(&str, libc::c_int, libc::c_int); 4] = [
    ("UDP-Lite", libc::SOCK_DGRAM, 136),
    ("SCTP, one to one", libc::SOCK_STREAM, 132),
    ("SCTP, one to many", libc::SOCK_SEQPACKET, 132),
    ("DCCP", libc::SOCK_DCCP, 33),
];

#[test]
fn a_protocol_that_no_hook_sees_gets_no_socket_while_the_pod_is_isolated() {
    let mut world = World::without_agent();
    let open = |kind, protocol| {
        let of = |family| Socket::of_protocol(family, kind, protocol).map(drop).map_err(|error| error_name(&error));
        [of(libc::AF_INET), of(libc::AF_INET6)]
    };
    let has = |&(_, kind, protocol): &(&str, _, _)| open(kind, protocol) == [Ok(()), Ok(())];
    let kinds: Vec<_> = HIDDEN.into_iter().filter(has).collect();
    let names: Vec<_> = kinds.iter().map(|(name, ..)| *name).collect();
    eprintln!("protocols of this kernel: {}", names.join("; "));
    assert!(!kinds.is_empty(), "this kernel has none of {HIDDEN:?}");
    world.start_agent(&["--policy", "enforce"]);
    let denied = || Err("EPERM".to_owned());
    for (name, kind, protocol) in &kinds {
        assert_eq!(open(*kind, *protocol), [denied(), denied()], "{name}");
    }
    assert_eq!(counter(&world.world.sandbox, "policy_denied_sockets"), 2 * kinds.len() as u64);
    world.world.update(objects(&[]));
    for (name, kind, protocol) in &kinds {
        eventually(SYNC, format_args!("{name} without a policy"), || {
            let [v4, v6] = open(*kind, *protocol);
            v4.and(v6)
        });
    }
}
