//! Datagram sockets that connect to Services without a backend, in a pod: behind the real kube-proxy on the pod's
//! node, and with cproxy in the pod. Every call must have the same outcome; permitted differences are in
//! [`Outcomes::cproxy`].

use std::{
    fs,
    io::{self, Write as _},
    net::{IpAddr, SocketAddr, UdpSocket},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    time::Duration,
};

use cproxy_tests::{
    control_plane::{ControlPlane, NODE},
    echo,
    kube_proxy::KubeProxy,
    manifest::{self, Endpoint, Service},
    process::{Agent, cproxy_binary, eventually},
    sandbox::{Netns, Sandbox},
    world::{Form, Host, PORT, TCP, UDP, cluster_ip, has_pods, pod, pod_name, rows, slices_with},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};

use crate::{
    cluster::{NODE_IPS, PATIENCE, add_node},
    frontends::{Frontend, Outcome},
    ruleset::Ruleset,
    walk,
};

/// The pod, and its node's addresses on the link between them.
const POD: Host = Host::new([10, 244, 255, 250], [0xfd00, 0x10, 0x244, 0, 0, 0, 0xff, 0x250]);
const LINK: Host = Host::new([10, 244, 255, 1], [0xfd00, 0x10, 0x244, 0, 0, 0, 0xff, 0x1]);

const EMPTY: u8 = 201;
const TCP_ONLY: u8 = 202;
const ELSEWHERE: u8 = 203;
const MOVES: u8 = 204;

/// A pod of `TCP_ONLY` and `ELSEWHERE`, on another node. Nothing is sent to it.
const OTHER_POD: u8 = 77;

/// Limit on the wait for a refusal, longer than any takes.
const REFUSAL_MAX: Duration = Duration::from_secs(5);
/// Time after which a datagram counts as dropped.
const SILENCE: Duration = Duration::from_millis(300);

#[derive(Clone, Copy)]
struct Destination {
    what: &'static str,
    service: u8,
    port: u16,
    /// kube-proxy drops datagrams to it, of which the client learns nothing.
    is_dropped: bool,
}

const fn refuses(what: &'static str, service: u8, port: u16) -> Destination {
    Destination { what, service, port, is_dropped: false }
}

const DESTINATIONS: [Destination; 7] = [
    refuses("no endpoints", EMPTY, PORT),
    refuses("port of TCP", TCP_ONLY, PORT),
    refuses("unknown port", TCP_ONLY, 81),
    // Connection tracking takes such a packet for invalid, so that no rule of kube-proxy sees it.
    Destination { what: "port 0", service: TCP_ONLY, port: 0, is_dropped: true },
    refuses("port 9", TCP_ONLY, 9),
    refuses("port 65535", TCP_ONLY, 65_535),
    Destination { what: "endpoints elsewhere", service: ELSEWHERE, port: PORT, is_dropped: true },
];

/// Outcomes of the calls on one socket.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Outcomes {
    connect: String,
    getsockname: String,
    getpeername: String,
    first_send: String,
    /// Of the call after a datagram.
    next_send: String,
    next_recv: String,
}

impl Outcomes {
    fn of(form: Form, to: SocketAddr, patience: Duration) -> Self {
        let socket = UdpSocket::bind(form.wildcard()).unwrap();
        socket.set_read_timeout(Some(patience)).unwrap();
        let connect = outcome(socket.connect(to), |()| "ok".to_owned());
        let getsockname = outcome(socket.local_addr(), |address| address.ip().to_string());
        let getpeername = outcome(socket.peer_addr(), |address| address.to_string());
        let send = || outcome(socket.send(b"?"), |_| "ok".to_owned());
        let first_send = send();
        wait_for_error(&socket, patience);
        let next_send = send();
        let _ = (send(), wait_for_error(&socket, patience));
        let next_recv = outcome(socket.recv(&mut [0; 8]), |_| "an answer".to_owned());
        Self { connect, getsockname, getpeername, first_send, next_send, next_recv }
    }

    /// Expected of cproxy: the same, but nobody has to wait for what is dropped.
    fn cproxy(&self, destination: Destination) -> Self {
        let refused = || "ECONNREFUSED".to_owned();
        match destination.is_dropped {
            false => self.clone(),
            // A socket of IPv6 sends nothing to port 0 of an IPv4-mapped address.
            true if self.first_send != "ok" => self.clone(),
            true => Self { next_send: refused(), next_recv: refused(), ..self.clone() },
        }
    }

