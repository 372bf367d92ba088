//! The data path by real system calls: an agent on manifest files, real servers, real sockets in a hooked cgroup.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed call is a failed test")]

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsFd, OwnedFd},
    path::Path,
    process::Command,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use aya::maps::{Array, Map, MapData};
use cproxy_datapath::bpf::{PinDir, Program, SocketMark};
use cproxy_ebpf::{TCP_PLACES, TCP_WITHOUT_PLACE};
use cproxy_tests::{
    Done, Server, echo,
    manifest::{self, Endpoint, Service, Slice},
    process::{self, Agent, Daemon, RunningAgent, cproxy, eventually},
    sandbox::{Placement, Sandbox},
};
use rustix::{
    net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt},
    process::{Resource, Rlimit, getrlimit, setrlimit},
};
use serde_json::Value;

const VIP_V4: &str = "10.96.0.10";
const VIP_V6: &str = "fd00:10:96::a";
const NODES: u8 = 3;
const SYNC: Duration = Duration::from_secs(10);

/// A sandbox with three pods, each with a TCP and a UDP server in both families, and an agent on the manifests.
struct Live {
    agent: RunningAgent,
    servers: Vec<Server>,
    sandbox: Sandbox,
}

fn pod_v4(pod: u8) -> String {
    format!("10.244.0.{pod}")
}

fn pod_v6(pod: u8) -> String {
    format!("fd00:10:244::{pod}")
}

fn service() -> Service {
    Service::new("web").cluster_ips([VIP_V4, VIP_V6]).tcp("http", 80, 8080).udp("http-udp", 80, 8081)
}

fn slices(pods: impl IntoIterator<Item = u8> + Clone) -> [Value; 2] {
    let ports = |slice: Slice| slice.tcp("http", 8080).udp("http-udp", 8081);
    [
        ports(Slice::v4("web")).ready(pods.clone().into_iter().map(pod_v4)).into(),
        ports(Slice::v6("web")).ready(pods.into_iter().map(pod_v6)).into(),
    ]
}

fn objects(pods: impl IntoIterator<Item = u8> + Clone) -> Vec<Value> {
    std::iter::once(service().into()).chain(slices(pods)).collect()
}

impl Live {
    fn start() -> Self {
        Self::start_with(&[])
    }

    fn start_with(flags: &[&str]) -> Self {
        let sandbox = Sandbox::new("cproxy-test");
        let servers = serve_pods(&sandbox);
        manifest::write(&sandbox.manifest_dir(), "web.json", objects(1..=NODES));
        let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).args(flags).start();
        agent.wait_ready(SYNC);
        Self { agent, servers, sandbox }
    }

    /// Replaces the manifest and waits until the kernel's table has `count` backends behind each frontend.
    fn set_pods(&self, pods: impl IntoIterator<Item = u8> + Clone, count: usize) {
        manifest::write(&self.sandbox.manifest_dir(), "web.json", objects(pods));
        self.wait_backends(count);
    }

    fn wait_backends(&self, count: usize) {
        eventually(SYNC, "the table follows", || {
            let table = table(&self.sandbox);
            let all = table.values().all(|backends| backends.len() == count) && table.len() == 4;
            if all { Ok(()) } else { Err(format!("{table:?}")) }
        });
    }
}

fn serve_pods(sandbox: &Sandbox) -> Vec<Server> {
    let mut servers = Vec::new();
    for pod in 1..=NODES {
        sandbox.add_addresses([pod_v4(pod), pod_v6(pod)]);
        for address in [pod_v4(pod), pod_v6(pod)] {
            let at = |port: u16| SocketAddr::new(address.parse().unwrap(), port);
            servers.push(echo::tcp(sandbox, at(8080), &format!("pod-{pod}")));
            servers.push(echo::udp(sandbox, at(8081), &format!("pod-{pod}")));
        }
    }
    servers
}

