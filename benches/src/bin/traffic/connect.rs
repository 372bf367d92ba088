//! connect(2), call by call.

use anyhow::{Context as _, Result};
use cproxy_benches::{
    arena::{Arena, Peer, worker::Took},
    report::{Report, Target},
    summary::percentiles,
};
use cproxy_tests::sandbox::Sandbox;

use crate::{
    Plan,
    contest::{self, Measured, Metric, Rounds},
    live, servers,
};

/// Number of connections of one peer in one round.
pub(crate) const BATCH: u32 = 1_000;
pub(crate) const ROUNDS: Rounds = Rounds::of_all(100);
const SERVICES: [u32; 4] = [10, 100, 1_000, 5_000];
const MANY_SERVICES: [u32; 2] = [20_000, 50_000];

pub(crate) const METRICS: [Metric; 6] = [
    Metric { key: "p50_us", meaning: "connect(2), p50, us", digits: 1, is_compared: true },
    Metric { key: "p90_us", meaning: "p90, us", digits: 1, is_compared: true },
    Metric { key: "p99_us", meaning: "p99, us", digits: 1, is_compared: true },
    Metric { key: "p999_us", meaning: "p99.9, us", digits: 0, is_compared: false },
    Metric { key: "whole_p50_us", meaning: "socket(), connect(), close(), p50, us", digits: 1, is_compared: true },
    Metric { key: "first_us", meaning: "connect(2), the first of a round, us", digits: 1, is_compared: true },
];

/// Index in [`METRICS`].
pub(crate) const P50: usize = 0;
const P99: usize = 2;
const WHOLE: usize = 4;

/// Limit on the ratio to the direct connection, and on the ratio of the most Services to the fewest.
const TARGET: f64 = 1.03;

pub(crate) fn run(plan: &Plan) -> Result<Report> {
    if plan.live {
        return live::run(plan);
    }
    let sizes: [&[u32]; 2] = [&SERVICES, &MANY_SERVICES];
    let serve = |sandbox: &Sandbox| servers::sink(sandbox, &servers::SINK);
    let (mut report, all) =
        plan.at_each_and_many("connect", servers::SINK, sizes, serve, |arena| Ok(measure(arena, plan.rounds(ROUNDS))))?;
    contest::add(&mut report, "connect(2)", "connect", &all);
    let mut verdicts = contest::verdicts(&all, (P50, Peer::Direct), Target::AtMost(TARGET), |_| true);
    verdicts.extend(contest::flatness(&all, P50, TARGET));
    verdicts.extend(contest::verdicts(&all, (P99, Peer::Direct), Target::AtMost(1.0), |_| true));
    if plan.quick {
        verdicts.clear();
    }
    if plan.services.is_empty() && plan.peers.is_empty() {
        verdicts.extend(live::add(&mut report, plan)?);
    }
    contest::add_verdicts(&mut report, &verdicts);
    report.summary.extend([P50, WHOLE].into_iter().filter_map(|metric| contest::summary("Connections", metric, &all)));
    report.notes.push(format!(
        "A round is {BATCH} connections of each participant, one after the other, each closed with a reset; {}. The \
         first connection of a round comes after all other turns, so its memory is cold. A veth pair joins the \
         namespace of a peer's clients, which has its rules, and that of the server.",
        plan.rounds(ROUNDS)
    ));
    Ok(report)
}

/// Measures with the current number of Services.
pub(crate) fn measure(arena: &mut Arena<'_>, rounds: Rounds) -> Measured {
    let participants = contest::participants_and_bystanders(arena);
    contest::measure(arena, &participants, &servers::SINK, &METRICS, rounds, |stand, address| {
        figures(&stand.worker.connect(BATCH, address)?)
    })
}

/// The figures of [`METRICS`].
pub(crate) fn figures(took: &[Took]) -> Result<Vec<f64>> {
    let us = |ns: u32| f64::from(ns) / 1e3;
    let calls = percentiles(took.iter().map(|took| us(took.connect_ns)), [500, 900, 990, 999]);
    let whole = percentiles(took.iter().map(|took| us(took.whole_ns)), [500]);
    let first = took.first().map(|took| us(took.connect_ns));
    let ((calls, whole), first) = calls.zip(whole).zip(first).context("no connection was made")?;
    Ok(calls.into_iter().chain(whole).chain([first]).collect())
}
