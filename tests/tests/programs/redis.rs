//! Redis: many requests under way at once, connections that are idle for long, many connections.

use std::{
    net::{IpAddr, SocketAddr},
    os::unix::process::CommandExt as _,
    process::Command,
    thread,
    time::Duration,
};

use cproxy_tests::{
    process::{Daemon, eventually},
    sandbox::Placement,
};

use crate::fixture::{Cluster, DOWN, OFFSET, PATIENCE, PODS, REDIS, WEB, pod_addresses, pod_name, pod_number, vips};

const SETS: usize = 10_000;
const IDLE: Duration = Duration::from_secs(3);

fn redis_cli(address: IpAddr, port: u16) -> Command {
    let mut command = Command::new("redis-cli");
    command.args(["-h", &address.to_string(), "-p", &port.to_string()]);
    command
}

/// Answer of a Service's or a pod's redis.
fn ask(cluster: &Cluster, address: IpAddr, port: u16, request: &[&str]) -> String {
    let mut command = redis_cli(address, port);
    command.args(request);
    cluster.run(command).success().stdout.trim().to_owned()
}

fn ask_vip(cluster: &Cluster, vip: IpAddr, request: &[&str]) -> String {
    ask(cluster, vip, REDIS, request)
}

fn ask_pod(cluster: &Cluster, pod: u8, request: &[&str]) -> String {
    ask(cluster, pod_addresses(pod)[0], REDIS + OFFSET, request)
}

/// A number from the pod's `INFO`.
fn number(cluster: &Cluster, pod: u8, field: &str) -> u64 {
    let info = ask_pod(cluster, pod, &["INFO"]);
    let value = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("no {field} in {info}"))
}

fn serve(cluster: &Cluster) -> [Daemon; 3] {
    PODS.map(|pod| {
        // Both programs are the same file, and Debian's package with the name redis-server starts a service.
        let mut server = Command::new("redis-check-rdb");
        server.arg0("redis-server").args(["--save", "", "--appendonly", "no", "--protected-mode", "no"]);
        server.args(["--dir", &cluster.world.sandbox.dir().display().to_string()]);
        server.args(["--port", &(REDIS + OFFSET).to_string(), "--bind"]);
        server.args(pod_addresses(pod).map(|address| address.to_string()));
        let mut daemon = Daemon::spawn(&cluster.world.sandbox, "redis-server", Placement::Unhooked, server);
        daemon.wait_log("Ready to accept connections", PATIENCE);
        assert_eq!(ask_pod(cluster, pod, &["SET", "name", &pod_name(pod)]), "OK");
        daemon
    })
}

#[test]
fn redis() {
    let cluster = Cluster::start();
    let _servers = serve(&cluster);
    assert_answers(&cluster);
    assert_many_requests_at_once(&cluster);
    keeps_an_idle_connection(&cluster);
    assert_many_connections(&cluster);
}

fn assert_answers(cluster: &Cluster) {
    for vip in vips(WEB) {
        assert_eq!(ask_vip(cluster, vip, &["PING"]), "PONG");
        assert!(PODS.contains(&pod_number(&ask_vip(cluster, vip, &["GET", "name"]))));
    }
    for vip in vips(DOWN) {
        let mut ping = redis_cli(vip, REDIS);
        ping.arg("PING");
        let output = cluster.run(ping);
        assert!(output.code == 1 && output.stderr.contains("Connection refused"), "{output:?}");
    }
}

fn assert_many_requests_at_once(cluster: &Cluster) {
    let requests: String = (0..SETS).map(|number| format!("SET key:{number} {number}\r\n")).collect();
    for vip in vips(WEB) {
        let mut pipe = redis_cli(vip, REDIS);
        pipe.arg("--pipe");
        let output = cluster.run_with_input(pipe, &requests).success();
        assert!(output.stdout.contains(&format!("errors: 0, replies: {SETS}")), "{output:?}");
        // One connection has one pod, which holds all keys beside its name.
        let mut sizes = PODS.map(|pod| ask_pod(cluster, pod, &["DBSIZE"]).parse::<usize>().unwrap());
        sizes.sort_unstable();
        assert_eq!(sizes, [1, 1, 1 + SETS]);
        for pod in PODS {
            ask_pod(cluster, pod, &["FLUSHALL"]);
            ask_pod(cluster, pod, &["SET", "name", &pod_name(pod)]);
        }
    }
}

/// Checks a client that waits for an element while its pod leaves the Service.
fn keeps_an_idle_connection(cluster: &Cluster) {
    for vip in vips(WEB) {
        let mut wait = redis_cli(vip, REDIS);
        wait.args(["BLPOP", "queue", "0"]);
        let mut client = Daemon::spawn(&cluster.world.sandbox, "redis-cli", Placement::Hooked, wait);
        let blocked = |pod: &u8| number(cluster, *pod, "blocked_clients") == 1;
        let pod = eventually(PATIENCE, "a pod has the client", || PODS.into_iter().find(blocked).ok_or("none yet"));
        let others: Vec<_> = PODS.into_iter().filter(|other| *other != pod).collect();
        cluster.set(WEB, &others);
        thread::sleep(IDLE);
        assert_eq!(ask_pod(cluster, pod, &["RPUSH", "queue", "element"]), "1");
        assert!(client.wait(PATIENCE).is_some_and(|status| status.success()), "{}", client.log());
        assert_eq!(client.log(), "queue\nelement\n");
        cluster.set(WEB, &PODS);
    }
}

fn assert_many_connections(cluster: &Cluster) {
    let connections = || PODS.map(|pod| number(cluster, pod, "total_connections_received"));
    for vip in vips(WEB) {
        let before = connections();
        let mut benchmark = Command::new("redis-benchmark");
        benchmark.args(["-h", &vip.to_string(), "-p", &REDIS.to_string()]);
        benchmark.args(["-n", "2000", "-c", "50", "-t", "set,get", "--csv"]);
        let output = cluster.run(benchmark).success();
        assert!(output.stdout.contains("\"SET\"") && output.stdout.contains("\"GET\""), "{output:?}");
        let after = connections();
        // Even choices leave one of three out of 50 connections once in 10^8 runs, and each command has its own 50.
        // Each query costs every pod one connection.
        let new: Vec<_> = after.iter().zip(before).map(|(after, before)| after - before - 1).collect();
        assert!(new.iter().all(|&new| new > 0), "{}: {new:?}", SocketAddr::new(vip, REDIS));
    }
}