/// The kernel's table: backends by "address:port/protocol".
fn table(sandbox: &Sandbox) -> BTreeMap<String, Vec<Value>> {
    let rows = cproxy(sandbox, &["get", "services", "-o", "json"]).json();
    let text = |row: &Value, field: &str| row[field].as_str().unwrap_or_default().to_owned();
    rows.as_array()
        .unwrap()
        .iter()
        .map(|row| {
            let key = format!("{}:{}/{}", text(row, "address"), row["port"], text(row, "protocol"));
            (key, row["backends"].as_array().unwrap().clone())
        })
        .collect()
}

/// The VIP in the three forms that applications use.
fn vips(port: u16) -> [(&'static str, SocketAddr); 3] {
    let mapped = VIP_V4.parse::<std::net::Ipv4Addr>().unwrap().to_ipv6_mapped();
    [
        ("v4", SocketAddr::new(VIP_V4.parse().unwrap(), port)),
        ("v6", SocketAddr::new(VIP_V6.parse().unwrap(), port)),
        ("v4-mapped", SocketAddr::new(IpAddr::V6(mapped), port)),
    ]
}

fn ask_connected_udp(vip: SocketAddr) -> io::Result<String> {
    let local: SocketAddr = if vip.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse().unwrap();
    let socket = UdpSocket::bind(local)?;
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    socket.connect(vip)?;
    socket.send(b"who")?;
    let mut buffer = [0; 64];
    let length = socket.recv(&mut buffer)?;
    Ok(String::from_utf8_lossy(buffer.get(..length).unwrap()).into_owned())
}

fn ask_tcp(vip: SocketAddr) -> io::Result<String> {
    echo::ask_tcp(vip).map(|greeting| greeting.name)
}

/// Asks until every pod has answered; each answer must be from a pod.
fn all_pods_answer(what: &str, mut ask: impl FnMut() -> io::Result<String>) {
    let expected: BTreeSet<_> = (1..=NODES).map(|pod| format!("pod-{pod}")).collect();
    let mut seen = BTreeSet::new();
    // 200 draws from three miss one of them with probability 3 * (2/3)^200, less than 1e-34.
    for _ in 0..200 {
        let name = ask().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(expected.contains(&name), "{what}: {name}");
        seen.insert(name);
    }
    assert_eq!(seen, expected, "{what}");
}

fn refused<T>(result: io::Result<T>) -> bool {
    matches!(result.map_err(|error| error.raw_os_error()), Err(Some(code)) if code == rustix::io::Errno::CONNREFUSED.raw_os_error())
}

#[test]
fn connects_of_every_form_reach_every_pod() {
    let live = Live::start();
    for (form, vip) in vips(80) {
        all_pods_answer(&format!("TCP {form}"), || ask_tcp(vip));
        all_pods_answer(&format!("connected UDP {form}"), || ask_connected_udp(vip));
    }
    let served: u64 = live.servers.iter().map(Server::served).sum();
    assert_eq!(served, 6 * 200, "every answer came from one of our servers");
}

#[test]
fn a_frontend_without_backends_refuses_at_once() {
    let live = Live::start();
    live.set_pods([], 0);
    for (form, vip) in vips(80) {
        assert!(refused(TcpStream::connect(vip)), "TCP {form}");
        assert!(refused(ask_connected_udp(vip)), "UDP {form}");
    }
    live.set_pods([2], 1);
    for (form, vip) in vips(80) {
        assert_eq!(ask_tcp(vip).unwrap(), "pod-2", "TCP {form}");
        assert_eq!(ask_connected_udp(vip).unwrap(), "pod-2", "UDP {form}");
    }
}

#[test]
fn a_non_blocking_connect_is_translated_and_refused_like_any_other() {
    let live = Live::start();
    let connect = |vip: SocketAddr| {
        let family = if vip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
        (rustix::net::connect(&socket, &vip), socket)
    };
    for (form, vip) in vips(80) {
        let (result, socket) = connect(vip);
        assert!(matches!(result, Ok(()) | Err(rustix::io::Errno::INPROGRESS)), "{form}: {result:?}");
        eventually(SYNC, "the connection stands", || match sockopt::socket_error(&socket).unwrap() {
            Ok(()) => rustix::net::getpeername(&socket).map(drop).map_err(|error| error.to_string()),
            Err(error) => panic!("{form}: {error}"),
        });
    }
    live.set_pods([], 0);
    for (form, vip) in vips(80) {
        assert_eq!(connect(vip).0, Err(rustix::io::Errno::CONNREFUSED), "{form}");
    }
}

#[test]
fn what_is_no_service_is_left_alone() {
    let _live = Live::start();
    for pod in 1..=NODES {
        for address in [pod_v4(pod), pod_v6(pod)] {
            let address = SocketAddr::new(address.parse().unwrap(), 8080);
            assert_eq!(ask_tcp(address).unwrap(), format!("pod-{pod}"));
        }
    }
}

/// Even where somebody listens on the VIP itself.
#[test]
fn a_port_that_no_service_has_is_refused_on_a_cluster_ip() {
    let live = Live::start();
    live.sandbox.add_addresses([VIP_V4, VIP_V6]);
    let at = |address: &str| SocketAddr::new(address.parse().unwrap(), 81);
    let _servers = [VIP_V4, VIP_V6].map(|address| echo::tcp(&live.sandbox, at(address), "the VIP itself"));
    for (form, vip) in vips(81) {
        assert!(refused(ask_tcp(vip)), "{form}");
        assert!(refused(ask_connected_udp(vip)), "{form}");
    }
    // A resolver that asks for a route to an address connects a UDP socket to a port that nobody has (RFC 6724).
    for (form, vip) in [0, 9, 65_535].into_iter().flat_map(vips) {
        let local: SocketAddr = if vip.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse().unwrap();
        UdpSocket::bind(local).unwrap().connect(vip).unwrap_or_else(|error| panic!("{form}: {error}"));
    }
}

#[test]
fn sockets_outside_the_cgroup_are_left_alone() {
    let live = Live::start();
    live.sandbox.add_address(VIP_V4);
    let _server = echo::tcp(&live.sandbox, SocketAddr::new(VIP_V4.parse().unwrap(), 80), "the VIP itself");
    let ask = |placement| {
        let mut curl = Command::new("curl");
        // The server greets and then waits: it is curl that has to end.
        curl.args(["--http0.9", "--silent", "--max-time", "1", &format!("http://{VIP_V4}/")]);
        process::run(&live.sandbox, placement, curl, "", SYNC).stdout
    };
    assert!(ask(Placement::Unhooked).starts_with("the VIP itself"));
    assert!(ask(Placement::Hooked).starts_with("pod-"));
}

#[test]
fn a_marked_socket_is_not_translated() {
    let live = Live::start();
    live.sandbox.add_addresses([VIP_V4, VIP_V6]);
    let _servers = [VIP_V4, VIP_V6]
        .map(|vip| echo::tcp(&live.sandbox, SocketAddr::new(vip.parse().unwrap(), 80), "the VIP itself"));
    let mark = SocketMark::new(&PinDir::new(&live.sandbox.pin_dir()));
    for (form, vip) in vips(80) {
        let family = if vip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = rustix::net::socket(family, SocketType::STREAM, None).unwrap();
        mark.mark(&socket).unwrap();
        rustix::net::connect(&socket, &vip).unwrap();
        assert_eq!(first_line(socket), "the VIP itself", "{form}");
        assert!(ask_tcp(vip).unwrap().starts_with("pod-"), "{form}: others are");
    }
    // Not refused either.
    live.set_pods([], 0);
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    mark.mark(&socket).unwrap();
    rustix::net::connect(&socket, &vips(80)[0].1).unwrap();
}

/// The cookies of those who have places now, and whether anybody was ever without one.
fn tcp_owners(sandbox: &Sandbox) -> (Vec<u64>, bool) {
    let owners = MapData::from_pin(PinDir::new(&sandbox.pin_dir()).object("TCP_OWNERS")).unwrap();
    let owners = Array::<_, u64>::try_from(Map::Array(owners)).unwrap();
    let mut all: Vec<_> = owners.iter().map(Result::unwrap).collect();
    let without_place = all.remove(TCP_WITHOUT_PLACE as usize);
    all.retain(|&owner| owner != 0);
    (all, without_place != 0)
}

#[test]
fn more_connections_than_places_are_all_remembered_until_they_are_closed() {
    const MANY: usize = TCP_PLACES as usize * 5 / 4;
    setrlimit(Resource::Nofile, Rlimit { current: Some(3 * MANY as u64), ..getrlimit(Resource::Nofile) }).unwrap();
    let sandbox = Sandbox::new("cproxy-test");
    sandbox.add_addresses([pod_v4(1), pod_v6(1)]);
    manifest::write(&sandbox.manifest_dir(), "web.json", objects([1]));
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).start();
    agent.wait_ready(SYNC);
    let forms = vips(80);
    let listeners = [pod_v4(1), pod_v6(1)].map(|pod| TcpListener::bind((&*pod, 8080)).unwrap());
    let connect = |number: usize| {
        let (form, vip) = forms[number % forms.len()];
        let socket = TcpStream::connect(vip).unwrap();
        let listener = &listeners[usize::from(form == "v6")];
        (vip, socket, listener.accept().unwrap())
    };
    let shows_vip = |(vip, socket, _): &(SocketAddr, TcpStream, _)| socket.peer_addr().unwrap() == *vip;

    let counter = |name: &str| cproxy(&sandbox, &["get", "counters", "-o", "json"]).success().json()[name].clone();

    let few: Vec<_> = (0..40).map(connect).collect();
    assert!(few.iter().all(shows_vip));
    let (owners, without_place) = tcp_owners(&sandbox);
    let cookies: BTreeSet<_> = few.iter().map(|(_, socket, _)| sockopt::socket_cookie(socket).unwrap()).collect();
    assert_eq!((owners.into_iter().collect(), without_place), (cookies, false));
    assert_eq!((counter("tcp_places"), counter("tcp_places_max")), (few.len().into(), TCP_PLACES.into()));

    let many: Vec<_> = (0..MANY).map(connect).collect();
    assert!(few.iter().chain(&many).all(shows_vip));
    let (owners, without_place) = tcp_owners(&sandbox);
    // The other ends are told who connects, which takes every other cookie.
    let taken = owners.len();
    assert!(without_place && (TCP_PLACES as usize / 2..=TCP_PLACES as usize).contains(&taken), "{taken} places");
    let listed = cproxy(&sandbox, &["get", "sockets", "-o", "json"]).success().json();
    assert_eq!(listed.as_array().unwrap().len(), few.len() + MANY);

    // Those without a place leave nobody else's free.
    drop(many);
    assert!(few.iter().all(shows_vip));
    assert_eq!(tcp_owners(&sandbox).0.len(), few.len());
    // A descriptor's copy is the same socket.
    let copies: Vec<_> = few.iter().map(|(vip, socket, _)| (*vip, socket.try_clone().unwrap(), ())).collect();
    drop(few);
    assert!(copies.iter().all(|(vip, socket, ())| socket.peer_addr().unwrap() == *vip));
    drop(copies);
    assert!(tcp_owners(&sandbox).0.is_empty());
}

