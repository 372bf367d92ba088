//! `cproxy get`: its output for real tables and for real sockets of every form, in all formats and widths, and the
//! absence of side effects. The tests of settings include `get services` and `get counters`.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed call or a missing name is a failed test")]

use std::{
    fmt::Display,
    fs,
    io::Read as _,
    net::{SocketAddr, TcpStream, UdpSocket},
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    process::{Child, Command, Stdio},
    thread,
};

use cproxy_tests::{
    borrower::Borrower,
    echo,
    manifest::{self, Endpoint, Service, Slice},
    process::{Daemon, Output, cproxy, cproxy_binary, cproxy_command, cproxy_with_variable, eventually, run},
    sandbox::{Placement, Sandbox},
    seccomp::{forbid_netlink, forbid_writes_to_maps},
    world::{Form, Host, PORT, SYNC, TCP, UDP, WEB, World, pod, rows, start_agent, web_with},
};
use rustix::{fs::Uid, net::sockopt};
use serde_json::{Value, json};

/// Expected row of `get sockets -o json`.
fn row(form: Form, protocol: &str, local: SocketAddr, number: u8, state: &str) -> Value {
    let (port_name, port) = if protocol == "TCP" { ("http", TCP) } else { ("dns", UDP) };
    let shown = |host: Host| host.addresses()[usize::from(form == Form::V6)].to_string();
    json!({
        "service": "default/web", "port_name": port_name, "source": "ClusterIP",
        "protocol": protocol, "address": shown(WEB), "port": PORT,
        "backend": {"address": shown(pod(number)), "port": port}, "state": state,
        "retransmits": 0, "local": {"address": local.ip().to_canonical().to_string(), "port": local.port()},
        "netns": netns(), "uid": 0, "pid": std::process::id(), "command": command(),
    })
}

/// The inode number of the calling thread's network namespace.
fn netns() -> u64 {
    fs::metadata("/proc/thread-self/ns/net").unwrap().ino()
}

/// Name of this process.
fn command() -> String {
    fs::read_to_string("/proc/self/comm").unwrap().trim_end().to_owned()
}

/// Two pods, of which one is behind the Service, and an agent that closes no socket.
fn start() -> World {
    World::builder().pods(1..=2).objects(web_with([1])).args(["--terminate-sockets", "none"]).start()
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
        Self {
            tcp: Form::ALL.map(|form| echo::connect_tcp(form.web()).unwrap().1),
            udp: Form::ALL.map(|form| udp(form.web())),
        }
    }

    fn rows(&self, of_udp: &str, of_tcp: &str) -> Vec<Value> {
        let tcp =
            Form::ALL.iter().zip(&self.tcp).map(|(form, tcp)| row(*form, "TCP", tcp.local_addr().unwrap(), 1, of_tcp));
        let udp =
            Form::ALL.iter().zip(&self.udp).map(|(form, udp)| row(*form, "UDP", udp.local_addr().unwrap(), 1, of_udp));
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
    let mut world = start();
    assert_eq!(rows(&world.sandbox, "sockets"), [Value::Null; 0]);
    let clients = Clients::connect();
    // Sockets without a translation; the first was connected to the Service before.
    let moved = udp(Form::V4.web());
    moved.connect(Form::V4.pod(1, UDP)).unwrap();
    let _others = (moved, udp(Form::V4.pod(1, UDP)), TcpStream::connect(Form::V6.pod(1, TCP)).unwrap());
    assert_same(&rows(&world.sandbox, "sockets"), clients.rows("serving", "serving"));

    let text = cproxy(&world.sandbox, &["get", "sockets"]).success();
    let local = clients.udp.first().unwrap().local_addr().unwrap();
    let expected = format!(
        "UDP {local} {}:80 {}:{UDP} serving default/web {} 0 {}/{}",
        WEB.v4,
        pod(1).v4,
        netns(),
        std::process::id(),
        command()
    );
    let lines = lines(&text);
    assert_eq!(lines.len(), 7, "{text:?}");
    assert_no_error(&text);
    assert_eq!(lines.first().unwrap(), "PROTOCOL LOCAL FRONTEND BACKEND STATE SERVICE NETNS UID PROCESS");
    assert!(lines.contains(&expected), "{expected} is missing in {text:?}");

    world.agent.kill();
    assert_same(&rows(&world.sandbox, "sockets"), without_names(clients.rows("serving", "serving")));
    clients.assert_untouched();
}

