//! A redis cluster of three shards. Each shard has a Service of its own and announces its ClusterIP, so that clients
//! that are sent from one shard to another follow ClusterIPs as well.

use std::{
    net::SocketAddr,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cproxy_benches::{
    arena::{Arena, Peer, Subject},
    report::Report,
};
use cproxy_tests::{process::Daemon, sandbox::Sandbox};

use crate::{PREFIX, Plan, contest, contest::Rounds, redis, servers};

const ROUNDS: Rounds = Rounds::of_all(6);
const SERVICES: [u32; 2] = [10, 5_000];

/// Number of hash slots of a redis cluster.
const SLOTS: usize = 16_384;

/// How long the shards may take to find each other.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn run(plan: &Plan) -> Result<Report> {
    let sandbox = Sandbox::new(PREFIX);
    let _shards = shards(&sandbox)?;
    let mut arena = plan.arena(&sandbox, &servers::SHARDS)?;
    let mut report = servers::report("redis-cluster", &arena);
    report.add_version("redis", "redis-server", &["--version"]);
    let (mut staying, mut short) = (Vec::new(), Vec::new());
    let (all, few) = if plan.quick { ("2000", "500") } else { ("200000", "40000") };
    let rounds = plan.rounds(ROUNDS);
    for services in plan.services(&SERVICES) {
        for (keep_alive, requests, into) in [("1", all, &mut staying), ("0", few, &mut short)] {
            into.extend(plan.at_each(&mut arena, &[services], &mut report.failures, |arena| {
                check(arena)?;
                let participants = contest::participants(arena);
                let [first, ..] = &servers::SHARDS;
                Ok(contest::measure(arena, &participants, first, &redis::METRICS, rounds, |stand, address| {
                    let mut client = stand.client("redis-benchmark");
                    client.args(["-h", &address.ip().to_string(), "-p", &address.port().to_string(), "--cluster"]);
                    client.args(["-c", redis::CLIENTS, "-n", requests, "-k", keep_alive, "-t", "get", "--csv"]);
                    redis::figures(&mut client)
                }))
            }));
        }
    }
    let title = ("redis-benchmark --cluster, connections that stay", "keep_alive");
    contest::add_with_overview(&mut report, title, 0, &staying);
    let title = ("redis-benchmark --cluster, a connection for each request", "short");
    contest::add_with_overview(&mut report, title, 0, &short);
    report.notes.push(format!(
        "Three shards without replicas, each with a Service; redis-benchmark --cluster -t get -c {}, -n {all} with -k \
         1 and -n {few} with -k 0, with a thread for each shard, which ends a run at a quarter of a second; {rounds}. \
         Each shard announces its ClusterIP. The servers' namespace has these addresses, too, by which the shards \
         reach each other and the direct connection reaches them; before each measurement, every other peer must \
         arrive at each shard's own address.",
        redis::CLIENTS
    ));
    Ok(report)
}

/// Starts the shards, and waits until they are a cluster.
fn shards(sandbox: &Sandbox) -> Result<Vec<Daemon>> {
    let mut daemons = Vec::new();
    for (number, shard) in servers::SHARDS.iter().enumerate() {
        daemons.push(servers::redis_shard(sandbox, shard)?);
        let from = SLOTS * number / servers::SHARDS.len();
        let until = SLOTS * (number + 1) / servers::SHARDS.len() - 1;
        ask(sandbox, shard, &["cluster", "addslotsrange", &from.to_string(), &until.to_string()])?;
        // Without an epoch of its own, each shard would take part in settling which has which.
        ask(sandbox, shard, &["cluster", "set-config-epoch", &(number + 1).to_string()])?;
    }
    let [first, others @ ..] = &servers::SHARDS;
    for other in others {
        ask(sandbox, first, &["cluster", "meet", &other.vip.ip().to_string(), &other.vip.port().to_string()])?;
    }
    let deadline = Instant::now() + PATIENCE;
    for shard in &servers::SHARDS {
        loop {
            let info = ask(sandbox, shard, &["cluster", "info"])?;
            if info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3") {
                break;
            }
            ensure!(Instant::now() < deadline, "the shards are no cluster within {PATIENCE:?}: {info}");
            thread::sleep(Duration::from_millis(100));
        }
    }
    Ok(daemons)
}

/// redis's answer to a command at a shard's own address.
fn ask(sandbox: &Sandbox, shard: &Subject, words: &[&str]) -> Result<String> {
    let [backend, ..] = shard.backends else { anyhow::bail!("{} has no backend", shard.name) };
    sandbox.netns().run(|| answer(&mut Command::new("redis-cli"), *backend, words))
}

fn answer(redis_cli: &mut Command, address: SocketAddr, words: &[&str]) -> Result<String> {
    redis_cli.args(["-e", "-h", &address.ip().to_string(), "-p", &address.port().to_string()]).args(words);
    let output = redis_cli.output().context("starting redis-cli")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "redis-cli {words:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    Ok(text)
}

/// Whether each proxy translates each shard's ClusterIP. Without translation the servers would answer, too.
fn check(arena: &Arena<'_>) -> Result<()> {
    for stand in arena.stands.iter().filter(|stand| stand.peer != Peer::Direct) {
        for shard in &servers::SHARDS {
            let info = answer(&mut stand.client("redis-cli"), shard.vip, &["client", "info"])?;
            let [backend, ..] = shard.backends else { anyhow::bail!("{} has no backend", shard.name) };
            ensure!(info.contains(&format!("laddr={backend} ")), "{} does not translate {}", stand.peer, shard.vip);
        }
    }
    Ok(())
}
