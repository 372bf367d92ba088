//! The end of a relay, its bounds, and new settings while it runs.

use std::{fs, process::ExitStatus, time::Duration};

use cproxy_tests::{
    process::{Agent, Signal, eventually},
    relay_server::{RunningRelay, cproxy_relay},
    sandbox::Sandbox,
};

use rustix::fs::{CWD, FileType, Mode, mknodat};

use crate::{
    access::{create_account, names, stranger, token},
    client::{Client, Version, Watching},
    fixture::{Cluster, PATIENCE, RELAY, SERVICES, World, service},
};

/// Second replica.
const SECOND: &str = "127.0.0.1:7543";
const SECOND_METRICS: &str = "127.0.0.1:9543";

fn wait_for_begin(watching: &Watching) {
    eventually(PATIENCE, "the watch has begun", || watching.response().map(drop).ok_or("not yet"));
}

#[test]
fn clients_of_a_relay_that_stops_are_asked_to_move() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let mut relay = cluster.open_relay().args(["--drain-seconds", "3"]).start();
    let client = cluster.relay_client();
    let target = format!("{SERVICES}?watch=true&allowWatchBookmarks=true&resourceVersion=0");
    let mut watches = [Version::Http1, Version::Http2].map(|version| client.clone().version(version).watch(&target));
    watches.iter().for_each(wait_for_begin);
    relay.signal(Signal::TERM);
    let metrics = Client::new(&sandbox, "http://127.0.0.1:9443");
    eventually(Duration::from_secs(3), "the relay is not ready", || match metrics.get("/readyz") {
        response if response.code == 503 => Ok(()),
        response => Err(response.text()),
    });
    for watching in &mut watches {
        assert!(watching.wait(PATIENCE).success(), "the watch ends in an orderly way");
        let events = watching.events();
        assert_eq!(events.last().unwrap()["type"], "BOOKMARK", "{events:?}");
    }
    let status = relay.wait(PATIENCE).expect("the relay ends");
    assert!(status.success(), "{status}: {}", relay.tail());
}

/// Lists and watches of Services that a relay has begun.
fn requests(relay: &RunningRelay, verb: &str) -> f64 {
    let name = format!("cproxy_relay_requests_total{{resource=\"services\",verb=\"{verb}\",code=\"200\"}}");
    let text = relay.metrics();
    text.lines().find_map(|line| line.strip_prefix(&name)?.trim().parse().ok()).unwrap_or(0.0)
}

#[test]
fn an_agent_goes_on_at_another_replica_without_a_list() {
    assert_goes_on(|relay| relay.terminate(PATIENCE));
}

#[test]
fn an_agent_goes_on_without_a_list_when_its_replica_is_killed() {
    assert_goes_on(|relay| relay.kill());
}

fn assert_goes_on(end: impl FnOnce(&mut RunningRelay) -> ExitStatus) {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let first = || cluster.tls_relay().args(["--drain-seconds", "1"]).start();
    let mut relay = first();
    let second = cluster.with_tls(cluster.relay()).listen(SECOND).metrics(SECOND_METRICS.parse().unwrap()).start();
    let kubeconfig = cluster.kubeconfig("admin", "agent", &cluster.control_plane.server_url());
    let servers = format!("https://{RELAY},https://{SECOND}");
    let agent = Agent::new(&sandbox).kubeconfig(kubeconfig).args(["--apiserver", &servers]).start();
    assert_eq!((requests(&relay, "list"), requests(&second, "list")), (1.0, 0.0));
    end(&mut relay);
    eventually(PATIENCE, "the agent watches at the second replica", || match requests(&second, "watch") {
        0.0 => Err("not yet"),
        _ => Ok(()),
    });
    cluster.create(&service("team", "late"));
    eventually(PATIENCE, "the agent has the change", || {
        let table = cproxy_tests::process::cproxy(&sandbox, &["get", "services", "-o", "json"]).success().stdout;
        if table.contains("late") { Ok(()) } else { Err(table) }
    });
    assert_eq!(requests(&second, "list"), 0.0, "{}", agent.tail());
}

#[test]
fn connections_above_the_bound_are_told_to_come_back() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let relay = cluster.open_relay().args(["--max-connections", "3"]).start();
    let world = World { relay, cluster };
    let client = world.client();
    let watches: Vec<_> = (0..3).map(|_| client.watch(&format!("{SERVICES}?watch=true"))).collect();
    watches.iter().for_each(wait_for_begin);
    let refused = client.get(SERVICES);
    assert_eq!((refused.code, refused.json()["reason"].as_str()), (429, Some("TooManyRequests")));
    assert!(!refused.header("retry-after").is_empty());
    assert_eq!(client.get("/readyz").code, 200);
    drop(watches);
    eventually(PATIENCE, "there is room again", || match client.get(SERVICES).code {
        200 => Ok(()),
        code => Err(code),
    });

    let text = world.relay.metrics();
    for line in text.lines().filter(|line| !line.starts_with("# ")) {
        let (name, value) = line.rsplit_once(' ').unwrap();
        assert!(name.starts_with("cproxy_relay_") && value.parse::<f64>().is_ok(), "{line}");
    }
    assert!(world.relay.metric("cproxy_relay_connections_max_exceeded_total") >= 1.0);
}