#[test]
fn sockets_are_stale_when_their_backend_has_gone_and_stay_open() {
    let mut world = start();
    let clients = Clients::connect();
    world.set_pods([2]);
    assert_same(&rows(&world.sandbox, "sockets"), clients.rows("stale", "stale"));
    // The other sockets' Service has gone, which does not affect TCP.
    world.set([], <[Value]>::is_empty);
    world.agent.kill();
    assert_same(&rows(&world.sandbox, "sockets"), without_names(clients.rows("stale", "no-frontend")));
    clients.assert_untouched();
    // The sockets are closed.
    drop(clients);
    assert_eq!(rows(&world.sandbox, "sockets"), [Value::Null; 0]);
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
fn a_socket_is_listed_with_its_user_process_and_network_namespace() {
    let world = start();
    let elsewhere = world.sandbox.neighbour(["192.0.2.1"]);
    let (socket, netns) = elsewhere.run(|| (udp(Form::V4.web()), netns()));
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
    let mut expected = row(Form::V4, "UDP", local, 1, "serving");
    for (name, value) in
        [("netns", json!(netns)), ("uid", json!(4_711)), ("pid", json!(pid)), ("command", json!("sleep"))]
    {
        *expected.get_mut(name).unwrap() = value;
    }
    eventually(SYNC, "the process is there", || match rows(&world.sandbox, "sockets").as_slice() {
        [row] if *row == expected => Ok(()),
        rows => Err(format!("{rows:?}, not {expected}")),
    });
}

/// Duplicates of a socket in processes with the names of an agent and a broker.
#[test]
fn a_process_of_cproxy_is_not_named_as_that_of_a_socket() {
    let world = start();
    let socket = udp(Form::V4.web());
    let local = socket.local_addr().unwrap();
    let _borrowers = ["cproxy", "cproxy-broker"].map(|name| Borrower::start(name, socket.try_clone().unwrap()));
    let stdin = Stdio::from(OwnedFd::from(socket.try_clone().unwrap()));
    let owner = Killed(Command::new("sleep").arg("60").stdin(stdin).spawn().unwrap());
    drop(socket);
    let mut expected = row(Form::V4, "UDP", local, 1, "serving");
    *expected.get_mut("pid").unwrap() = json!(owner.0.id());
    *expected.get_mut("command").unwrap() = json!("sleep");
    eventually(SYNC, "the process is there", || match rows(&world.sandbox, "sockets").as_slice() {
        [row] if *row == expected => Ok(()),
        rows => Err(format!("{rows:?}, not {expected}")),
    });
    drop(owner);
    assert_eq!(rows(&world.sandbox, "sockets"), [Value::Null; 0], "it would be closed by now");
}

/// Runs `what` on a thread, after `change` has altered that thread.
fn changed(change: impl FnOnce() + Send, what: impl FnOnce() -> Output + Send) -> Output {
    let changed = || {
        change();
        what()
    };
    thread::scope(|scope| scope.spawn(changed).join()).unwrap()
}

#[test]
fn a_kernel_without_socket_monitoring_shows_the_same() {
    let world = start();
    let clients = Clients::connect();
    world.set_pods([2]);
    let sandbox = &world.sandbox;
    let output = changed(forbid_netlink, || cproxy(sandbox, &["get", "sockets", "-o", "json"]));
    assert_no_error(&output);
    assert_same(output.json().as_array().unwrap(), clients.rows("stale", "stale"));
}

#[test]
fn get_writes_to_no_map() {
    let world = start();
    let clients = Clients::connect();
    let sandbox = &world.sandbox;
    let all = || {
        ["services", "backends", "sockets", "counters"].map(|what| {
            let output = cproxy(sandbox, &["get", what, "-o", "json"]).success();
            // This value changes without any event.
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
fn a_missing_table_or_capability_is_named_in_one_line() {
    let sandbox = Sandbox::for_test();
    for what in ["backends", "sockets"] {
        let output = cproxy(&sandbox, &["get", what]);
        assert_failed(&output, &["no cproxy table is installed there", "cproxy run", "--pin-dir"]);
    }
    drop(sandbox);
    let world = start();
    for (capability, name) in [("sys_ptrace", "CAP_SYS_PTRACE"), ("sys_admin", "CAP_SYS_ADMIN")] {
        let mut command = Command::new("setpriv");
        command.args([&format!("--bounding-set=-{capability}"), "--inh-caps=-all"]).arg(cproxy_binary());
        command.args(["get", "sockets"]).env("CPROXY_PIN_DIR", world.sandbox.pin_dir());
        let output = run(&world.sandbox, Placement::Hooked, command, "", SYNC);
        assert_failed(&output, &["cannot look into the sockets of processes", name, "run cproxy as root"]);
    }
}

/// Checks for the absence of complaints, except about processes that this user may not inspect.
#[track_caller]
fn assert_no_error(output: &Output) {
    let unseen = "cproxy: the list may be incomplete: ";
    assert!(output.stderr.lines().all(|line| line.starts_with(unseen)), "{output:?}");
}

#[track_caller]
fn assert_failed(output: &Output, words: &[&str]) {
    assert_eq!((output.code, output.stdout.as_str(), output.stderr.lines().count()), (1, "", 1), "{output:?}");
    for word in words {
        assert!(output.stderr.contains(word), "{word:?} is missing in {output:?}");
    }
}

/// A ready backend, a terminating one and one that has gone, behind a Service with two addresses; the first of them is
/// also behind another Service.
#[test]
fn backends_are_listed_with_their_frontends() {
    let sandbox = Sandbox::for_test();
    let web = Service::new("web").cluster_ips([WEB.v4]).tcp("http", 80, TCP).spec("externalIPs", json!(["192.0.2.10"]));
    let slice = Slice::v4("web").tcp("http", TCP).ready([pod(1).v4, pod(10).v4]);
    let slice = slice.endpoint(Endpoint::terminating(pod(2).v4, true)).endpoint(Endpoint::not_ready(pod(3).v4));
    let other = Service::new("other").namespace("prod").cluster_ips(["10.96.0.11"]).tcp("", 8000, TCP);
    let of_other = Slice::v4("other").namespace("prod").tcp("", TCP).ready([pod(1).v4]);
    let of_v6 = Service::new("six").cluster_ips([WEB.v6]).udp("dns", 53, UDP);
    let slice_of_v6 = Slice::v6("six").udp("dns", UDP).ready([pod(1).v6]);
    let objects: [Value; 6] =
        [web.into(), slice.into(), other.into(), of_other.into(), of_v6.into(), slice_of_v6.into()];
    manifest::write(&sandbox.manifest_dir(), "all.json", objects);
    let mut agent = start_agent(&sandbox);

    let frontend = |service: &str, port_name: &str, source: &str, address: &dyn Display, port: u16, eligible: bool| {
        json!({
            "service": service, "port_name": port_name, "address": address.to_string(), "port": port, "source": source,
            "eligible": eligible,
        })
    };
    let of_web = |eligible| {
        [("ClusterIP", &WEB.v4 as &dyn Display), ("ExternalIP", &"192.0.2.10")]
            .map(|(source, address)| frontend("default/web", "http", source, address, 80, eligible))
            .to_vec()
    };
    let backend = |protocol: &str, address: &dyn Display, port: u16, eligible: bool, frontends: Vec<Value>| {
        let address = address.to_string();
        json!({
            "protocol": protocol, "address": address, "port": port, "eligible": eligible, "frontends": frontends,
        })
    };
    let mut of_first = of_web(true);
    of_first.insert(1, frontend("prod/other", "", "ClusterIP", &"10.96.0.11", 8000, true));
    let of_six = vec![frontend("default/six", "dns", "ClusterIP", &WEB.v6, 53, true)];
    let mut expected = vec![
        backend("TCP", &pod(1).v4, TCP, true, of_first),
        backend("TCP", &pod(2).v4, TCP, false, of_web(false)),
        backend("TCP", &pod(10).v4, TCP, true, of_web(true)),
        backend("UDP", &pod(1).v6, UDP, true, of_six),
    ];
    assert_eq!(rows(&sandbox, "backends"), expected);
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
    assert_eq!(rows(&sandbox, "backends"), expected);
    assert_eq!(lines(&cproxy(&sandbox, &["get", "backends"])).get(1).unwrap(), "10.244.0.1:8080/TCP yes 3 -");
}

/// The lines of the output, with one blank between words.
fn lines(output: &Output) -> Vec<String> {
    output.stdout.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// Runs `get` with these words, split at blanks.
fn get(sandbox: &Sandbox, words: &str) -> Output {
    let arguments: Vec<_> = std::iter::once("get").chain(words.split(' ')).collect();
    cproxy(sandbox, &arguments)
}

/// A world with the Services `default/web` (two frontends), `prod/web` and `prod/other`.
fn three_services() -> World {
    let service = |namespace: &str, name: &str, vip: &str| -> [Value; 2] {
        let service = Service::new(name).namespace(namespace).cluster_ips([vip]).tcp("http", 80, TCP);
        let slice = Slice::v4(name).namespace(namespace).tcp("http", TCP).ready((1..=9).map(|number| pod(number).v4));
        [service.into(), slice.into()]
    };
    let two_ports = Service::new("web").cluster_ips(["10.96.0.11"]).tcp("http", 80, TCP).tcp("more", 81, TCP);
    let slice = Slice::v4("web").tcp("http", TCP).tcp("more", TCP).ready([pod(1).v4]);
    let objects = [service("prod", "web", "10.96.0.12"), service("prod", "other", "10.96.0.13")].concat();
    World::builder().pods(1..=1).objects([[two_ports.into(), slice.into()].to_vec(), objects].concat()).start()
}

#[test]
fn rows_are_filtered_by_service_and_namespace_and_named() {
    let mut world = three_services();
    let sandbox = &world.sandbox;
    let names = |words: &str| get(sandbox, words).success().stdout.lines().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(names("services -o name"), ["default/web", "prod/other", "prod/web"]);
    assert_eq!(names("services -o name -n prod"), ["prod/other", "prod/web"]);
    assert_eq!(names("services -o name --service web"), ["default/web", "prod/web"]);
    assert_eq!(names("services -o name --service prod/web --namespace prod"), ["prod/web"]);
    assert_eq!(names("services -o name --service nothing"), [""; 0]);
    assert_eq!(names("backends -o name --service default/web"), ["10.244.0.1:8080/TCP"]);
    assert_eq!(names("backends -o name -n prod").len(), 9);
    let of_default = get(sandbox, "backends -o json -n default").json();
    assert_eq!(of_default[0]["frontends"].as_array().unwrap().len(), 2, "only those of the Service: {of_default}");
    let (_stream, other) = (echo::connect_tcp(("10.96.0.11", 80)).unwrap().1, "sockets -o json -n prod");
    assert_eq!(get(sandbox, other).json(), json!([]));
    assert_eq!(get(sandbox, "sockets -o json --service web").json().as_array().unwrap().len(), 1);
    assert!(names("sockets -o name")[0].ends_with("/TCP"));

    for (words, message) in [
        ("counters --service web", "counters, settings, problems, policy and denials are of no Service"),
        ("sockets --watch", "--watch shows changes of services, backends and counters only"),
        ("services --watch -o name", "--watch prints table, wide or json"),
    ] {
        let output = get(sandbox, words);
        assert_eq!((output.code, output.stderr.lines().count()), (2, 1), "{output:?}");
        assert!(output.stderr.contains(message), "{output:?}");
    }
    for (words, message) in [
        ("services -n nosuch", "cproxy: no rows in namespace nosuch\n"),
        ("services --service prod/nosuch -o json", "cproxy: no rows of Service prod/nosuch\n"),
        ("services --service nosuch -n prod -o name", "cproxy: no rows of Service nosuch in namespace prod\n"),
        ("backends -n nosuch", "cproxy: no rows in namespace nosuch\n"),
        ("svc -n prod", ""),
        ("endpoints", ""),
    ] {
        assert_eq!(get(sandbox, words).success().stderr, message, "{words}");
    }
    for (words, similar) in [("svcs", "services"), ("services --servic web", "--service"), ("services -o jsn", "json")]
    {
        let output = get(sandbox, words);
        assert!(output.code == 2 && output.stderr.contains(&format!("did you mean {similar}?")), "{output:?}");
    }
    let output = cproxy(sandbox, &["problems"]);
    assert!(output.code == 2 && output.stderr.contains("did you mean get problems?"), "{output:?}");
    world.agent.kill();
    for words in ["services -n prod", "services -o name"] {
        assert_failed(&get(&world.sandbox, words), &["needs a running agent, which knows the names of Services"]);
    }
    assert_eq!(get(&world.sandbox, "backends -o name").success().stdout.lines().count(), 9);
}

#[test]
fn yaml_and_json_have_the_same_content() {
    let world = three_services();
    for state in ["services", "backends", "sockets"] {
        let yaml = get(&world.sandbox, &format!("{state} -o yaml")).success().stdout;
        let json = get(&world.sandbox, &format!("{state} -o json")).json();
        assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), json, "{yaml}");
    }
    let yaml = get(&world.sandbox, "counters -o yaml").success().stdout;
    let json = get(&world.sandbox, "counters -o json").json();
    assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap()["frontends"], json["frontends"], "{yaml}");
}

/// Output of `get` on a terminal with this many columns.
fn on_terminal(sandbox: &Sandbox, columns: u16, words: &str) -> Vec<String> {
    let mut script = Command::new("script");
    let line = format!("stty cols {columns}; exec {} get {words}", cproxy_binary().display());
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    script.env("CPROXY_PIN_DIR", sandbox.pin_dir()).env("CPROXY_RUN_DIR", sandbox.run_dir()).env_remove("COLUMNS");
    let output = run(sandbox, Placement::Hooked, script, "", SYNC).success();
    // The terminal shows complaints, too.
    let lines = output.stdout.lines().filter(|line| !line.starts_with("cproxy: "));
    lines.map(|line| line.trim_end().to_owned()).collect()
}

#[test]
fn tables_fit_the_terminal() {
    let world = three_services();
    let _stream = echo::connect_tcp(("10.96.0.11", 80)).unwrap().1;
    let sandbox = &world.sandbox;
    for columns in [80, 120, 200] {
        for state in ["services", "backends", "sockets", "counters"] {
            let lines = on_terminal(sandbox, columns, state);
            let longest = lines.iter().map(|line| line.chars().count()).max().unwrap();
            assert!(longest <= usize::from(columns), "{state}, {columns}: {lines:#?}");
        }
    }
    let last = |columns| on_terminal(sandbox, columns, "services").pop().unwrap();
    assert!(last(80).starts_with("prod/other") && last(80).ends_with(" more"), "{}", last(80));
    assert!(last(200).matches("10.244.").count() > 5, "{}", last(200));
    let plain = get(sandbox, "services").success().stdout;
    assert!(plain.lines().next().unwrap().contains("AFFINITY") && plain.contains(", and 3 more"), "{plain}");
    let wide = get(sandbox, "services -o wide").success().stdout;
    assert!(!wide.contains(", and ") && wide.contains("10.244.0.9:8080"), "{wide}");
}

/// A `get --watch` whose output goes to its log.
fn watching(sandbox: &Sandbox, words: &str) -> Daemon {
    let command = cproxy_command(sandbox, &["get"].into_iter().chain(words.split(' ')).collect::<Vec<_>>());
    Daemon::spawn(sandbox, "watch", Placement::Hooked, command)
}

#[test]
fn one_format_in_the_environment_fits_all_commands() {
    let world = World::start([1]);
    let vip = WEB.v4.to_string();
    for (format, is_json) in [("wide", false), ("name", false), ("yaml", true), ("json", true)] {
        for arguments in [&["explain", &vip][..], &["check"], &["get", "services"]] {
            let output = cproxy_with_variable(&world.sandbox, arguments, ("CPROXY_OUTPUT", format));
            let is_yaml = format == "yaml" && arguments[0] == "get";
            assert!(output.code != 2, "{format} {arguments:?}: {output:?}");
            assert_eq!(
                output.stdout.starts_with(['{', '[']),
                is_json && !is_yaml,
                "{format} {arguments:?}: {output:?}"
            );
        }
    }
}

#[test]
fn a_watch_prints_each_row_that_changes_until_the_table_is_gone() {
    let mut world = start();
    let mut table = watching(&world.sandbox, "services --watch --service web");
    let mut events = watching(&world.sandbox, "backends --watch -o json");
    table.wait_log("10.244.0.1:8080", SYNC);
    events.wait_log("ADDED", SYNC);
    let first = table.log();
    assert!(first.starts_with("CHANGE"), "{first}");
    let of_web = world.rows().len();
    assert_eq!(first.matches("ADDED ").count(), of_web, "{first}");
    assert_eq!(first.lines().count(), of_web + 1, "{first}");

    world.set_pods([2]);
    table.wait_log("MODIFIED", SYNC);
    assert!(table.wait_log("10.244.0.2:8080", SYNC).starts_with("MODIFIED "));
    events.wait_log(r#"{"type":"DELETED","object":{"protocol":"#, SYNC);
    let all = events.log();
    assert!(all.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{all}");
    assert_eq!(table.exit_status(), None);

    world.agent.stop();
    cproxy(&world.sandbox, &["cleanup"]).success();
    let status = table.wait(SYNC).expect("it ends with the table");
    assert_eq!(status.code(), Some(1), "{}", table.log());
    assert!(table.log().lines().last().unwrap().starts_with("cproxy: "), "{}", table.log());
}

#[test]
fn a_watch_of_counters_prints_those_that_change_with_their_rates() {
    let world = World::start([1]);
    let mut table = watching(&world.sandbox, "counters --watch");
    let mut lines = watching(&world.sandbox, "counters --watch -o json");
    lines.wait_log(r#"{"name":"forwarded","#, SYNC);
    let first = table.wait_log("forwarded", SYNC);
    assert!(table.log().starts_with("COUNTER "), "{}", table.log());
    let before = lines.log().lines().count();
    let changed = |log: &str, from: usize| {
        let rows = log.lines().skip(from).map(|line| serde_json::from_str::<Value>(line).unwrap());
        rows.filter(|row| row["name"] == "forwarded").collect::<Vec<_>>()
    };
    eventually(SYNC, "a rate of connections", || {
        for form in Form::ALL {
            echo::connect_tcp(form.web()).unwrap();
        }
        let rows = changed(&lines.log(), before);
        let has_rate = rows.iter().any(|row| row["per_second"].as_i64().unwrap() > 0);
        if has_rate { Ok(()) } else { Err(format!("{rows:?}")) }
    });
    let is_new = |line: &&str| line.starts_with("forwarded ") && *line != first;
    eventually(SYNC, "a line with the rate", || table.log().lines().find(is_new).map(drop).ok_or("none yet"));
    assert!(get(&world.sandbox, "counters --watch -o yaml").code == 2);
}

#[test]
fn a_watch_ends_with_its_reader_also_while_nothing_changes() {
    let mut world = World::start([1]);
    world.agent.stop();
    for words in ["counters --watch", "services --watch -o json", "backends --watch"] {
        let mut command =
            cproxy_command(&world.sandbox, &["get"].into_iter().chain(words.split(' ')).collect::<Vec<_>>());
        let mut child = world.sandbox.place(command.stdout(Stdio::piped()), Placement::Unhooked).spawn().unwrap();
        let mut first = [0];
        child.stdout.take().unwrap().read_exact(&mut first).unwrap();
        let ended = || child.try_wait().unwrap().ok_or("it goes on");
        assert!(eventually(SYNC, words, ended).success(), "{words}");
    }
}
