//! `cproxy get backends` and `cproxy get sockets`: what they say of real tables and of real sockets of every form, and that
//! they change nothing. The tests of settings have `get services` and `get counters`.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed call or a missing name is a failed test")]

use std::{
    fmt::Display,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use cproxy_tests::{
    Server, echo,
    manifest::{self, Endpoint, Service, Slice},
    process::{Agent, Output, RunningAgent, cproxy, cproxy_binary, eventually, run},
    sandbox::{Placement, Sandbox},
    seccomp::{forbid_netlink, forbid_writes_to_maps},
};
use rustix::{fs::Uid, net::sockopt};
use serde_json::{Value, json};

const VIP_V4: &str = "10.96.0.10";
const VIP_V6: &str = "fd00:10:96::a";
const SYNC: Duration = Duration::from_secs(10);

/// TCP and UDP behind port 80 of the VIPs.
const TCP: u16 = 8080;
const UDP: u16 = 8081;

/// The three forms that applications use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    V4,
    V6,
    Mapped,
}

const FORMS: [Form; 3] = [Form::V4, Form::V6, Form::Mapped];

impl Form {
    fn of<T>(self, v4: T, v6: T) -> T {
        if self == Self::V6 { v6 } else { v4 }
    }

    fn vip(self) -> SocketAddr {
        let address: IpAddr = match self {
            Self::Mapped => VIP_V4.parse::<Ipv4Addr>().unwrap().to_ipv6_mapped().into(),
            _ => self.of(VIP_V4, VIP_V6).parse().unwrap(),
        };
        SocketAddr::new(address, 80)
    }

    /// A row as `get sockets -o json` should have it.
    fn row(self, protocol: &str, local: SocketAddr, pod: u8, state: &str) -> Value {
        let port = if protocol == "TCP" { TCP } else { UDP };
        json!({
            "service": "default/web", "port_name": if protocol == "TCP" { "http" } else { "dns" }, "source": "ClusterIP",
            "protocol": protocol, "address": self.of(VIP_V4, VIP_V6), "port": 80,
            "backend": {"address": self.of(pod_v4(pod), pod_v6(pod)), "port": port}, "state": state,
            "local": {"address": local.ip().to_canonical().to_string(), "port": local.port()},
            "netns": netns(), "uid": 0, "pid": std::process::id(), "command": command(),
        })
    }
}

fn pod_v4(pod: u8) -> String {
    format!("10.244.0.{pod}")
}

fn pod_v6(pod: u8) -> String {
    format!("fd00:10:244::{pod}")
}

/// The inode number of the calling thread's network namespace.
fn netns() -> u64 {
    fs::metadata("/proc/thread-self/ns/net").unwrap().ino()
}

/// What this process calls itself.
fn command() -> String {
    fs::read_to_string("/proc/self/comm").unwrap().trim_end().to_owned()
}

/// A sandbox with two pods, of which one is behind a Service, and an agent on the manifests that closes no socket.
struct World {
    agent: RunningAgent,
    _servers: Vec<Server>,
    sandbox: Sandbox,
}

impl World {
    fn start() -> Self {
        let sandbox = Sandbox::new("cproxy-test");
        sandbox.add_addresses((1..=2).flat_map(|pod| [pod_v4(pod), pod_v6(pod)]));
        let servers =
            [pod_v4(1), pod_v6(1)].map(|pod| echo::tcp(&sandbox, (pod.parse::<IpAddr>().unwrap(), TCP), "pod"));
        write(&sandbox, 1);
        let mut agent =
            Agent::new(&sandbox).manifests(sandbox.manifest_dir()).args(["--terminate-sockets", "none"]).start();
        agent.wait_ready(SYNC);
        Self { agent, _servers: servers.into(), sandbox }
    }

    fn get(&self, what: &str) -> Vec<Value> {
        get(&self.sandbox, what)
    }

    /// Another pod is behind the Service.
    fn replace_pod(&self) {
        write(&self.sandbox, 2);
        self.wait_for_backends(|rows| rows.len() == 4 && rows.iter().all(|row| is_pod(row, 2)));
    }

    fn wait_for_backends(&self, is_so: impl Fn(&[Value]) -> bool) {
        eventually(SYNC, "the table follows", || {
            let rows = self.get("backends");
            if is_so(&rows) { Ok(()) } else { Err(format!("{rows:?}")) }
        });
    }
}

fn get(sandbox: &Sandbox, what: &str) -> Vec<Value> {
    cproxy(sandbox, &["get", what, "-o", "json"]).json().as_array().unwrap().clone()
}

