//! Each peer alone in a guest as small pods have it: half a core and 500 MiB.

use anyhow::Result;
use cproxy_benches::{
    arena::Peer,
    paired::Estimate,
    report::{Report, Table},
};
use serde_json::{Value, json};

use crate::{
    Plan,
    guest::{self, Machine, PEERS, SERVICES},
};

const MEMORY_MIB: u32 = 500;

/// Two nanoseconds for each instruction: half of the 1,000 million instructions a second of a whole core.
const HALF_A_CORE: u8 = 1;

/// A figure of a guest: its name in tables, its place in the samples, and its decimal places.
type Figure = (&'static str, &'static str, usize);

const FIGURES: [Figure; 4] = [
    ("connect(2), p50, us", "connect/*/p50_us", 1),
    ("whole HTTP request, p50, us", "request/*/p50_us", 1),
    ("wrk, 2,000 connections, requests/s", "wrk/*/requests_per_second", 0),
    ("iperf3, Gbit/s", "bulk/*/gbit_per_second", 2),
];

pub(crate) fn run(plan: &Plan) -> Result<Report> {
    let mut report = Report::new("small-guest");
    report.samples = json!({});
    let peers = if plan.peers.is_empty() { &PEERS } else { plan.peers.as_slice() };
    for services in plan.services(&SERVICES) {
        let mut columns = Vec::new();
        for peer in peers {
            eprintln!("{services} Services: {peer}");
            let machine =
                Machine { memory_mib: MEMORY_MIB, instruction_shift: HALF_A_CORE, peers: std::slice::from_ref(peer) };
            // kube-proxy may need more memory than the guest has, which is a result.
            match guest::boot(plan, services, &machine) {
                Ok(result) => columns.push((*peer, samples(&mut report, services, *peer, &result)?)),
                Err(error) => {
                    report.notes.push(format!("{services} Services: {peer}: {error:#}"));
                    columns.push((*peer, Value::Null));
                }
            }
        }
        let table = table(services, &columns);
        report.summary.push(table.clone());
        report.tables.push(table);
    }
    report.notes.push(format!(
        "Each peer has a guest of its own with {MEMORY_MIB} MiB, which also holds the servers. Its processor is \
         emulated, and each executed instruction advances its clocks by two nanoseconds (-icount \
         shift={HALF_A_CORE}), so that it executes 500 million instructions a second: half of what the guests of \
         `guest` do. conntrack's table has kube-proxy's default size. \"-\" is a peer that does not get its rules into \
         the kernel there."
    ));
    Ok(report)
}

/// Keeps a guest's samples and returns them.
fn samples(report: &mut Report, services: u32, peer: Peer, result: &Value) -> Result<Value> {
    let mut single = Report::new("small-guest");
    single.samples = json!({});
    guest::merge(&mut single, services, result)?;
    for version in single.versions {
        if !report.versions.contains(&version) {
            report.versions.push(version);
        }
    }
    report.failures.extend(single.failures.into_iter().map(|failure| format!("{peer}: {failure}")));
    let samples = single.samples.get(services.to_string()).cloned().unwrap_or_default();
    report.add_samples(&format!("{services}, {peer}"), samples.clone());
    Ok(samples)
}

fn table(services: u32, columns: &[(Peer, Value)]) -> Table {
    let mut rows: Vec<_> = FIGURES
        .iter()
        .map(|(name, place, digits)| {
            let cell = |(peer, samples): &(Peer, Value)| {
                let pointer = format!("/{}", place.replace('*', &format!("{services}/{peer}")));
                let samples: Option<Vec<f64>> =
                    samples.pointer(&pointer).and_then(|samples| serde_json::from_value(samples.clone()).ok());
                let median = samples.and_then(Estimate::of).map(|estimate| format!("{:.digits$}", estimate.median));
                median.unwrap_or_else(|| "-".to_owned())
            };
            ((*name).to_owned(), columns.iter().map(cell).collect())
        })
        .collect();
    let available = |(_, samples): &(Peer, Value)| {
        let figure = samples.pointer(&format!("/available_mib/{services}")).and_then(Value::as_u64);
        figure.map_or_else(|| "-".to_owned(), |mebibytes| mebibytes.to_string())
    };
    rows.push(("memory still available, MiB".to_owned(), columns.iter().map(available).collect()));
    Table {
        title: format!("a guest with half a core and {MEMORY_MIB} MiB, {services} Services"),
        columns: columns.iter().map(|(peer, _)| peer.to_string()).collect(),
        rows,
    }
}
