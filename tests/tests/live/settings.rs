//! Settings in the programs besides the table: exclusions, the mode of choice, the node; and the programs' counters.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::unix::{fs::MetadataExt, net::UnixStream},
    path::Path,
    process::Command,
    time::Duration,
};

use cproxy_core::Filter;
use cproxy_datapath::bpf::{KernelReader, PinDir, excluded_cgroup};
use cproxy_tests::{
    Server, echo,
    manifest::{self, Endpoint, Service, Slice, http_service},
    process::{self, Agent, Signal, cproxy},
    sandbox::{Placement, Sandbox},
    world::{PORT, SYNC, TCP, UDP, World, counters, rows, serve_pod_and_vip, start_agent, start_agent_with},
};
use serde_json::{Value, json};

const VIP: &str = "10.96.0.10";
const POD: &str = "10.244.0.1";

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), port)
}

fn serve(sandbox: &Sandbox) -> [Server; 2] {
    serve_pod_and_vip(sandbox, POD, VIP)
}

fn start(arguments: &[&str]) -> World {
    World::builder().prepare(serve).objects(http_service("web", VIP, [POD])).args(arguments).start()
}

fn ask(address: SocketAddr) -> String {
    echo::ask_tcp(address).unwrap().name
}

#[test]
fn ports_and_users_are_left_alone() {
    for flags in [["--exclude-port", "81", "80", "--exclude-uid", "4711"].as_slice(), &["--exclude-uid", "4711,0"]] {
        let _world = start(flags);
        assert_eq!(ask(at(VIP, 80)), "the VIP itself", "{flags:?}");
    }
    let World { mut agent, servers: _servers, sandbox } = start(&["--exclude-uid", "4711", "--exclude-port", "81"]);
    assert_eq!(ask(at(VIP, 80)), "pod");
    // A new agent replaces the list, while the hooks stay attached.
    agent.stop();
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).env("CPROXY_EXCLUDE_PORT", "81,80").start();
    assert_eq!(ask(at(VIP, 80)), "the VIP itself");
    agent.stop();
    let _agent = start_agent(&sandbox);
    assert_eq!(ask(at(VIP, 80)), "pod");
}

#[test]
fn cgroups_are_left_alone_with_all_below_them() {
    let sandbox = Sandbox::for_test();
    let excluded = sandbox.cgroup().join("left-alone");
    let below = excluded.join("below");
    std::fs::create_dir_all(&below).unwrap();
    let cgroup = excluded_cgroup(&excluded).unwrap();
    assert_eq!(cgroup.id, std::fs::metadata(&excluded).unwrap().ino());
    assert_eq!(excluded_cgroup(&below).unwrap().level, cgroup.level + 1);
    let _servers = serve(&sandbox);
    manifest::write(&sandbox.manifest_dir(), "web.json", http_service("web", VIP, [POD]));
    let mut agent = start_agent_with(&sandbox, ["--exclude-cgroup".as_ref(), excluded.as_os_str()]);
    assert_eq!(ask(at(VIP, 80)), "pod");
    for dir in [&excluded, &below] {
        let mut script = Command::new("sh");
        script.args([
            "-euc",
            "echo $$ > \"$dir/cgroup.procs\"; exec curl --http0.9 --silent --max-time 1 http://10.96.0.10/",
        ]);
        script.env("dir", dir);
        let output = process::run(&sandbox, Placement::Hooked, script, "", SYNC);
        assert!(output.stdout.starts_with("the VIP itself"), "{}: {output:?}", dir.display());
    }
    agent.stop();
    for dir in [below, excluded] {
        std::fs::remove_dir(dir).unwrap();
    }
}