fn is_pod(row: &Value, pod: u8) -> bool {
    row["address"] == pod_v4(pod).as_str() || row["address"] == pod_v6(pod).as_str()
}

fn write(sandbox: &Sandbox, pod: u8) {
    let service = Service::new("web").cluster_ips([VIP_V4, VIP_V6]).tcp("http", 80, TCP).udp("dns", 80, UDP);
    let slice = |slice: Slice, address: String| Value::from(slice.tcp("http", TCP).udp("dns", UDP).ready([address]));
    let slices = [slice(Slice::v4("web"), pod_v4(pod)), slice(Slice::v6("web"), pod_v6(pod))];
    manifest::write(&sandbox.manifest_dir(), "web.json", [Value::from(service)].into_iter().chain(slices));
}

/// A UDP socket that is connected to an address.
fn udp(to: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
    socket.connect(to).unwrap();
    socket
}

/// Sockets of all forms that are connected to the VIPs.
struct Clients {
    tcp: [TcpStream; 3],
    udp: [UdpSocket; 3],
}

impl Clients {
    fn connect() -> Self {
        Self { tcp: FORMS.map(|form| echo::connect_tcp(form.vip()).unwrap().1), udp: FORMS.map(|form| udp(form.vip())) }
    }

    fn rows(&self, of_udp: &str, of_tcp: &str) -> Vec<Value> {
        let tcp = FORMS.iter().zip(&self.tcp).map(|(form, tcp)| form.row("TCP", tcp.local_addr().unwrap(), 1, of_tcp));
        let udp = FORMS.iter().zip(&self.udp).map(|(form, udp)| form.row("UDP", udp.local_addr().unwrap(), 1, of_udp));
        tcp.chain(udp).collect()
    }

    fn assert_untouched(&self) {
        self.tcp.iter().for_each(|tcp| echo::ping_tcp(tcp, "still there").unwrap());
        for udp in &self.udp {
            assert_eq!(sockopt::socket_error(udp).unwrap(), Ok(()));
            udp.peer_addr().unwrap();
        }
    }
}

#[track_caller]
fn assert_same(rows: &[Value], mut expected: Vec<Value>) {
    let order = |row: &Value| (row["address"].as_str().unwrap().contains(':'), row["protocol"].to_string());
    let local = |row: &Value| (row["local"]["address"].to_string(), row["local"]["port"].as_u64());
    assert!(rows.is_sorted_by_key(order), "{rows:#?}");
    let mut rows = rows.to_vec();
    for rows in [&mut rows, &mut expected] {
        rows.sort_by_key(|row| (order(row), local(row)));
    }
    assert_eq!(rows, expected);
}

fn without_names(mut rows: Vec<Value>) -> Vec<Value> {
    for row in &mut rows {
        for name in ["service", "port_name", "source"] {
            *row.get_mut(name).unwrap() = Value::Null;
        }
    }
    rows
}

#[test]
fn sockets_of_every_form_are_listed_and_others_are_not() {
    let mut world = World::start();
    assert_eq!(world.get("sockets"), [Value::Null; 0]);
    let clients = Clients::connect();
    // To the backend itself, past the Service after it was through it, and nowhere.
    let pod = |address: String, port| SocketAddr::new(address.parse().unwrap(), port);
    let moved = udp(Form::V4.vip());
    moved.connect(pod(pod_v4(1), UDP)).unwrap();
    let _others = (moved, udp(pod(pod_v4(1), UDP)), TcpStream::connect(pod(pod_v6(1), TCP)).unwrap());
    assert_same(&world.get("sockets"), clients.rows("serving", "serving"));

    let text = cproxy(&world.sandbox, &["get", "sockets"]).success();
    let local = clients.udp.first().unwrap().local_addr().unwrap();
    let expected = format!(
        "UDP {local} {VIP_V4}:80 {}:{UDP} serving default/web {} 0 {}/{}",
        pod_v4(1),
        netns(),
        std::process::id(),
        command()
    );
    let lines = lines(&text);
    assert_eq!(lines.len(), 7, "{text:?}");
    assert_no_complaint(&text);
    assert_eq!(lines.first().unwrap(), "PROTOCOL LOCAL FRONTEND BACKEND STATE SERVICE NETNS UID PROCESS");
    assert!(lines.contains(&expected), "{expected} is missing in {text:?}");

    world.agent.kill();
    assert_same(&world.get("sockets"), without_names(clients.rows("serving", "serving")));
    clients.assert_untouched();
}

