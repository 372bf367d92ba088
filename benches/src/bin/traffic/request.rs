//! A whole short HTTP request on a connection of its own, one after the other.

use anyhow::{Context as _, Result};
use cproxy_benches::{
    arena::{Arena, Peer},
    report::{Report, Target},
    summary::percentiles,
};
use cproxy_tests::sandbox::Sandbox;

use crate::{
    Plan,
    contest::{self, Measured, Metric, Rounds},
    servers,
};

/// Number of requests of one peer in one round.
const BATCH: u32 = 400;
const ROUNDS: Rounds = Rounds::of_all(40);
const SERVICES: [u32; 2] = [10, 5_000];
const MANY_SERVICES: [u32; 1] = [20_000];

const METRICS: [Metric; 3] = [
    Metric { key: "p50_us", meaning: "whole request, p50, us", digits: 1, is_compared: true },
    Metric { key: "p90_us", meaning: "p90, us", digits: 1, is_compared: true },
    Metric { key: "p99_us", meaning: "p99, us", digits: 1, is_compared: true },
];

/// Index in [`METRICS`].
const P50: usize = 0;

/// Limit on the ratio to the direct connection.
const TARGET: f64 = 1.03;

pub(crate) fn run(plan: &Plan) -> Result<Report> {
    let sizes: [&[u32]; 2] = [&SERVICES, &MANY_SERVICES];
    let serve = |sandbox: &Sandbox| servers::nginx(sandbox, &servers::WEB);
    let (mut report, all) =
        plan.at_each_and_many("request", servers::WEB, sizes, serve, |arena| Ok(measure(arena, plan.rounds(ROUNDS))))?;
    report.add_version("nginx", "nginx", &["-v"]);
    let title = ("one HTTP request after the other, each with its connection", "request");
    contest::add_with_overview(&mut report, title, P50, &all);
    if !plan.quick {
        let mut verdicts = contest::verdicts(&all, (P50, Peer::Direct), Target::AtMost(TARGET), |_| true);
        verdicts.extend(contest::flatness(&all, P50, TARGET));
        contest::add_verdicts(&mut report, &verdicts);
    }
    report.notes.push(format!(
        "A round is {BATCH} requests of each participant to nginx, one after the other; {}. A request's time goes from \
         before socket(2) until nginx has closed the connection.",
        plan.rounds(ROUNDS)
    ));
    Ok(report)
}

/// Measures with the current number of Services.
pub(crate) fn measure(arena: &mut Arena<'_>, rounds: Rounds) -> Measured {
    let participants = contest::participants(arena);
    contest::measure(arena, &participants, &servers::WEB, &METRICS, rounds, |stand, address| {
        let took = stand.worker.request(BATCH, address)?;
        let took = took.iter().map(|ns| f64::from(*ns) / 1e3);
        Ok(percentiles(took, [500, 900, 990]).context("no request was made")?.into())
    })
}