/// Sockets of a cgroup that the programs have left are released without them.
#[test]
fn sockets_of_another_cgroup_keep_no_place() {
    let mut live = Live::start();
    let sockets: Vec<_> = vips(80).iter().map(|(_, vip)| (*vip, TcpStream::connect(vip).unwrap())).collect();
    assert_eq!(tcp_owners(&live.sandbox).0.len(), sockets.len());
    let start_on = |cgroup: &Path| {
        let agent = Agent::new(&live.sandbox).cgroup(cgroup).manifests(live.sandbox.manifest_dir());
        let mut agent = agent.placement(Placement::Unhooked).start();
        agent.wait_ready(SYNC);
        agent
    };
    live.agent.kill();
    let mut agent = start_on(live.sandbox.cgroup_beside());
    assert_eq!(tcp_owners(&live.sandbox).0, [] as [u64; 0]);
    agent.kill();
    // Restarted where it was, it forgets nothing.
    start_on(live.sandbox.cgroup()).kill();
    assert!(sockets.iter().all(|(vip, socket)| socket.peer_addr().unwrap() != *vip), "their names are lost");
    let socket = TcpStream::connect(vips(80)[0].1).unwrap();
    start_on(live.sandbox.cgroup()).kill();
    assert_eq!((tcp_owners(&live.sandbox).0.len(), socket.peer_addr().unwrap()), (1, vips(80)[0].1));
}