#[test]
fn sockets_are_stale_when_their_backend_has_gone_and_stay_open() {
    let mut world = World::start();
    let clients = Clients::connect();
    world.replace_pod();
    assert_same(&world.get("sockets"), clients.rows("stale", "stale"));
    // The Service of the others has gone, which leaves TCP as it is.
    manifest::write(&world.sandbox.manifest_dir(), "web.json", []);
    world.wait_for_backends(<[Value]>::is_empty);
    world.agent.kill();
    assert_same(&world.get("sockets"), without_names(clients.rows("stale", "no-frontend")));
    clients.assert_untouched();
    // They are gone.
    drop(clients);
    assert_eq!(world.get("sockets"), [Value::Null; 0]);
}

/// A process that ends with its handle.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_socket_is_told_with_its_user_its_process_and_its_network_namespace() {
    let world = World::start();
    let elsewhere = world.sandbox.neighbour(["192.0.2.1"]);
    let (socket, netns) = elsewhere.run(|| (udp(Form::V4.vip()), netns()));
    rustix::fs::fchown(&socket, Some(Uid::from_raw(4_711)), None).unwrap();
    let local = socket.local_addr().unwrap();
    let mut sleep = Command::new("nsenter");
    sleep
        .arg(format!("--net={}", elsewhere.path().display()))
        .args(["sleep", "60"])
        .stdin(Stdio::from(OwnedFd::from(socket)));
    let child = Killed(sleep.spawn().unwrap());
    drop(sleep);
    let pid = child.0.id();
    let mut expected = Form::V4.row("UDP", local, 1, "serving");
    for (name, value) in
        [("netns", json!(netns)), ("uid", json!(4_711)), ("pid", json!(pid)), ("command", json!("sleep"))]
    {
        *expected.get_mut(name).unwrap() = value;
    }
    eventually(SYNC, "the process is there", || match world.get("sockets").as_slice() {
        [row] if *row == expected => Ok(()),
        rows => Err(format!("{rows:?}, not {expected}")),
    });
}

/// Runs it on a thread, with processes below it, that has been changed first.
fn changed(change: impl FnOnce() + Send, what: impl FnOnce() -> Output + Send) -> Output {
    let changed = || {
        change();
        what()
    };
    thread::scope(|scope| scope.spawn(changed).join()).unwrap()
}

#[test]
fn a_kernel_without_socket_monitoring_shows_the_same() {
    let world = World::start();
    let clients = Clients::connect();
    world.replace_pod();
    let sandbox = &world.sandbox;
    let output = changed(forbid_netlink, || cproxy(sandbox, &["get", "sockets", "-o", "json"]));
    assert_no_complaint(&output);
    assert_same(output.json().as_array().unwrap(), clients.rows("stale", "stale"));
}

#[test]
fn nothing_writes_to_maps() {
    let world = World::start();
    let clients = Clients::connect();
    let sandbox = &world.sandbox;
    let all = || {
        ["services", "backends", "sockets", "counters"].map(|what| {
            let output = cproxy(sandbox, &["get", what, "-o", "json"]).success();
            // The one thing that goes on by itself.
            output.stdout.lines().filter(|line| !line.contains("_seconds\": ")).map(str::to_owned).collect::<Vec<_>>()
        })
    };
    let before = all();
    for what in ["services", "backends", "sockets", "counters"] {
        changed(forbid_writes_to_maps, || cproxy(sandbox, &["get", what])).success();
    }
    assert_eq!(all(), before);
    clients.assert_untouched();
}

#[test]
fn what_is_missing_is_named_in_one_line() {
    let sandbox = Sandbox::new("cproxy-test");
    for what in ["backends", "sockets"] {
        let output = cproxy(&sandbox, &["get", what]);
        assert_failed(&output, &["no cproxy table is installed there", "cproxy run", "--pin-dir"]);
    }
    drop(sandbox);
    let world = World::start();
    for (capability, name) in [("sys_ptrace", "CAP_SYS_PTRACE"), ("sys_admin", "CAP_SYS_ADMIN")] {
        let mut command = Command::new("setpriv");
        command.args([&format!("--bounding-set=-{capability}"), "--inh-caps=-all"]).arg(cproxy_binary());
        command.args(["get", "sockets"]).env("CPROXY_PIN_DIR", world.sandbox.pin_dir());
        let output = run(&world.sandbox, Placement::Hooked, command, "", SYNC);
        assert_failed(&output, &["cannot look into the sockets of processes", name, "run cproxy as root"]);
    }
}

