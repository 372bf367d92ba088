//! The results as tables, and verdicts on the targets.

use std::time::Duration;

use cproxy_benches::{
    paired::Estimate,
    report::{Report, Table, Target, Verdict},
    summary::Summary,
};
use cproxy_tests::usage::Memory;
use serde_json::json;

use crate::{
    rates::AtRate,
    starts::{Source, Starts},
    storms::{BesideSlow, Storm},
};

/// Everything that was measured.
#[derive(Default)]
pub(crate) struct Results {
    pub(crate) footprints: Vec<Footprint>,
    pub(crate) rates: Vec<AtRate>,
    pub(crate) storms: Vec<Storm>,
    pub(crate) slow: Option<BesideSlow>,
    pub(crate) starts: Vec<Starts>,
    pub(crate) failures: Vec<String>,
}

/// Memory of a server with clients at rest.
#[derive(Clone, Debug)]
pub(crate) struct Footprint {
    /// `relay` or `API server`.
    pub(crate) server: &'static str,
    pub(crate) clients: u32,
    pub(crate) idle: Memory,
    pub(crate) memory: Memory,
    /// Growth of the buffers of all TCP sockets.
    pub(crate) buffers_bytes: u64,
    /// Watches of the relay at the API server.
    pub(crate) upstream: Vec<(String, f64)>,
}

impl Footprint {
    /// Bytes of each client.
    pub(crate) fn each_bytes(&self) -> f64 {
        (self.memory.resident as f64 - self.idle.resident as f64) / f64::from(self.clients)
    }

    /// One line.
    pub(crate) fn text(&self) -> String {
        format!(
            "{} with {} clients: {:.1} MiB resident ({:.1} idle), {:.1} anonymous, peak {:.1}; {:.0} bytes for each \
             client; buffers of the kernel {:.1} MiB; watches at the API server {:?}",
            self.server,
            self.clients,
            mib(self.memory.resident),
            mib(self.idle.resident),
            mib(self.memory.anonymous),
            mib(self.memory.peak),
            self.each_bytes(),
            mib(self.buffers_bytes),
            self.upstream,
        )
    }

    fn row(&self) -> (String, Vec<String>) {
        let cells = vec![
            format!("{:.1}", mib(self.idle.resident)),
            format!("{:.1}", mib(self.memory.resident)),
            format!("{:.1}", mib(self.memory.anonymous)),
            format!("{:.1}", self.each_bytes() / 1024.0),
            format!("{:.1}", mib(self.buffers_bytes)),
        ];
        (format!("{}, {} clients", self.server, self.clients), cells)
    }
}

/// Targets at rates: changes a second, clients, and limit of the 99th percentile in milliseconds.
const LATENCIES: [(u32, u32, f64); 3] = [(10, 2_000, 50.0), (10, 10_000, 250.0), (100, 10_000, 2_000.0)];

/// Other targets: memory with 10,000 clients, and a start at 5,000 Services.
const MEMORY: (u32, f64) = (10_000, 300.0);
const START_SERVICES: u32 = 5_000;
const START_BYTES: f64 = 500_000.0;
const START_MS: f64 = 150.0;

const NOTES: [&str; 4] = [
    "All processes share one machine. The relay has the first CPU and the load generator the second; API server, etcd \
     and the program that makes the changes run beside them. Latencies include the generator's time for all clients \
     before. 20 further clients have a process of their own with a high priority, as each has a machine of its own \
     elsewhere: `own` is what they see.",
    "A change is a PUT of an EndpointSlice. Its latency is the time from the API server's answer to the client's \
     receipt of it, or of a later version of the same slice. At 100 changes a second, 20 slices change in turn, so \
     that a client which is behind gets the last of several versions alone.",
    "Clients are the agent's own code, with a connection each for Services and EndpointSlices, and 200 of them for \
     their Node. They read name and version only, apart from 50 which decode and keep everything and compare it with \
     what was written.",
    "Shares are those of one CPU. The share of the load generator shows whether it or the server was the bottleneck.",
];