fn first_line(socket: OwnedFd) -> String {
    let mut line = String::new();
    io::BufRead::read_line(&mut io::BufReader::new(TcpStream::from(socket)), &mut line).unwrap();
    line.trim_end().to_owned()
}

#[test]
fn mptcp_is_tcp() {
    let live = Live::start();
    const MPTCP: rustix::net::Protocol =
        rustix::net::Protocol::from_raw(std::num::NonZeroU32::new(262).expect("not zero"));
    for (form, vip) in vips(80) {
        let family = if vip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = rustix::net::socket(family, SocketType::STREAM, Some(MPTCP)).unwrap();
        rustix::net::connect(&socket, &vip).unwrap();
        assert!(first_line(socket).starts_with("pod-"), "{form}");
    }
    live.set_pods([], 0);
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, Some(MPTCP)).unwrap();
    assert_eq!(rustix::net::connect(&socket, &vips(80)[0].1), Err(rustix::io::Errno::CONNREFUSED));
}

#[test]
fn other_socket_types_are_left_alone() {
    let live = Live::start();
    live.sandbox.add_address(VIP_V4);
    let icmp = rustix::net::socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::ICMP)).unwrap();
    rustix::net::connect(&icmp, &vips(80)[0].1).unwrap();
    let peer: SocketAddr = rustix::net::getpeername(icmp.as_fd()).unwrap().unwrap().try_into().unwrap();
    assert_eq!(peer.ip().to_string(), VIP_V4);
}

