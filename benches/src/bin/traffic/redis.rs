//! redis: lasting connections, short connections, a client behind a macvlan, and connections that are idle for long.

use std::{fs, net::SocketAddr, process::Command, thread, time::Duration};

use anyhow::{Context as _, Result};
use cproxy_benches::{
    arena::{Arena, Peer},
    report::{Report, Table},
};
use cproxy_tests::sandbox::Sandbox;
use serde_json::json;

use crate::{
    PREFIX, Plan,
    contest::{self, Metric, Rounds},
    servers,
};

const ROUNDS: Rounds = Rounds::of_all(20);
const SERVICES: [u32; 2] = [10, 5_000];
pub(crate) const CLIENTS: &str = "50";

pub(crate) const METRICS: [Metric; 3] = [
    Metric { key: "requests_per_second", meaning: "requests/s", digits: 0, is_compared: true },
    Metric { key: "p50_ms", meaning: "latency p50, ms", digits: 2, is_compared: true },
    Metric { key: "p99_ms", meaning: "p99, ms", digits: 2, is_compared: true },
];

/// Number of connections left idle, on a Service with several endpoints.
const IDLE: u32 = 30;
/// conntrack's timeout of established connections, by default five days, and the length of the silence.
const EXPIRY_SECONDS: &str = "3";
const SILENCE: Duration = Duration::from_secs(8);
const EXPIRY: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established";

pub(crate) fn run(plan: &Plan) -> Result<Report> {
    let sandbox = Sandbox::new(PREFIX);
    let (redis, three) = (servers::REDIS, servers::THREE);
    let _redis = servers::redis(&sandbox, &redis)?;
    let _three = servers::named_servers(&sandbox, &three);
    let mut arena = plan.arena(&sandbox, &[redis, three])?;
    let mut report = servers::report("redis", &arena);
    report.add_version("redis", "redis-server", &["--version"]);
    let (mut staying, mut short) = (Vec::new(), Vec::new());
    let (all, few) = if plan.quick { ("2000", "500") } else { ("100000", "20000") };
    for services in plan.services(&SERVICES) {
        for (keep_alive, requests, into) in [("1", all, &mut staying), ("0", few, &mut short)] {
            into.extend(plan.at_each(&mut arena, &[services], &mut report.failures, |arena| {
                let participants = contest::participants(arena);
                let rounds = plan.rounds(ROUNDS);
                Ok(contest::measure(arena, &participants, &redis, &METRICS, rounds, |stand, address| {
                    let mut client = stand.client("redis-benchmark");
                    client.args(["-h", &address.ip().to_string(), "-p", &address.port().to_string(), "-c", CLIENTS]);
                    client.args(["-n", requests, "-k", keep_alive, "-t", "get", "--csv"]);
                    figures(&mut client)
                }))
            }));
        }
    }
    let title = ("redis-benchmark, connections that stay", "keep_alive");
    contest::add_with_overview(&mut report, title, 0, &staying);
    let title = ("redis-benchmark, a connection for each request", "short");
    contest::add_with_overview(&mut report, title, 0, &short);
    report.notes.push(format!(
        "redis-benchmark -t get -c {CLIENTS}, -n {all} with -k 1 and -n {few} with -k 0; {}. Its latencies, like those \
         of wrk, leave out connect().",
        plan.rounds(ROUNDS)
    ));
    idle(&mut arena, &mut report)?;
    macvlan(&mut arena, &redis.vip, &mut report)?;
    Ok(report)
}

/// `"test","rps","avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms","p99_latency_ms","max_latency_ms"`
pub(crate) fn figures(client: &mut Command) -> Result<Vec<f64>> {
    let output = client.output().context("starting redis-benchmark")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find(|line| line.starts_with("\"GET\""));
    let words = line.map(|line| line.split(',').filter_map(|word| word.trim_matches('"').parse().ok()).collect());
    let words: Vec<f64> = words.unwrap_or_default();
    let &[per_second, _, _, p50, _, p99, _] = words.as_slice() else {
        anyhow::bail!("redis-benchmark: {}{text}", String::from_utf8_lossy(&output.stderr));
    };
    Ok(vec![per_second, p50, p99])
}

/// Connections that are idle for longer than conntrack remembers them.
pub(crate) fn idle(arena: &mut Arena<'_>, report: &mut Report) -> Result<()> {
    for stand in &mut arena.stands {
        // The file is absent where conntrack is not in use.
        stand.netns.run(|| fs::write(EXPIRY, EXPIRY_SECONDS)).ok();
        let address = stand.address(&servers::THREE);
        stand.worker.hold(IDLE, address).with_context(|| format!("{}: idle connections", stand.peer))?;
    }
    thread::sleep(SILENCE);
    let mut alive = Vec::new();
    for stand in &mut arena.stands {
        alive.push((stand.peer, stand.worker.alive()?));
    }
    report.tables.push(Table {
        title: format!(
            "connections to 3 endpoints, idle for {} s, conntrack's timeout {EXPIRY_SECONDS} s",
            SILENCE.as_secs()
        ),
        columns: alive.iter().map(|(peer, _)| peer.to_string()).collect(),
        rows: vec![("alive".to_owned(), alive.iter().map(|(_, alive)| format!("{alive} of {IDLE}")).collect())],
    });
    let json = alive.iter().map(|(peer, alive)| (peer.to_string(), json!(alive)));
    report.add_samples("idle_alive", json.collect::<serde_json::Map<_, _>>().into());
    report.notes.push(format!(
        "Idle connections: conntrack forgets an established connection after 5 days, IPVS after 15 minutes; here \
         nf_conntrack_tcp_timeout_established and kube-proxy's ipvs.tcpTimeout are {EXPIRY_SECONDS} s. A connection \
         that iptables or nftables has forgotten survives only where the rules happen to choose the same endpoint \
         again."
    ));
    Ok(())
}

/// A pod on a macvlan interface of its node. Its packets bypass the node's own network stack, and with it the rules.
fn macvlan(arena: &mut Arena<'_>, vip: &SocketAddr, report: &mut Report) -> Result<()> {
    let mut cells = Vec::new();
    for (number, stand) in arena.stands.iter().enumerate() {
        let outcome = match arena.behind_macvlan(stand, number as u8) {
            Ok(mut pod) => match pod.worker.connect(1, *vip) {
                Ok(_) => "reached".to_owned(),
                Err(error) => format!("not reached: {error:#}"),
            },
            Err(error) => format!("not measured: {error:#}"),
        };
        // The direct connection has no rules, so the ClusterIP has no route.
        if stand.peer != Peer::Direct {
            cells.push((stand.peer.to_string(), outcome));
        }
    }
    report.tables.push(Table {
        title: "the ClusterIP from a pod on a macvlan interface of the node".to_owned(),
        columns: cells.iter().map(|(peer, _)| peer.clone()).collect(),
        rows: vec![("connect(2)".to_owned(), cells.iter().map(|(_, outcome)| outcome.clone()).collect())],
    });
    let json = cells.into_iter().map(|(peer, outcome)| (peer, json!(outcome)));
    report.add_samples("macvlan", json.collect::<serde_json::Map<_, _>>().into());
    Ok(())
}