/// Containers, and pods of a cluster in the machine whose Services have the same addresses.
#[test]
fn other_network_namespaces_are_left_alone() {
    let sandbox = Sandbox::for_test();
    let _servers = serve(&sandbox);
    manifest::write(
        &sandbox.manifest_dir(),
        "web.json",
        [
            Service::new("web").cluster_ips([VIP]).tcp("http", 80, TCP).udp("dns", 80, UDP).into(),
            Slice::v4("web").tcp("http", TCP).udp("dns", UDP).ready([POD]).into(),
        ],
    );
    let inner = sandbox.neighbour([VIP]);
    let (tcp, udp) = inner.run(|| (TcpListener::bind((VIP, 80)).unwrap(), UdpSocket::bind((VIP, 80)).unwrap()));
    tcp.set_nonblocking(true).unwrap();
    udp.set_read_timeout(Some(SYNC)).unwrap();
    // Calls of the inner cluster that reach its own Service.
    let reached = || {
        inner.run(|| {
            let client = || UdpSocket::bind("0.0.0.0:0").unwrap();
            let stream = TcpStream::connect_timeout(&at(VIP, 80), Duration::from_secs(2));
            let accepted = stream.is_ok() && tcp.accept().is_ok();
            let unconnected = client();
            let is_sent = unconnected.send_to(b"?", at(VIP, 80)).is_ok();
            let connected = client();
            connected.connect(at(VIP, 80)).ok();
            let is_there = connected.peer_addr().is_ok() && connected.send(b"?").is_ok();
            [accepted, is_sent && udp.recv(&mut [0; 8]).is_ok(), is_there && udp.recv(&mut [0; 8]).is_ok()]
        })
    };
    let mut agent = start_agent_with(&sandbox, ["--exclude-netns", "others"]);
    assert_eq!(reached(), [true; 3]);
    assert_eq!(ask(at(VIP, 80)), "pod", "in the agent's namespace");
    agent.stop();
    udp.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let mut agent = start_agent(&sandbox);
    assert_eq!(reached(), [false; 3], "they go to the outer cluster's pods");
    let flow = inner.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    let reaches = || flow.send_to(b"?", at(VIP, 80)).is_ok() && udp.recv(&mut [0; 8]).is_ok();
    assert!(!reaches());
    agent.stop();
    udp.set_read_timeout(Some(SYNC)).unwrap();
    let _agent = start_agent_with(&sandbox, ["--exclude-netns", "others"]);
    assert!(reaches(), "a socket that has sent before");
}

#[test]
fn wrong_exclusions_are_named_before_anything_is_attached() {
    let sandbox = Sandbox::for_test();
    manifest::write(&sandbox.manifest_dir(), "web.json", []);
    let manifests = sandbox.manifest_dir().display().to_string();
    let many = ["7"; 9].join(",");
    for (flag, value, code, needle) in [
        ("--exclude-cgroup", "/nowhere", 2, "--exclude-cgroup /nowhere: No such file"),
        ("--exclude-cgroup", "/proc", 2, "--exclude-cgroup /proc: not a cgroup2 directory"),
        ("--exclude-port", "0", 2, "--exclude-port"),
        ("--exclude-uid", "4294967295", 2, "--exclude-uid"),
        ("--exclude-uid", &many, 2, "--exclude-uid: 9 values; at most 8"),
        ("--exclude-netns", "mine", 2, "--exclude-netns"),
    ] {
        let output = cproxy(&sandbox, &["run", "--manifests", &manifests, flag, value]);
        assert_eq!(output.code, code, "{flag} {value}: {output:?}");
        assert!(output.stderr.contains(needle), "{flag} {value}: {output:?}");
        assert!(!sandbox.pin_dir().exists(), "{flag} {value}");
    }
}

