//! wrk with short HTTP connections to nginx.

use std::{fs, process::Command};

use anyhow::{Context as _, Result, ensure};
use cproxy_benches::{
    arena::{Arena, Peer},
    report::{Report, Target},
};
use cproxy_tests::sandbox::Sandbox;

use crate::{
    Plan,
    contest::{self, Measured, Metric, Participant, Rounds},
    servers,
};

const CONNECTIONS: u32 = 2_000;
const THREADS: u32 = 2;
const ROUNDS: Rounds = Rounds { of_all: 6, of_compared: 20 };
const SECONDS: u32 = 3;
const SERVICES: [u32; 4] = [10, 100, 1_000, 5_000];
const MANY_SERVICES: [u32; 1] = [20_000];

const METRICS: [Metric; 6] = [
    Metric { key: "requests_per_second", meaning: "requests/s", digits: 0, is_compared: true },
    Metric { key: "p50_ms", meaning: "latency p50, ms", digits: 1, is_compared: false },
    Metric { key: "p90_ms", meaning: "p90, ms", digits: 1, is_compared: false },
    Metric { key: "p99_ms", meaning: "p99, ms", digits: 1, is_compared: true },
    Metric { key: "p999_ms", meaning: "p99.9, ms", digits: 1, is_compared: false },
    Metric { key: "errors", meaning: "errors", digits: 0, is_compared: false },
];

/// Index in [`METRICS`].
const THROUGHPUT: usize = 0;
const P99: usize = 3;

/// Least ratio to the direct connection's requests per second.
const OF_DIRECT: f64 = 0.98;
/// Least ratio to kube-proxy's mode iptables, with at least this many Services.
const OF_IPTABLES: f64 = 1.2;
const AT_LEAST_SERVICES: u32 = 5_000;

/// wrk prints no p99.9 by itself.
const SCRIPT: &str = r#"
done = function(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format("result %d %d %d %d %d %d %d\n", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(90), latency:percentile(99), latency:percentile(99.9),
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
"#;

pub(crate) fn run(plan: &Plan) -> Result<Report> {
    let seconds = if plan.quick { 1 } else { SECONDS };
    let sizes: [&[u32]; 2] = [&SERVICES, &MANY_SERVICES];
    let serve = |sandbox: &Sandbox| servers::nginx(sandbox, &servers::WEB);
    let (mut report, all) = plan.at_each_and_many("wrk", servers::WEB, sizes, serve, |arena| {
        let participants = contest::participants_and_bystanders(arena);
        measure(arena, &participants, plan.rounds(ROUNDS), seconds)
    })?;
    report.add_version("wrk", "wrk", &["-v"]);
    report.add_version("nginx", "nginx", &["-v"]);
    let title = ("wrk, 2,000 connections, Connection: close", "wrk");
    contest::add_with_overview(&mut report, title, THROUGHPUT, &all);
    let (throughput, p99) = ((THROUGHPUT, Peer::Direct), (P99, Peer::Direct));
    let mut verdicts = contest::verdicts(&all, throughput, Target::AtLeast(OF_DIRECT), |_| true);
    verdicts.extend(contest::verdict_of_all(&all, throughput, Target::AtLeast(OF_DIRECT)));
    let at_many = |services| services >= AT_LEAST_SERVICES;
    verdicts.extend(contest::verdicts(&all, (THROUGHPUT, Peer::Iptables), Target::AtLeast(OF_IPTABLES), at_many));
    verdicts.extend(contest::verdicts(&all, p99, Target::AtMost(1.0), |_| true));
    verdicts.extend(contest::verdict_of_all(&all, p99, Target::AtMost(1.0)));
    if !plan.quick {
        contest::add_verdicts(&mut report, &verdicts);
    }
    report.notes.push(format!(
        "wrk -t {THREADS} -c {CONNECTIONS} -d {seconds}s -H 'Connection: close' to nginx with a worker for each CPU, \
         on the same CPUs; {}. \"Errors\" are connections that failed or timed out during a round. wrk's clock starts \
         when the request is sent: its latencies leave out the time of connect(), its requests per second include it.",
        plan.rounds(ROUNDS)
    ));
    Ok(report)
}

/// Measures with the current number of Services.
pub(crate) fn measure(
    arena: &mut Arena<'_>,
    participants: &[Participant],
    rounds: Rounds,
    seconds: u32,
) -> Result<Measured> {
    let script = arena.sandbox().dir().join("result.lua");
    fs::write(&script, SCRIPT).context("writing into the sandbox")?;
    Ok(contest::measure(arena, participants, &servers::WEB, &METRICS, rounds, |stand, address| {
        let mut wrk = stand.client("wrk");
        wrk.args(["-t", &THREADS.to_string(), "-c", &CONNECTIONS.to_string(), "-d", &format!("{seconds}s")]);
        wrk.args(["-H", "Connection: close", "-s"]).arg(&script).arg(format!("http://{address}/"));
        figures(&mut wrk)
    }))
}

fn figures(wrk: &mut Command) -> Result<Vec<f64>> {
    let output = wrk.output().context("starting wrk")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let result = text.lines().find_map(|line| line.strip_prefix("result "));
    let words = result.map(|line| line.split_whitespace().filter_map(|word| word.parse::<f64>().ok()));
    let words = words.map(Iterator::collect::<Vec<_>>).unwrap_or_default();
    let &[requests, duration_us, p50, p90, p99, p999, errors] = words.as_slice() else {
        anyhow::bail!("wrk: {}{text}", String::from_utf8_lossy(&output.stderr));
    };
    ensure!(requests > 0.0, "no request was answered: {text}");
    let per_second = requests / (duration_us / 1e6);
    Ok([per_second].into_iter().chain([p50, p90, p99, p999].map(|us| us / 1e3)).chain([errors]).collect())
}