/// This machine may have processes that nobody may look into.
#[track_caller]
fn assert_no_complaint(output: &Output) {
    let unseen = "cproxy: network namespaces and processes that may not be looked into";
    assert!(output.stderr.lines().all(|line| line.starts_with(unseen)), "{output:?}");
}

#[track_caller]
fn assert_failed(output: &Output, words: &[&str]) {
    assert_eq!((output.code, output.stdout.as_str(), output.stderr.lines().count()), (1, "", 1), "{output:?}");
    for word in words {
        assert!(output.stderr.contains(word), "{word:?} is missing in {output:?}");
    }
}

/// One that is ready, one on its way out and one that has gone, behind a Service with two addresses; and the first of them
/// behind another Service.
#[test]
fn backends_are_told_with_the_frontends_that_lead_to_them() {
    let sandbox = Sandbox::new("cproxy-test");
    let web = Service::new("web").cluster_ips([VIP_V4]).tcp("http", 80, TCP).spec("externalIPs", json!(["192.0.2.10"]));
    let slice = Slice::v4("web").tcp("http", TCP).ready([pod_v4(1), pod_v4(10)]);
    let slice = slice.endpoint(Endpoint::terminating(pod_v4(2), true)).endpoint(Endpoint::not_ready(pod_v4(3)));
    let other = Service::new("other").namespace("prod").cluster_ips(["10.96.0.11"]).tcp("", 8000, TCP);
    let of_other = Slice::v4("other").namespace("prod").tcp("", TCP).ready([pod_v4(1)]);
    let of_v6 = Service::new("six").cluster_ips([VIP_V6]).udp("dns", 53, UDP);
    let slice_of_v6 = Slice::v6("six").udp("dns", UDP).ready([pod_v6(1)]);
    let objects: [Value; 6] =
        [web.into(), slice.into(), other.into(), of_other.into(), of_v6.into(), slice_of_v6.into()];
    manifest::write(&sandbox.manifest_dir(), "all.json", objects);
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).start();
    agent.wait_ready(SYNC);

    let frontend = |service: &str, port_name: &str, source: &str, address: &str, port: u16, eligible: bool| {
        json!({
            "service": service, "port_name": port_name, "address": address, "port": port, "source": source,
            "eligible": eligible,
        })
    };
    let of_web = |eligible| {
        [("ClusterIP", VIP_V4), ("ExternalIP", "192.0.2.10")]
            .map(|(source, address)| frontend("default/web", "http", source, address, 80, eligible))
            .to_vec()
    };
    let backend = |protocol: &str, address: String, port: u16, eligible: bool, frontends: Vec<Value>| json!({"protocol": protocol, "address": address, "port": port, "eligible": eligible, "frontends": frontends});
    let mut of_first = of_web(true);
    of_first.insert(1, frontend("prod/other", "", "ClusterIP", "10.96.0.11", 8000, true));
    let of_six = vec![frontend("default/six", "dns", "ClusterIP", VIP_V6, 53, true)];
    let mut expected = vec![
        backend("TCP", pod_v4(1), TCP, true, of_first),
        backend("TCP", pod_v4(2), TCP, false, of_web(false)),
        backend("TCP", pod_v4(10), TCP, true, of_web(true)),
        backend("UDP", pod_v6(1), UDP, true, of_six),
    ];
    assert_eq!(get(&sandbox, "backends"), expected);
    let text = cproxy(&sandbox, &["get", "backends"]).success();
    let line = |backend: &dyn Display, rest: &str| format!("{backend} {rest}");
    assert_eq!(
        lines(&text),
        [
            "BACKEND ELIGIBLE FRONTENDS SERVICES".to_owned(),
            line(&"10.244.0.1:8080/TCP", "yes 3 default/web, prod/other"),
            line(&"10.244.0.2:8080/TCP", "no 2 default/web"),
            line(&"10.244.0.10:8080/TCP", "yes 2 default/web"),
            line(&"[fd00:10:244::1]:8081/UDP", "yes 1 default/six"),
        ]
    );

    agent.kill();
    for row in &mut expected {
        let frontends = row.get_mut("frontends").unwrap().as_array_mut().unwrap();
        *frontends = without_names(std::mem::take(frontends));
    }
    assert_eq!(get(&sandbox, "backends"), expected);
    assert_eq!(lines(&cproxy(&sandbox, &["get", "backends"])).get(1).unwrap(), "10.244.0.1:8080/TCP yes 3 -");
}

/// The lines of text, with one blank between words.
fn lines(output: &Output) -> Vec<String> {
    output.stdout.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}