    fn row(&self) -> String {
        let Self { connect, getsockname, getpeername, first_send, next_send, next_recv } = self;
        format!("{connect:<4} {getsockname:<26} {getpeername:<31} {first_send:<4} {next_send:<12} {next_recv}")
    }
}

fn outcome<T>(result: io::Result<T>, describe: impl FnOnce(T) -> String) -> String {
    match result {
        Ok(value) => describe(value),
        Err(error) => match error.raw_os_error() {
            Some(libc::EAGAIN) => "silence".to_owned(),
            Some(libc::EDESTADDRREQ) => "EDESTADDRREQ".to_owned(),
            Some(libc::ECONNREFUSED) => "ECONNREFUSED".to_owned(),
            Some(libc::ENOTCONN) => "ENOTCONN".to_owned(),
            _ => error.to_string(),
        },
    }
}

fn wait_for_error(socket: &UdpSocket, patience: Duration) {
    let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
    poll(&mut [PollFd::new(socket, PollFlags::empty())], Some(&timeout)).unwrap();
}

fn address(form: Form, destination: Destination) -> SocketAddr {
    form.address(cluster_ip(destination.service), destination.port)
}

/// The outcomes for each form of address and each destination, by the calling thread's network.
fn observe() -> Vec<Outcomes> {
    let cells = Form::ALL.into_iter().flat_map(|form| DESTINATIONS.map(|destination| (form, destination)));
    let observe = |(form, destination): (Form, Destination)| {
        let patience = if destination.is_dropped { SILENCE } else { REFUSAL_MAX };
        Outcomes::of(form, address(form, destination), patience)
    };
    cells.map(observe).collect()
}

/// Address that a Ray worker announces: an error other than ENETUNREACH means 127.0.0.1 (ray/_private/services.py,
/// `node_ip_address_from_perspective`).
fn ray(scheduler: SocketAddr) -> IpAddr {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let connected = socket.connect(scheduler).and_then(|()| socket.local_addr());
    connected.map_or(IpAddr::from([127, 0, 0, 1]), |address| address.ip())
}

/// Address that a Dask worker announces: that towards port 80 of the scheduler's host, whatever the scheduler's own
/// port (distributed/utils.py, `_get_ip`).
fn dask(scheduler: SocketAddr) -> IpAddr {
    ray(SocketAddr::new(scheduler.ip(), 80))
}

fn objects() -> Vec<Value> {
    let service = |name: &str, number| Service::new(name).cluster_ips(cluster_ip(number).addresses());
    let both = |service: Service| service.tcp("tcp", PORT, TCP).udp("udp", PORT, UDP);
    let elsewhere = both(service("elsewhere", ELSEWHERE)).spec("internalTrafficPolicy", json!("Local"));
    let services = [both(service("empty", EMPTY)), service("tcp-only", TCP_ONLY).tcp("tcp", PORT, TCP), elsewhere];
    let on_another_node = |_, address| Endpoint::ready(address).node("another");
    let slices = ["tcp-only", "elsewhere"].into_iter().flat_map(|name| {
        slices_with(name, |slice| slice.tcp("tcp", TCP).udp("udp", UDP), [OTHER_POD], on_another_node)
    });
    services.map(Value::from).into_iter().chain(slices).collect()
}

/// The pod's network namespace, behind the sandbox's as its node.
fn start_pod(sandbox: &Sandbox) -> Netns {
    let pod = sandbox.empty_neighbour();
    sandbox.ip(&format!(
        "link add node0 type veth peer name pod0 netns {}\nlink set node0 up\n\
         address add {}/32 dev node0\naddress add {}/128 dev node0 nodad\n\
         route add {} dev node0\nroute add {} dev node0\n",
        pod.path().display(),
        LINK.v4,
        LINK.v6,
        POD.v4,
        POD.v6,
    ));
    sandbox.ip_in(
        &pod,
        &format!(
            "link set lo up\nlink set pod0 up\n\
             address add {}/32 dev pod0\naddress add {}/128 dev pod0 nodad\n\
             route add {} dev pod0\nroute add {} dev pod0\n\
             route add default via {} dev pod0 src {}\nroute add default via {} dev pod0 src {}\n",
            POD.v4, POD.v6, LINK.v4, LINK.v6, LINK.v4, POD.v4, LINK.v6, POD.v6,
        ),
    );
    // Packets to a ClusterIP need a way, on which kube-proxy rejects them.
    sandbox.ip("link add up0 type veth peer name up1\nlink set up1 up\nlink set up0 up\n\
         route add default dev up0\nroute add default via fe80::1 dev up0\n");
    sandbox.netns().run(|| {
        // The node answers each datagram, not one a second.
        let settings = [
            ("ipv4/ip_forward", "1"),
            ("ipv6/conf/all/forwarding", "1"),
            ("ipv4/icmp_ratelimit", "0"),
            ("ipv6/icmp/ratelimit", "0"),
        ];
        for (name, value) in settings {
            fs::write(PathBuf::from("/proc/sys/net").join(name), value).unwrap();
        }
    });
    pod
}

