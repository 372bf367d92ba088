//! How evenly long-lived connections are spread over backends.

use std::collections::BTreeMap;

use anyhow::Result;
use cproxy_benches::arena::{Arena, Subject};
use cproxy_benches::report::Report;
use cproxy_tests::sandbox::Sandbox;

use crate::contest::{self, Metric};
use crate::{PREFIX, Plan, servers};

const ROUNDS: u32 = 50;
const CONNECTIONS: [u32; 2] = [40, 400];

const SUBJECTS: [Subject; 3] = [servers::TWO, servers::THREE, servers::TEN];

const METRICS: [Metric; 2] = [
    Metric { key: "most", meaning: "most loaded backend, by the mean", digits: 2, is_compared: false },
    Metric { key: "least", meaning: "least loaded backend, by the mean", digits: 2, is_compared: false },
];

pub(crate) fn run(plan: &Plan) -> Result<Report> {
    let sandbox = Sandbox::new(PREFIX);
    // The others' backends are among them.
    let _servers = servers::named_servers(&sandbox, &servers::TEN);
    let mut arena = plan.arena(&sandbox, &SUBJECTS)?;
    let mut report = servers::report("balance", &sandbox, &arena.kube_proxy().binary);
    plan.at_each(&mut arena, &plan.services(&[10]), |arena| {
        add(&mut report, arena, plan.rounds(ROUNDS));
        Ok(())
    })?;
    report.notes.push(format!(
        "Of each round the connections of the backend that has most, and of the one that has least, divided by the mean; {} \
         rounds. 1.00 is even.",
        plan.rounds(ROUNDS)
    ));
    Ok(report)
}

/// A table for each number of backends and connections.
pub(crate) fn add(report: &mut Report, arena: &mut Arena<'_>, rounds: u32) {
    for subject in SUBJECTS {
        for connections in CONNECTIONS {
            let participants = contest::participants_of_proxies(arena);
            let measured = contest::measure(arena, &participants, &subject, &METRICS, rounds, |stand, address| {
                let names = stand.worker.hold(connections, address)?;
                stand.worker.alive()?;
                Ok(imbalance(&names, &subject))
            });
            let what = format!("{connections} connections to {} backends", subject.backends.len());
            contest::add(report, &what, &what.replace(' ', "_"), &[(arena.services(), measured)]);
        }
    }
}

fn imbalance(names: &[String], subject: &Subject) -> Vec<f64> {
    let mut counts: BTreeMap<String, u32> =
        subject.backends.iter().map(|backend| (backend.ip().to_string(), 0)).collect();
    names.iter().for_each(|name| *counts.entry(name.clone()).or_default() += 1);
    let mean = names.len() as f64 / counts.len() as f64;
    let ratio = |count: Option<&u32>| f64::from(count.copied().unwrap_or_default()) / mean;
    vec![ratio(counts.values().max()), ratio(counts.values().min())]
}
