//! DNS over UDP, and one stream of many bytes.

use std::{fs, process::Command};

use anyhow::{Context as _, Result};
use cproxy_benches::{arena::Arena, report::Report};
use cproxy_tests::sandbox::Sandbox;
use serde_json::Value;

use crate::{
    PREFIX, Plan,
    contest::{self, Measured, Metric, Rounds},
    servers,
};

const ROUNDS: Rounds = Rounds::of_all(7);
const SECONDS: u32 = 3;
const SERVICES: [u32; 2] = [10, 5_000];
const NAME: &str = "known.test";

const DNS: [Metric; 3] = [
    Metric { key: "queries_per_second", meaning: "queries/s", digits: 0, is_compared: true },
    Metric { key: "latency_us", meaning: "mean latency, us", digits: 1, is_compared: true },
    Metric { key: "lost", meaning: "queries lost", digits: 0, is_compared: false },
];
const BULK: [Metric; 2] = [
    Metric { key: "gbit_per_second", meaning: "TCP, Gbit/s", digits: 2, is_compared: true },
    Metric { key: "cpu_percent", meaning: "sender's CPU, %", digits: 0, is_compared: false },
];

/// Number of sockets, and of questions under way on all of them. With one question on each socket, dnsperf spends its
/// time waiting for its own threads, and queries per second differ tenfold from round to round.
const CLIENTS: &str = "10";
const OUTSTANDING: &str = "100";

pub(crate) fn run(plan: &Plan) -> Result<Report> {
    let sandbox = Sandbox::new(PREFIX);
    let (dns, bulk) = (servers::DNS, servers::BULK);
    let _dnsmasq = servers::dnsmasq(&sandbox, &dns, NAME)?;
    let _iperf = servers::iperf(&sandbox, &bulk)?;
    let queries = sandbox.dir().join("queries");
    fs::write(&queries, format!("{NAME} A\n")).context("writing into the sandbox")?;
    let mut arena = plan.arena(&sandbox, &[dns, bulk])?;
    let mut report = servers::report("udp", &arena);
    report.versions.push(("dnsperf".to_owned(), dnsperf_version()));
    report.add_version("dnsmasq", "dnsmasq", &["--version"]);
    report.add_version("iperf3", "iperf3", &["--version"]);
    let (rounds, seconds) = (plan.rounds(ROUNDS), if plan.quick { 1 } else { SECONDS }.to_string());
    let (mut of_dns, mut of_bulk) = (Vec::new(), Vec::new());
    for services in plan.services(&SERVICES) {
        of_dns.extend(plan.at_each(&mut arena, &[services], &mut report.failures, |arena| {
            let participants = contest::participants(arena);
            Ok(contest::measure(arena, &participants, &dns, &DNS, rounds, |stand, address| {
                let mut dnsperf = stand.client("dnsperf");
                dnsperf.args(["-s", &address.ip().to_string(), "-p", &address.port().to_string(), "-l", &seconds]);
                dnsperf.args(["-c", CLIENTS, "-q", OUTSTANDING, "-d"]).arg(&queries);
                dns_figures(&mut dnsperf)
            }))
        }));
        of_bulk.extend(
            plan.at_each(&mut arena, &[services], &mut report.failures, |arena| {
                Ok(measure_bulk(arena, rounds, &seconds))
            }),
        );
    }
    contest::add_with_overview(&mut report, ("dnsperf, UDP", "dns"), 0, &of_dns);
    contest::add_with_overview(&mut report, ("iperf3, one TCP stream", "bulk"), 0, &of_bulk);
    report
        .notes
        .push(format!("dnsperf -c {CLIENTS} -q {OUTSTANDING} -l {seconds} to dnsmasq; iperf3 -t {seconds}; {rounds}."));
    Ok(report)
}

/// Measures one TCP stream with the current number of Services.
pub(crate) fn measure_bulk(arena: &mut Arena<'_>, rounds: Rounds, seconds: &str) -> Measured {
    let participants = contest::participants(arena);
    contest::measure(arena, &participants, &servers::BULK, &BULK, rounds, |stand, address| {
        let mut iperf = stand.client("iperf3");
        iperf.args(["-c", &address.ip().to_string(), "-p", &address.port().to_string(), "-t", seconds, "-J"]);
        bulk_figures(&mut iperf)
    })
}

/// Version from the second line of dnsperf's output.
fn dnsperf_version() -> String {
    let output = Command::new("dnsperf").arg("-h").output();
    let text = output.map(|output| String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned());
    let text = text.unwrap_or_default();
    text.lines().find(|line| line.starts_with("Version")).unwrap_or("unknown").to_owned()
}

fn dns_figures(dnsperf: &mut Command) -> Result<Vec<f64>> {
    let output = dnsperf.output().context("starting dnsperf")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let figure = |name: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<f64>().ok()
    };
    let figures = [figure("Queries per second:"), figure("Average Latency (s):"), figure("Queries lost:")];
    let [Some(per_second), Some(latency_s), Some(lost)] = figures else {
        anyhow::bail!("dnsperf: {}{text}", String::from_utf8_lossy(&output.stderr));
    };
    Ok(vec![per_second, latency_s * 1e6, lost])
}

fn bulk_figures(iperf: &mut Command) -> Result<Vec<f64>> {
    let output = iperf.output().context("starting iperf3")?;
    let result: Value = serde_json::from_slice(&output.stdout).context("iperf3's answer")?;
    let figure = |pointer| result.pointer(pointer).and_then(Value::as_f64);
    let figures = [figure("/end/sum_received/bits_per_second"), figure("/end/cpu_utilization_percent/host_total")];
    let [Some(bits), Some(cpu)] = figures else { anyhow::bail!("iperf3: {result}") };
    Ok(vec![bits / 1e9, cpu])
}