#[test]
fn an_unknown_port_of_a_known_address_is_refused_and_counted() {
    // The table has the canary's frontends, too.
    let without_canary = ["--canary-address", "none"];
    let World { mut agent, servers: _servers, sandbox } = start(&without_canary);
    let _server = echo::tcp(&sandbox, at(VIP, 81), "the VIP itself");
    let before = counters(&sandbox);
    assert_eq!(ask(at(VIP, 80)), "pod");
    let error = TcpStream::connect(at(VIP, 81)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    agent.kill();
    let after = counters(&sandbox);
    for (name, more) in [("forwarded", 1), ("refused", 1), ("dropped", 0), ("state_lost", 0), ("udp_flows_evicted", 0)]
    {
        assert_eq!(after[name].as_u64().unwrap() - before[name].as_u64().unwrap(), more, "{name}: {after}");
    }
    assert_eq!(after["udp_flows_max"], 1024);
    let text = cproxy(&sandbox, &["get", "counters"]).success().stdout;
    assert!(text.lines().any(|line| line.starts_with("forwarded ")), "{text}");
    // The entry goes with its Service.
    manifest::write(&sandbox.manifest_dir(), "web.json", []);
    let _agent = start_agent_with(&sandbox, without_canary);
    assert_eq!(ask(at(VIP, 81)), "the VIP itself");
    let table = KernelReader::read_table(&PinDir::new(&sandbox.pin_dir())).unwrap();
    assert_eq!((table.frontends.len(), table.addresses.len(), table.filter), (0, 0, Filter::default()));
}

#[test]
fn affinity_policy_and_serving_backends_are_read_back_from_the_kernel() {
    let sandbox = Sandbox::for_test();
    let sticky = Service::new("sticky").cluster_ips([VIP]).tcp("http", 80, 8080).client_ip_affinity(60);
    let local = Service::new("local").cluster_ips(["10.96.0.11"]).tcp("http", 80, 8080);
    let local = local.spec("internalTrafficPolicy", json!("Local"));
    let hosts = |range: std::ops::Range<u16>| range.map(|host| format!("10.244.{}.{}", host / 250, host % 250 + 1));
    let slice = Slice::v4("sticky").tcp("http", TCP).ready(hosts(0..300));
    let slice = hosts(300..340).fold(slice, |slice, host| slice.endpoint(Endpoint::terminating(host, true)));
    let remote = Slice::v4("local").tcp("http", 8080).endpoint(Endpoint::ready(POD).node("there"));
    manifest::write(&sandbox.manifest_dir(), "all.json", [sticky.into(), local.into(), slice.into(), remote.into()]);
    let manifests = sandbox.manifest_dir().display().to_string();
    let resolved = cproxy(&sandbox, &["resolve", "-o", "json", "--manifests", &manifests, "--node-name", "here"]);
    let resolved = resolved.json();
    let mut agent = start_agent_with(&sandbox, ["--node-name", "here"]);
    assert_eq!(Value::from(rows(&sandbox, "services")), resolved);
    agent.kill();
    let rows = rows(&sandbox, "services");
    assert_eq!((&rows[0]["session_affinity_seconds"], &rows[0]["action"]), (&json!(60), &json!("forward")));
    assert_eq!(rows[0]["backends"], resolved[0]["backends"]);
    assert_eq!((&rows[1]["session_affinity_seconds"], &rows[1]["action"]), (&json!(null), &json!("drop")));
    let table = KernelReader::read_table(&PinDir::new(&sandbox.pin_dir())).unwrap();
    let runs: Vec<_> =
        table.sets.values().map(|set| (set.members.eligible().len(), set.members.kept().len())).collect();
    assert!(runs.contains(&(300, 40)) && runs.contains(&(0, 1)), "{runs:?}");
}

#[test]
fn choices_are_reseeded_on_request() {
    let World { mut agent, servers: _servers, sandbox } = start(&[]);
    assert_eq!(cproxy(&sandbox, &["reseed"]).success().stdout, "endpoints are chosen from a new seed\n");
    let mut stream = UnixStream::connect(sandbox.run_dir().join("cproxy.sock")).unwrap();
    stream.write_all(b"what\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("error: the requests are"), "{answer}");
    agent.stop();
    let output = cproxy(&sandbox, &["reseed"]);
    assert_eq!(output.code, 1);
    assert!(output.stderr.starts_with("cproxy: no agent runs with the run directory "), "{}", output.stderr);
}

/// Replaces a file at once: the agent reads it at any time.
fn replace(file: &Path, text: &str) {
    let new = file.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(&new, file).unwrap();
}

#[test]
fn a_hangup_applies_changed_settings_and_ends_nothing() {
    let sandbox = Sandbox::for_test();
    let _servers = serve(&sandbox);
    let _other = echo::tcp(&sandbox, at(VIP, 81), "the VIP itself");
    manifest::write(&sandbox.manifest_dir(), "web.json", http_service("web", VIP, [POD]));
    let file = sandbox.dir().join("cproxy.conf");
    let set = |text: &str| replace(&file, text);
    set("# no settings yet\n");
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).env("CPROXY_CONFIG", &file).spawn();
    // The agent is starting.
    agent.wait_until(
        SYNC,
        "the socket",
        |_| if sandbox.run_dir().join("cproxy.sock").exists() { Ok(()) } else { Err("") },
    );
    set("log-level = warn\n");
    agent.signal(Signal::HUP);
    agent.wait_ready(SYNC);
    agent.wait_log("SIGHUP: settings were read again: --log-level changed from info to warn", SYNC);
    let is_refused = || echo::is_refused(echo::ask_tcp(at(VIP, 81)));
    echo::while_a_client_connects(at(VIP, PORT), "pod", || {
        assert!(is_refused());
        set("exclude-port = 81\nnode-name = here\nenabled = false\nrun-dir = /ignored/for/the/flag\n");
        agent.signal(Signal::HUP);
        agent.wait_log("--node-name changed from none to here: takes effect when the agent starts again", SYNC);
        agent.wait_log("--enabled changed from true to false: takes effect when the agent starts again", SYNC);
        agent.wait_log("--exclude-port changed from none to 81; --log-level changed from warn to info", SYNC);
        assert_eq!(ask(at(VIP, 81)), "the VIP itself");
        assert!(!agent.log().contains("/ignored"), "{}", agent.log());
        echo::while_a_client_connects(at(VIP, 81), "the VIP itself", || {
            for ports in ["82,81", "83,82,81", "84,81", "85,81"] {
                set(&format!("exclude-port = {ports}\n"));
                agent.signal(Signal::HUP);
                agent.wait_log(&format!(" to {ports}"), SYNC);
            }
        });

        for (text, needle) in [
            ("exclude-port = 0\n", "invalid value '0' for '--exclude-port"),
            ("exclude-cgroup = /nowhere\n", "--exclude-cgroup /nowhere: No such file"),
            ("node-name = here\nexclude-prot = 81\n", "line 2: \"exclude-prot\" is not a setting"),
            ("apiserver = https://192.0.2.1\nlog-level\n", "line 2: \"log-level\" has no value"),
        ] {
            set(text);
            agent.signal(Signal::HUP);
            let line = agent.wait_log(needle, SYNC);
            assert!(line.contains("SIGHUP: ") && line.ends_with("; all settings stay as they are"), "{line}");
            assert_eq!(ask(at(VIP, 81)), "the VIP itself", "{text}");
        }

        set("exclude-port = 82\n");
        agent.signal(Signal::HUP);
        set("balance = round-robin\nlog-level = debug\n");
        agent.signal(Signal::HUP);
        agent.wait_log(
            "to none; --balance changed from random to round-robin; --log-level changed from info to debug",
            SYNC,
        );
        assert!(is_refused());
        agent.signal(Signal::HUP);
        agent.wait_log("no setting has changed", SYNC);
    });
    assert_eq!(agent.exit_status(), None);
    assert!(agent.stop().success());
}

#[test]
fn a_hangup_applies_other_addresses_of_node_and_vm() {
    let service = Service::new("web").cluster_ips([VIP]).tcp("http", PORT, TCP).node_port(30080);
    let service = service.spec("type", json!("LoadBalancer")).load_balancer_ip("203.0.113.1");
    let service = service.spec("loadBalancerSourceRanges", json!(["10.1.0.0/16"]));
    let sandbox = Sandbox::for_test();
    manifest::write(
        &sandbox.manifest_dir(),
        "web.json",
        [service.into(), Slice::v4("web").tcp("http", TCP).ready([POD]).into()],
    );
    let file = sandbox.dir().join("cproxy.conf");
    replace(&file, "");
    let agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).env("CPROXY_CONFIG", &file).spawn();
    let mut world = World { agent, servers: Vec::new(), sandbox };
    world.agent.wait_ready(SYNC);
    for (text, node_port, action) in [
        ("node-ip = 192.0.2.7\n", Some("192.0.2.7"), "drop"),
        ("node-ip = 192.0.2.8\npod-ip = 10.1.0.1\n", Some("192.0.2.8"), "forward"),
        ("pod-ip = 10.1.0.2, 10.2.0.1\n", None, "forward"),
        ("pod-ip = 10.2.0.1\n", None, "drop"),
        ("pod-ip = 10.1.0.1\n", None, "forward"),
        ("", None, "drop"),
    ] {
        replace(&file, text);
        world.agent.signal(Signal::HUP);
        world.wait(|rows| {
            let of = |source: &str| rows.iter().find(|row| row["source"] == source);
            of("NodePort").and_then(|row| row["address"].as_str()) == node_port
                && of("LoadBalancerIP").is_some_and(|row| row["action"] == action)
        });
    }
}