#[test]
fn one_port_number_serves_two_protocols_and_names_match_by_name() {
    let sandbox = Sandbox::new("cproxy-test");
    let _servers = serve_pods(&sandbox);
    let dns = Service::new("dns").cluster_ips([VIP_V4]).tcp("dns-tcp", 53, 0).udp("dns", 53, 0);
    let tcp_slice = Slice::v4("dns").name("dns-1").tcp("dns-tcp", 8080).ready([pod_v4(1)]);
    // Numbers do not matter, and one Service's slices may map a name to different ones.
    let udp_slice = Slice::v4("dns").name("dns-2").udp("dns", 8081).tcp("dns", 8080).ready([pod_v4(2)]);
    manifest::write(&sandbox.manifest_dir(), "dns.json", [dns.into(), tcp_slice.into(), udp_slice.into()]);
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).start();
    agent.wait_ready(SYNC);
    for _ in 0..20 {
        assert_eq!(ask_tcp(vips(53)[0].1).unwrap(), "pod-1");
        assert_eq!(ask_connected_udp(vips(53)[0].1).unwrap(), "pod-2");
    }
}

#[test]
fn readiness_and_termination_decide_who_gets_connections() {
    let live = Live::start();
    let put = |endpoints: [Endpoint; 3]| {
        let slice = endpoints.into_iter().fold(Slice::v4("web").tcp("http", 8080), Slice::endpoint);
        manifest::write(&live.sandbox.manifest_dir(), "web.json", [service().into(), slice.into()]);
    };
    let serving_are = |pods: &[u8]| {
        let expected: Vec<_> = pods.iter().map(|&pod| Value::from(pod_v4(pod))).collect();
        eventually(SYNC, "the table follows", || {
            let table = table(&live.sandbox);
            let backends = &table[&format!("{VIP_V4}:80/TCP")];
            let now: Vec<_> = backends.iter().map(|backend| backend["address"].clone()).collect();
            if now == expected { Ok(()) } else { Err(format!("{now:?} instead of {expected:?}")) }
        });
    };
    put([Endpoint::ready(pod_v4(1)), Endpoint::not_ready(pod_v4(2)), Endpoint::terminating(pod_v4(3), true)]);
    serving_are(&[1]);
    // Nobody is ready: those that still serve while they end.
    put([
        Endpoint::not_ready(pod_v4(1)),
        Endpoint::terminating(pod_v4(2), false),
        Endpoint::terminating(pod_v4(3), true),
    ]);
    serving_are(&[3]);
    assert_eq!(ask_tcp(vips(80)[0].1).unwrap(), "pod-3");
    put([Endpoint::not_ready(pod_v4(1)), Endpoint::not_ready(pod_v4(2)), Endpoint::terminating(pod_v4(3), false)]);
    serving_are(&[]);
    assert!(refused(TcpStream::connect(vips(80)[0].1)));
}