#[test]
fn views_and_certificates_are_read_again() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::start(&sandbox, &[]);
    create_account(&cluster);
    let file = sandbox.dir().join("views.yaml");
    let views = |namespace: &str| {
        let view = format!("{{name: a, match: {{groups: ['system:serviceaccounts']}}, namespaces: [{namespace}]}}");
        fs::write(&file, format!("views: [{view}]")).unwrap();
    };
    views("team");
    let mut relay = cluster.tls_relay().arg("--views").arg(&file).start();
    let token = token(&cluster, &[]);
    let client = || stranger(&cluster).token(&token);
    assert!(names(&client(), SERVICES).contains("team/web"));
    fs::write(&file, "views: {").unwrap();
    relay.signal(Signal::HUP);
    relay.wait_log("the views stay as they are", PATIENCE);
    assert!(names(&client(), SERVICES).contains("team/web"));
    // Opening it would block.
    fs::remove_file(&file).unwrap();
    mknodat(CWD, &file, FileType::Fifo, Mode::RUSR, 0).unwrap();
    relay.signal(Signal::HUP);
    relay.wait_log("not a regular file", PATIENCE);
    assert!(names(&client(), SERVICES).contains("team/web"));
    fs::remove_file(&file).unwrap();
    views("team-a");
    // The API server uses the same files.
    cluster.control_plane.renew_authority();
    relay.signal(Signal::HUP);
    eventually(PATIENCE, "the new view and certificate are in use", || {
        if stranger(&cluster).is_refused("/healthz") {
            return Err("the old certificate is shown".to_owned());
        }
        let names = names(&client(), SERVICES);
        if names.contains("team-a/web") && !names.contains("team/web") { Ok(()) } else { Err(format!("{names:?}")) }
    });
}

#[test]
fn a_unix_socket_whose_file_is_removed_is_made_again() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let path = sandbox.dir().join("relay.sock");
    let listen = format!("unix://{}", path.display());
    let mut relay = cluster.relay().listen(listen).without_authentication().start();
    let client =
        Client::new(&sandbox, "http://localhost").args(["--unix-socket".to_owned(), path.display().to_string()]);
    assert_eq!(client.get("/readyz").code, 200);
    let wait_for_listener = || {
        let is_there = || if client.is_refused("/readyz") { Err("not yet") } else { Ok(()) };
        eventually(PATIENCE, "the relay listens again", is_there);
    };
    fs::remove_file(&path).unwrap();
    wait_for_listener();
    // The file of another process is left alone, until it is removed.
    fs::remove_file(&path).unwrap();
    fs::write(&path, "another file").unwrap();
    relay.wait_log("cannot be made again: a file that is no socket is there", PATIENCE);
    fs::remove_file(&path).unwrap();
    wait_for_listener();
    relay.terminate(PATIENCE);
    assert!(!path.exists());
}

#[test]
fn wrong_usage_exits_with_2_and_what_is_missing_outside_with_1() {
    let sandbox = Sandbox::for_test();
    let views = sandbox.dir().join("none.yaml").display().to_string();
    let address = "127.0.0.1:7443";
    for (args, code, message) in [
        (["--listen", ","].as_slice(), 2, "'--listen <ADDR>...': an address is empty; expected HOST:PORT, unix://"),
        (&["--listen", "127.0.0.1:7443,unix:///run/a,127.0.0.1:7443"], 2, "--listen 127.0.0.1:7443: the address is"),
        (&["--listen", "unix:///run/a", "unix:///run/a"], 2, "--listen unix:///run/a: the address is there twice"),
        (&["--listen", address, "--metrics-bind-address", address], 2, "--metrics-bind-address 127.0.0.1:7443: --list"),
        (&["--listen", address, "--views", &views], 1, "none.yaml: No such file or directory"),
        (&["--listen", address, "--kubeconfig", &views], 1, "none.yaml: No such file or directory"),
    ] {
        let output = cproxy_relay(&sandbox, [&["run"], args].concat());
        assert_eq!(output.code, code, "{args:?}: {output:?}");
        assert!(output.stderr.contains(message), "{args:?}: {output:?}");
    }
}