#[test]
fn each_setting_is_shown_with_its_origin_and_the_level_of_the_log_can_be_set() {
    let sandbox = Sandbox::for_test();
    let file = sandbox.dir().join("cproxy.conf");
    replace(&file, "# settings\nnode-name = here\nbalance = round-robin\nexclude-port = 53,54\n");
    let agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir());
    let mut agent = agent.env("CPROXY_CONFIG", &file).env("CPROXY_BALANCE", "random").start();
    let row = |name: &str| {
        let Value::Array(rows) = cproxy(&sandbox, &["get", "config", "-o", "json"]).success().json() else {
            return None;
        };
        let row = rows.into_iter().find(|row| row["name"] == name)?;
        assert_ne!(row["value"], "", "what has no value is null");
        Some((row["value"].as_str()?.to_owned(), row["origin"].as_str()?.to_owned()))
    };
    let expect = |name: &str, value: &str, origin: &str| {
        assert_eq!(row(name), Some((value.to_owned(), origin.to_owned())), "{name}");
    };
    expect("manifests", sandbox.manifest_dir().to_str().unwrap(), "flag");
    expect("balance", "random", "environment");
    expect("node-name", "here", &format!("{}, line 2", file.display()));
    expect("exclude-port", "53,54", &format!("{}, line 4", file.display()));
    expect("terminate-sockets", "udp", "default");
    assert_eq!(row("tls-server-name").or_else(|| row("bootstrap")), None, "it has no value");
    let text = cproxy(&sandbox, &["get", "config"]).success().stdout;
    assert!(text.starts_with("SETTING ") && text.contains("node-name"), "{text}");

    let is_debugging = |agent: &mut process::RunningAgent| {
        manifest::write(&sandbox.manifest_dir(), "web.json", http_service("web", VIP, [POD]));
        agent.wait_log("DEBUG writing", SYNC);
    };
    cproxy(&sandbox, &["set", "log-level", "debug"]).success();
    expect("log-level", "debug", "cproxy set");
    assert!(agent.log().contains(" log level is now debug (cproxy set)"), "{}", agent.tail());
    is_debugging(&mut agent);
    agent.signal(Signal::HUP);
    agent.wait_log("settings were read again", SYNC);
    expect("log-level", "info", "default");
    replace(&file, "# settings\n\n\nexclude-port = 53,54\nnode-name = there\nterminate-sockets = udp\n");
    agent.signal(Signal::HUP);
    agent.wait_log("--node-name changed from here to there", SYNC);
    agent.wait_until(SYNC, "the second line about it", |agent| match agent.log().matches("were read again").count() {
        2 => Ok(()),
        count => Err(count),
    });
    expect("terminate-sockets", "udp", &format!("{}, line 6", file.display()));
    expect("exclude-port", "53,54", &format!("{}, line 4", file.display()));
    expect("node-name", "here", &format!("{}, line 2 at the start", file.display()));
    let wrong = cproxy(&sandbox, &["set", "log-level", "loud"]);
    assert!(wrong.code == 2 && wrong.stderr.contains("loud"), "{}", wrong.stderr);
    assert!(agent.stop().success());
    for command in [&["set", "log-level", "warn"][..], &["get", "config"]] {
        let silent = cproxy(&sandbox, command);
        assert!(silent.code == 1 && silent.stderr.contains("no agent runs"), "{}", silent.stderr);
    }
}

