//! connect(2), call by call.

use anyhow::{Context as _, Result};
use cproxy_benches::arena::Arena;
use cproxy_benches::report::Report;
use cproxy_benches::summary::percentiles;
use cproxy_tests::sandbox::Sandbox;

use crate::contest::{self, Measured, Metric};
use crate::{Plan, servers};

/// Connections of one peer in one round.
const BATCH: u32 = 1_000;
const ROUNDS: u32 = 100;
const SERVICES: [u32; 4] = [10, 100, 1_000, 5_000];
const MANY_SERVICES: [u32; 2] = [20_000, 50_000];

const METRICS: [Metric; 4] = [
    Metric { key: "p50_us", meaning: "connect(2), p50, us", digits: 1, is_compared: true },
    Metric { key: "p90_us", meaning: "p90, us", digits: 1, is_compared: true },
    Metric { key: "p99_us", meaning: "p99, us", digits: 1, is_compared: true },
    Metric { key: "p999_us", meaning: "p99.9, us", digits: 0, is_compared: false },
];

pub(crate) fn run(plan: &Plan) -> Result<Report> {
    let sizes: [&[u32]; 2] = [&SERVICES, &MANY_SERVICES];
    let serve = |sandbox: &Sandbox| servers::sink(sandbox, &servers::SINK);
    let (mut report, all) =
        plan.at_each_and_many("connect", servers::SINK, sizes, serve, |arena| Ok(measure(arena, plan.rounds(ROUNDS))))?;
    contest::add(&mut report, "connect(2)", "connect", &all);
    report.charts.push(contest::chart("p50", "Median time of connect(2) through a ClusterIP", 0, &all));
    report.notes.push(format!(
        "A round is {BATCH} connections of each, one after the other, each closed with a reset; {} rounds. A peer's clients, its \
         rules and the server are joined by a veth pair. \"To the pod\" connects to the pod's own address where the peer's rules \
         are in force: what the rest of a pod's traffic pays.",
        plan.rounds(ROUNDS)
    ));
    Ok(report)
}

/// At the number of Services that there are now.
pub(crate) fn measure(arena: &mut Arena<'_>, rounds: u32) -> Measured {
    let participants = contest::participants_and_bystanders(arena);
    contest::measure(arena, &participants, &servers::SINK, &METRICS, rounds, |stand, address| {
        let took_ns = stand.worker.connect(BATCH, address)?;
        let took_us = took_ns.into_iter().map(|ns| f64::from(ns) / 1e3);
        percentiles(took_us, [500, 900, 990, 999]).map(Vec::from).context("no connection was made")
    })
}
