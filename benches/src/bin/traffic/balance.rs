//! Evenness of long-lived connections over backends.

use std::{collections::BTreeMap, mem::take};

use anyhow::{Context as _, Result};
use cproxy_benches::{
    arena::{Arena, Cluster, Peer, Subject},
    report::Report,
};
use cproxy_tests::sandbox::Sandbox;

use crate::{
    PREFIX, Plan,
    contest::{self, Measured, Metric, Rounds},
    servers,
};

const ROUNDS: Rounds = Rounds::of_all(50);
const CONNECTIONS: [u32; 2] = [40, 400];

const SUBJECTS: [Subject; 3] = [servers::TWO, servers::THREE, servers::TEN];

const METRICS: [Metric; 2] = [
    Metric { key: "most", meaning: "most loaded backend, divided by the mean", digits: 2, is_compared: false },
    Metric { key: "least", meaning: "least loaded backend, divided by the mean", digits: 2, is_compared: false },
];

pub(crate) fn run(plan: &Plan) -> Result<Report> {
    let rounds = plan.rounds(ROUNDS);
    let mut report = None;
    let mut found = Vec::new();
    // cproxy's two modes cannot be in force at the same time.
    let others = plan.peers().contains(&Peer::Cproxy).then_some(&[Peer::CproxyRoundRobin][..]);
    for peers in [plan.peers()].into_iter().chain(others) {
        let sandbox = Sandbox::new(PREFIX);
        // These servers include the backends of the smaller Services.
        let _servers = servers::named_servers(&sandbox, &servers::TEN);
        let mut arena = Arena::new(&sandbox, Cluster::start(&sandbox), peers, &SUBJECTS)?;
        let report = report.get_or_insert_with(|| servers::report("balance", &arena));
        let services = plan.services(&[10]);
        found.push(plan.at_each(&mut arena, &services, &mut report.failures, |arena| Ok(measure(arena, rounds))));
    }
    let mut report = report.context("there are no peers")?;
    let mut found = found.into_iter();
    let mut all = found.next().unwrap_or_default();
    for more in found {
        for ((_, all), (_, more)) in all.iter_mut().zip(more) {
            *all = take(all).into_iter().zip(more).map(|(all, more)| all.and(more)).collect();
        }
    }
    for (services, measured) in all {
        add(&mut report, services, measured);
    }
    report.notes.push(format!(
        "Connections of the backend with the most, and of the one with the fewest, in each of {rounds}. 1.00 is even. \
         \"cproxy, round robin\" is `cproxy run --balance round-robin`."
    ));
    Ok(report)
}

/// Measures the proxies for each number of backends and connections.
pub(crate) fn measure(arena: &mut Arena<'_>, rounds: Rounds) -> Vec<Measured> {
    let participants = contest::participants_of_proxies(arena);
    let mut of = |(subject, connections): (Subject, u32)| {
        contest::measure(arena, &participants, &subject, &METRICS, rounds, |stand, address| {
            let names = stand.worker.hold(connections, address)?;
            stand.worker.alive()?;
            Ok(imbalance(&names, &subject))
        })
    };
    kinds().map(&mut of).collect()
}

/// Adds a table for each number of backends and connections.
pub(crate) fn add(report: &mut Report, services: u32, measured: Vec<Measured>) {
    for ((subject, connections), measured) in kinds().zip(measured) {
        let what = format!("{connections} connections to {} backends", subject.backends.len());
        contest::add(report, &what, &what.replace(' ', "_"), &[(services, measured)]);
    }
}

fn kinds() -> impl Iterator<Item = (Subject, u32)> {
    SUBJECTS.into_iter().flat_map(|subject| CONNECTIONS.map(|connections| (subject, connections)))
}

fn imbalance(names: &[String], subject: &Subject) -> Vec<f64> {
    let mut counts: BTreeMap<String, u32> =
        subject.backends.iter().map(|backend| (backend.ip().to_string(), 0)).collect();
    names.iter().for_each(|name| *counts.entry(name.clone()).or_default() += 1);
    let mean = names.len() as f64 / counts.len() as f64;
    let ratio = |count: Option<&u32>| f64::from(count.copied().unwrap_or_default()) / mean;
    vec![ratio(counts.values().max()), ratio(counts.values().min())]
}