#[test]
fn the_hooks_outlive_the_agent_and_a_new_agent_takes_over() {
    let mut live = Live::start();
    let established = echo::connect_tcp(vips(80)[0].1).unwrap().1;
    live.agent.kill();
    all_pods_answer("after SIGKILL", || ask_tcp(vips(80)[0].1));
    assert_eq!(table(&live.sandbox).len(), 4, "get works with the agent dead");
    // Changed while nobody was looking.
    manifest::write(&live.sandbox.manifest_dir(), "web.json", objects([2]));
    let mut agent = Agent::new(&live.sandbox).manifests(live.sandbox.manifest_dir()).start();
    agent.wait_ready(SYNC);
    live.wait_backends(1);
    assert_eq!(ask_tcp(vips(80)[1].1).unwrap(), "pod-2");
    assert!(agent.stop().success(), "SIGTERM is a clean end");
    assert!(!agent.is_ready(), "nobody follows any more");
    assert_eq!(ask_tcp(vips(80)[2].1).unwrap(), "pod-2", "the hooks stay");
    echo::ping_tcp(&established, "still there").unwrap();
}

#[test]
fn cleanup_removes_what_is_ours_and_nothing_else() {
    let mut live = Live::start();
    let foreign = PinDir::new(&live.sandbox.pin_dir()).object("somebody_elses");
    let mut map = Array::<MapData, u32>::create(1, 0).unwrap();
    map.set(0, 1, 0).unwrap();
    map.pin(&foreign).unwrap();
    let while_running = cproxy(&live.sandbox, &["cleanup"]);
    assert_eq!(while_running.code, 1);
    assert!(while_running.stderr.contains("in use by a running cproxy"), "{}", while_running.stderr);
    live.agent.stop();
    let cleanup = cproxy(&live.sandbox, &["cleanup"]).success();
    assert!(cleanup.stderr.contains("somebody_elses"), "{}", cleanup.stderr);
    assert!(foreign.exists());
    live.sandbox.add_address(VIP_V4);
    assert!(refused(TcpStream::connect(vips(80)[0].1)), "nobody listens on the VIP itself");
    std::fs::remove_file(&foreign).unwrap();
    cproxy(&live.sandbox, &["cleanup"]).success();
    assert!(!live.sandbox.pin_dir().exists());
    cproxy(&live.sandbox, &["cleanup"]).success();
}

/// Where installing was broken off between making a link and putting it in its place.
#[test]
fn cleanup_removes_a_link_that_never_came_into_its_place() {
    let mut live = Live::start();
    live.agent.stop();
    let pins = PinDir::new(&live.sandbox.pin_dir()).versioned();
    std::fs::rename(pins.join("connect4"), pins.join("connect4_new")).unwrap();
    let cleanup = cproxy(&live.sandbox, &["cleanup"]).success();
    assert_eq!(cleanup.stderr, "");
    assert!(!live.sandbox.pin_dir().exists());
    live.sandbox.add_address(VIP_V4);
    assert!(refused(TcpStream::connect(vips(80)[0].1)), "nobody listens on the VIP itself");
}