/// A program that runs `cproxy` in the pod.
fn cproxy_in(sandbox: &Sandbox, pod: &Netns) -> PathBuf {
    let path = sandbox.dir().join("cproxy-in-pod");
    let binary = cproxy_binary();
    let script = format!("#!/bin/sh\nexec nsenter --net={} {} \"$@\"\n", pod.path().display(), binary.display());
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn wait_for_rules(kube_proxy: &mut KubeProxy<'_>) {
    let at = |number, protocol: &str| {
        cluster_ip(number).addresses().map(|ip| Frontend { protocol: protocol.to_owned(), address: (ip, PORT).into() })
    };
    let expected = [(EMPTY, "UDP", Outcome::Refuse), (ELSEWHERE, "UDP", Outcome::Drop)];
    Ruleset::wait(kube_proxy, |ruleset| {
        let has = |(number, protocol, wanted): &(u8, &str, Outcome)| {
            at(*number, protocol).iter().all(|frontend| walk::outcome(ruleset, frontend).as_ref() == Some(wanted))
        };
        let frontends = walk::frontends(ruleset);
        at(TCP_ONLY, "TCP").iter().all(|frontend| frontends.contains(frontend)) && expected.iter().all(has)
    });
}

/// The Service `moves` with this pod alone.
fn moving(number: u8) -> [Value; 3] {
    let service = Service::new("moves").cluster_ips(cluster_ip(MOVES).addresses()).udp("udp", PORT, UDP);
    let [v4, v6] = slices_with("moves", |slice| slice.udp("udp", UDP), [number], |_, address| Endpoint::ready(address));
    [service.into(), v4, v6]
}

/// Outcomes on a connected socket while the only endpoint of its Service is replaced: the answer to its first question,
/// the first outcome afterwards that is no silence, and the answer after another `connect()`.
fn meet_replacement(form: Form, replace: impl FnOnce()) -> [String; 3] {
    let socket = UdpSocket::bind(form.wildcard()).unwrap();
    let vip = form.address(cluster_ip(MOVES), PORT);
    socket.set_read_timeout(Some(SILENCE)).unwrap();
    socket.connect(vip).unwrap();
    let ask = || match echo::ask_peer(&socket) {
        Ok(name) => name,
        Err(error) => outcome(Err::<(), _>(error), |()| String::new()),
    };
    let before = ask();
    replace();
    let after = eventually(PATIENCE, "the socket meets something", || match ask() {
        silence if silence == "silence" || silence == before => Err(silence),
        other => Ok(other),
    });
    // Its closing is reported once more.
    socket.take_error().unwrap();
    socket.connect(vip).unwrap();
    // A late answer to a question of before may still be in its queue.
    let again = eventually(PATIENCE, "the socket meets the other pod", || match ask() {
        old if old == before => Err(old),
        other => Ok(other),
    });
    [before, after, again]
}

/// kube-proxy translates each packet, and forgets a flow when its endpoint goes. cproxy translates `connect()` alone.
#[test]
fn a_connected_socket_follows_its_service_behind_kube_proxy_and_is_closed_by_cproxy() {
    let sandbox = Sandbox::for_test();
    sandbox.add_addresses(NODE_IPS);
    sandbox.add_addresses([1, 2].into_iter().flat_map(|number| pod(number).addresses()));
    let servers = [1, 2].into_iter().flat_map(|number| pod(number).addresses().map(|address| (number, address)));
    let _servers: Vec<_> =
        servers.map(|(number, address)| echo::udp(&sandbox, (address, UDP), &pod_name(number))).collect();
    let mut control_plane = ControlPlane::shared(&sandbox);
    add_node(&control_plane);
    let pod_netns = start_pod(&sandbox);
    let mut kube_proxy = KubeProxy::spawn(&sandbox, &control_plane);
    let leads_to = |ruleset: &Ruleset, number: u8| {
        cluster_ip(MOVES).addresses().into_iter().zip(pod(number).addresses()).all(|(ip, backend)| {
            let frontend = Frontend { protocol: "UDP".to_owned(), address: (ip, PORT).into() };
            let backends = [SocketAddr::new(backend, UDP)].into();
            walk::frontends(ruleset).contains(&frontend)
                && walk::outcome(ruleset, &frontend) == Some(Outcome::Forward { backends, affinity: None })
        })
    };
    for form in Form::ALL {
        control_plane.apply(moving(1));
        Ruleset::wait(&mut kube_proxy, |ruleset| leads_to(ruleset, 1));
        let met = pod_netns.run(|| meet_replacement(form, || control_plane.apply(moving(2))));
        assert_eq!(met, ["pod-1", "pod-2", "pod-2"], "{form:?}, behind kube-proxy");
    }
    let write = |number| drop(manifest::write(&sandbox.manifest_dir(), "all.json", moving(number)));
    write(1);
    let _agent = Agent::new(&sandbox).binary(cproxy_in(&sandbox, &pod_netns)).manifests(sandbox.manifest_dir()).start();
    for form in Form::ALL {
        write(1);
        eventually(PATIENCE, "the table follows", || {
            let rows = rows(&sandbox, "services");
            let is_so = rows.len() == 2 && rows.iter().all(|row| has_pods(row, &[1]));
            if is_so { Ok(()) } else { Err(format!("{rows:?}")) }
        });
        let [before, closing, after] = pod_netns.run(|| meet_replacement(form, || write(2)));
        // The second, if it was waiting for an answer then.
        let is_closing = closing == "EDESTADDRREQ" || closing.contains("os error 103");
        assert!(before == "pod-1" && is_closing && after == "pod-2", "{form:?}, with cproxy: {closing}, {after}");
    }
    control_plane.discard();
}

#[test]
fn refused_datagram_sockets_are_as_behind_kube_proxy() {
    let sandbox = Sandbox::for_test();
    sandbox.add_addresses(NODE_IPS);
    let mut control_plane = ControlPlane::shared(&sandbox);
    add_node(&control_plane);
    control_plane.apply(objects());
    let pod = start_pod(&sandbox);
    let mut kube_proxy = KubeProxy::spawn(&sandbox, &control_plane);
    wait_for_rules(&mut kube_proxy);
    let scheduler = SocketAddr::new(cluster_ip(TCP_ONLY).v4.into(), PORT);
    let announced = || pod.run(|| [ray(scheduler), dask(scheduler)]);
    let (kube_proxys, announced_before) = (pod.run(observe), announced());

    manifest::write(&sandbox.manifest_dir(), "all.json", objects());
    let agent = Agent::new(&sandbox).binary(cproxy_in(&sandbox, &pod)).manifests(sandbox.manifest_dir());
    let _agent = agent.args(["--node-name", NODE]).start();
    let (own, announced_now) = (pod.run(observe), announced());

    let cells = Form::ALL.into_iter().flat_map(|form| DESTINATIONS.map(|destination| (form, destination)));
    let mut table = String::from("destination, connect, getsockname, getpeername, send, next send, next recv\n");
    let mut differ = Vec::new();
    for ((form, destination), (behind, with)) in cells.zip(kube_proxys.iter().zip(&own)) {
        let what = format!("{} {}", address(form, destination), destination.what);
        table += &format!("{what}\n  kube-proxy {}\n  cproxy     {}\n", behind.row(), with.row());
        if *with != behind.cproxy(destination) {
            differ.push(what);
        }
    }
    io::stderr().write_all(table.as_bytes()).unwrap();
    assert_eq!(announced_before, [IpAddr::from(POD.v4); 2], "behind kube-proxy");
    assert_eq!(announced_now, announced_before, "Ray and Dask");
    assert!(differ.is_empty(), "these differ: {differ:#?}\n{table}");
    control_plane.discard();
}