/// The report.
pub(crate) fn of(results: Results) -> Report {
    let footprints: Vec<_> = results.footprints.iter().map(Footprint::row).collect();
    let rates = results.rates.iter().chain(results.slow.iter().flat_map(|slow| &slow.rates)).map(rate_row).collect();
    let mut tables = vec![
        table(
            "Memory at rest",
            &["idle, MiB", "resident, MiB", "anonymous, MiB", "each client, KiB", "kernel's buffers, MiB"],
            footprints,
        ),
        table(
            "Changes",
            &["p50, ms", "p99, ms", "max, ms", "own p50", "own p99", "server's CPU", "generator's CPU", "events/s"],
            rates,
        ),
        table(
            "Storms",
            &["all have everything, s", "relay's CPU, s", "its peak, MiB", "lists", "bystander p99, ms"],
            results.storms.iter().map(storm_row).collect(),
        ),
        table(
            "Start of an agent, medians",
            &["ready, ms", "lists, ms", "CPU, ms", "from the server, KB"],
            results.starts.iter().map(start_row).collect(),
        ),
    ];
    if let Some(slow) = &results.slow {
        let row = |name: &str, memory: &Memory| (name.to_owned(), vec![format!("{:.1}", mib(memory.resident))]);
        let [without, with] = &slow.memory;
        let rows = vec![row("2,000 clients", without), row("and 1,000 that read one byte a second", with)];
        tables.push(table("Memory of the relay beside slow clients", &["resident, MiB"], rows));
    }
    let verdicts = verdicts(&results);
    tables.retain(|table| !table.rows.is_empty());
    let samples = json!({
        "footprints": results.footprints.iter().map(Footprint::text).collect::<Vec<_>>(),
        "rates": results.rates.iter().map(AtRate::text).collect::<Vec<_>>(),
        "storms": results.storms.iter().map(Storm::text).collect::<Vec<_>>(),
        "targets": verdicts.iter().map(Verdict::json).collect::<Vec<_>>(),
    });
    if !verdicts.is_empty() {
        tables.push(Verdict::table(&verdicts));
    }
    Report {
        tables,
        notes: NOTES.map(str::to_owned).into(),
        failures: results.failures,
        samples,
        ..Report::new("relay")
    }
}

fn table(title: &str, columns: &[&str], rows: Vec<(String, Vec<String>)>) -> Table {
    Table { title: title.to_owned(), columns: columns.iter().map(|&column| column.to_owned()).collect(), rows }
}

fn rate_row(at_rate: &AtRate) -> (String, Vec<String>) {
    let latencies = &at_rate.latencies;
    let server = if at_rate.server == crate::RELAY { at_rate.shares.relay } else { at_rate.shares.api_server };
    let cells = vec![
        format!("{:.1}", latencies.p50_ms),
        format!("{:.1}", latencies.p99_ms),
        format!("{:.1}", latencies.max_ms),
        format!("{:.1}", at_rate.unhurried.p50_ms),
        format!("{:.1}", at_rate.unhurried.p99_ms),
        format!("{server:.2}"),
        format!("{:.2}", at_rate.shares.generator),
        format!("{:.0}", at_rate.events_per_s),
    ];
    (format!("{}{}, {} clients, {}/s", at_rate.server, at_rate.remark, at_rate.clients, at_rate.rate_per_s), cells)
}

fn storm_row(storm: &Storm) -> (String, Vec<String>) {
    let cells = vec![
        seconds(storm.time),
        seconds(storm.relay_cpu),
        format!("{:.1}", mib(storm.peak_bytes)),
        storm.lists.to_string(),
        storm.bystander.map_or_else(|| "-".to_owned(), |bystander| format!("{:.1}", bystander.p99)),
    ];
    (format!("{} ({} clients)", storm.name, storm.clients), cells)
}

fn start_row(starts: &Starts) -> (String, Vec<String>) {
    let source = match starts.source {
        Source::ApiServer => "API server",
        Source::Relay => "relay",
    };
    let cells = vec![
        format!("{:.1}", starts.median(|start| start.ready_ms)),
        format!("{:.1}", starts.median(|start| start.list_ms)),
        format!("{:.1}", starts.median(|start| start.cpu_ms)),
        format!("{:.0}", starts.median(|start| start.bytes as f64) / 1_000.0),
    ];
    (format!("{}, from the {source}", starts.shape), cells)
}

impl Starts {
    fn median(&self, field: impl Fn(&crate::starts::Start) -> f64) -> f64 {
        Summary::of(self.all.iter().map(field)).map_or(f64::NAN, |summary| summary.p50)
    }
}

fn verdicts(results: &Results) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    let mut add = |what: String, found: f64, limit: f64| {
        let ratio = found / limit;
        let found = Estimate { median: ratio, low: ratio, high: ratio };
        verdicts.push(Verdict { what, found, target: Target::AtMost(1.0) });
    };
    for footprint in results.footprints.iter().filter(|one| (one.server, one.clients) == (crate::RELAY, MEMORY.0)) {
        add(
            format!("memory with {} clients / {} MB", MEMORY.0, MEMORY.1),
            footprint.memory.resident as f64 / 1e6,
            MEMORY.1,
        );
    }
    for (rate, clients, limit_ms) in LATENCIES {
        for found in results.rates.iter().filter(|found| (found.server, found.clients) == (crate::RELAY, clients)) {
            if found.rate_per_s == rate {
                let what = format!("p99 of {rate} changes/s with {clients} clients / {limit_ms} ms");
                add(what, found.latencies.p99_ms, limit_ms);
            }
        }
    }
    for starts in &results.starts {
        if (starts.source, starts.shape.services) == (Source::Relay, START_SERVICES) {
            add(
                format!("bytes of a start at {} / {START_BYTES}", starts.shape),
                starts.median(|s| s.bytes as f64),
                START_BYTES,
            );
            add(
                format!("time of a start at {} / {START_MS} ms", starts.shape),
                starts.median(|s| s.ready_ms),
                START_MS,
            );
        }
    }
    verdicts
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn seconds(time: Duration) -> String {
    format!("{:.2}", time.as_secs_f64())
}