/// Where installing was broken off, or somebody has removed it.
#[test]
fn a_map_without_its_pin_is_made_anew() {
    let mut live = Live::start();
    live.agent.kill();
    let pins = PinDir::new(&live.sandbox.pin_dir()).versioned();
    for name in ["FRONTENDS", "SETS", "BACKENDS"] {
        let lost = [0, 1].map(|number| std::fs::remove_file(pins.join(format!("{name}_{number}"))));
        assert!(lost.iter().any(Result::is_ok), "{name} has a pin");
    }
    let mut agent = Agent::new(&live.sandbox).manifests(live.sandbox.manifest_dir()).start();
    agent.wait_ready(SYNC);
    all_pods_answer("after the pins were lost", || ask_tcp(vips(80)[0].1));
    assert_eq!(table(&live.sandbox).len(), 4);
}

#[test]
fn cleanup_of_a_directory_that_cannot_be_ours_touches_nothing() {
    let sandbox = Sandbox::new("cproxy-test");
    let file = sandbox.dir().join("app/v1/report.csv");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(&file, "data").unwrap();
    let cleanup = cproxy(&sandbox, &["cleanup", "--pin-dir", &sandbox.dir().join("app").display().to_string()]);
    assert_eq!(cleanup.code, 1);
    assert!(cleanup.stderr.contains("not on a bpf filesystem"), "{}", cleanup.stderr);
    assert!(file.exists());
}

#[test]
fn no_connect_fails_or_goes_astray_while_everything_changes() {
    // Pods that leave the Service go on answering, and so may their sockets.
    let keep = ["--terminate-sockets", "none"];
    let mut live = Live::start_with(&keep);
    let (stop, connects) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for (form, vip) in vips(80) {
            for ask in [ask_tcp, ask_connected_udp] {
                let (stop, connects, sandbox) = (&stop, &connects, &live.sandbox);
                let netns = sandbox.netns().clone();
                scope.spawn(move || {
                    netns.enter().unwrap();
                    while !stop.load(Ordering::Relaxed) {
                        let name = ask(vip).unwrap_or_else(|error| panic!("{form}: {error}"));
                        assert!(name.starts_with("pod-"), "{form}: {name}");
                        connects.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        }
        let _done = Done(&stop);
        for round in 0..20u8 {
            live.set_pods([1 + round % NODES], 1);
            live.set_pods(1..=NODES, NODES.into());
            if round % 5 == 4 {
                live.agent.kill();
                live.agent = Agent::new(&live.sandbox).manifests(live.sandbox.manifest_dir()).args(keep).start();
                live.agent.wait_ready(SYNC);
            }
        }
    });
    assert!(connects.into_inner() > 1_000);
}

#[test]
fn the_choice_is_even() {
    let live = Live::start();
    let mut hits = BTreeMap::<String, f64>::new();
    const CONNECTS: f64 = 3_000.0;
    for _ in 0..CONNECTS as u32 {
        *hits.entry(ask_connected_udp(vips(80)[0].1).unwrap()).or_default() += 1.0;
    }
    let expected = CONNECTS / f64::from(NODES);
    let chi_square: f64 = hits.values().map(|count| (count - expected).powi(2) / expected).sum();
    // Two degrees of freedom: an even choice exceeds 27.6 once in a million runs.
    assert!(hits.len() == usize::from(NODES) && chi_square < 27.6, "{hits:?}: {chi_square}");
    drop(live);
}

fn unreachable_kubeconfig(server: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{name: c, cluster: {{server: '{server}'}}}}]\n\
         contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\nusers: [{{name: u, user: {{token: t}}}}]\n"
    )
}