#[test]
fn a_report_for_support_has_all_parts_and_no_secrets() {
    let world = World::builder().prepare(serve).objects(http_service("web", VIP, [POD])).start();
    let dir = world.sandbox.dir();
    let parts = |arguments: &[&str], name: &str| {
        let file = dir.join(name);
        let output = ["bugreport", "--file", file.to_str().unwrap()];
        let report = cproxy(&world.sandbox, &[&output[..], arguments].concat()).success();
        assert_eq!(report.stdout.trim(), file.to_str().unwrap());
        assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
        let mut command = Command::new("tar");
        command.args(["--extract", "--to-stdout", "--file"]).arg(&file);
        let text = command.output().unwrap();
        assert!(text.status.success());
        let list = Command::new("tar").arg("--list").arg("--file").arg(&file).output().unwrap();
        let [list, text] = [list.stdout, text.stdout].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        (list, text)
    };
    let (names, text) = parts(&[], "plain.tar");
    for name in [
        "check.json",
        "services.json",
        "sockets.json",
        "counters.json",
        "policy.json",
        "denials.json",
        "log.txt",
        "agent/status",
    ] {
        assert!(names.contains(&format!("cproxy-bugreport/{name}\n")), "{name}: {names}");
    }
    for part in ["default/web", VIP, POD, "ready after", "terminate-sockets", "Linux version"] {
        assert!(text.contains(part), "{part}");
    }
    let (_, text) = parts(&["--hide-addresses"], "hidden.tar");
    assert!(text.contains("default/web") && text.contains("address-1"), "{text}");
    assert!(!text.contains(VIP) && !text.contains(POD), "{text}");
    let again = cproxy(&world.sandbox, &["bugreport", "-f", dir.join("plain.tar").to_str().unwrap()]);
    assert!(
        again.code == 1 && again.stderr.contains("plain.tar") && again.stderr.contains("exists"),
        "{}",
        again.stderr
    );
}