#[test]
fn bootstrap_is_served_until_the_first_complete_sync() {
    let sandbox = Sandbox::new("cproxy-test");
    let _servers = serve_pods(&sandbox);
    let bootstrap = manifest::write(sandbox.dir(), "bootstrap.json", objects([3]));
    // An API server that nobody runs.
    let text = unreachable_kubeconfig("https://127.0.0.1:1");
    let kubeconfig = manifest::write_text(sandbox.dir(), "kubeconfig", &text);
    let mut agent = Agent::new(&sandbox).kubeconfig(&kubeconfig).arg("--bootstrap").arg(&bootstrap).start();
    agent.wait_log("cannot watch services at https://127.0.0.1:1", SYNC);
    agent.wait_log("of --bootstrap until the first complete sync", SYNC);
    assert!(!agent.is_ready());
    assert_eq!(ask_tcp(vips(80)[0].1).unwrap(), "pod-3");
    agent.stop();
    // What is in the kernel from before is newer than the bootstrap.
    manifest::write(&sandbox.manifest_dir(), "web.json", objects([1]));
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).start();
    agent.wait_ready(SYNC);
    agent.stop();
    let mut agent = Agent::new(&sandbox).kubeconfig(&kubeconfig).arg("--bootstrap").arg(&bootstrap).start();
    agent.wait_log("cannot watch services", SYNC);
    assert_eq!(ask_tcp(vips(80)[0].1).unwrap(), "pod-1");
    agent.stop();
    // Gone with the first complete sync.
    std::fs::remove_file(sandbox.manifest_dir().join("web.json")).unwrap();
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).arg("--bootstrap").arg(&bootstrap).start();
    agent.wait_ready(SYNC);
    assert_eq!(table(&sandbox), BTreeMap::new());
}

/// The nameserver in resolv.conf is a ClusterIP whose Service is down, and the same address on this host, where a real
/// nameserver listens: only sockets that are not translated get an answer.
#[test]
fn the_agent_resolves_names_over_untranslated_sockets() {
    const NAMESERVER: &str = "10.96.0.53";
    let sandbox = Sandbox::new("cproxy-test");
    sandbox.add_address(NAMESERVER);
    let mut dnsmasq = Command::new("dnsmasq");
    dnsmasq.args(["--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--bind-interfaces"]);
    dnsmasq.args(["--listen-address", NAMESERVER, "--address=/api.example.test/127.0.0.77", "--pid-file="]);
    // Its answers go to the VIP, which is an address of this namespace, and a port that the Service does not have.
    let _dnsmasq = Daemon::spawn(&sandbox, "dnsmasq", Placement::Unhooked, dnsmasq);
    let dns = Service::new("dns").cluster_ips([NAMESERVER]).udp("dns", 53, 53).tcp("dns-tcp", 53, 53);
    manifest::write(&sandbox.manifest_dir(), "dns.json", [dns.into()]);
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).start();
    agent.wait_ready(SYNC);
    agent.stop();
    assert!(refused(ask_connected_udp(SocketAddr::new(NAMESERVER.parse().unwrap(), 53))), "its Service is down");

    let resolv_conf =
        manifest::write_text(sandbox.dir(), "resolv.conf", "nameserver 10.96.0.53\nsearch example.test\n");
    let kubeconfig = manifest::write_text(sandbox.dir(), "kubeconfig", &unreachable_kubeconfig("https://api:1"));
    let mut script = Command::new("unshare");
    script.args(["--mount", "sh", "-euc"]);
    script.arg("mount --bind $resolv_conf /etc/resolv.conf; exec $cproxy run --kubeconfig $kubeconfig");
    script.env("resolv_conf", resolv_conf).env("kubeconfig", kubeconfig).env("cproxy", process::cproxy_binary());
    script.env("CPROXY_CGROUP", sandbox.cgroup()).env("CPROXY_PIN_DIR", sandbox.pin_dir());
    script.env("CPROXY_RUN_DIR", sandbox.run_dir());
    let mut agent = Daemon::spawn(&sandbox, "cproxy", Placement::Hooked, script);
    // The name is found by way of the search list; nobody listens at the address.
    agent.wait_log("127.0.0.77:1: Connection refused", SYNC);
}

#[test]
fn every_program_stays_within_its_instruction_budget() {
    const BUDGET: u32 = 2_000;
    let live = Live::start();
    let log = live.agent.log();
    let counts: Vec<u32> =
        log.split(" instructions verified").filter_map(|text| text.rsplit_once('(')?.1.parse().ok()).collect();
    assert_eq!(counts.len(), Program::ALL.len(), "one for each program: {log}");
    assert!(counts.iter().all(|&count| count > 0 && count <= BUDGET), "{counts:?}");
}
