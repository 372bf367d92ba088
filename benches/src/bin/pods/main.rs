//! Cost of following all Pods, as the relay does for policies: one list, and watches while Pods change.

mod objects;
mod server;

use std::{path::PathBuf, sync::atomic::Ordering::Relaxed, time::Duration};

use anyhow::{Result, ensure};
use clap::Parser;
use cproxy_benches::{
    report::{Report, Table, check_output},
    rest,
};
use cproxy_tests::{control_plane::ControlPlane, sandbox::Sandbox, usage::Memory};
use serde_json::{Value, json};

use crate::server::{List, Server};

const PREFIX: &str = "cproxy-bench";

/// Interval in which the API server must use almost no CPU time to be at rest, and the limit on that.
const REST: Duration = Duration::from_secs(3);
const REST_MAX: Duration = Duration::from_secs(120);

/// Command line.
#[derive(Parser)]
#[command(name = "pods", about = "What watches of all Pods cost the API server")]
struct Arguments {
    /// Number of Pods; 100,000 need 15 GiB of memory
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..))]
    pods: u32,
    /// Number of watches; more numbers, separated by commas, are measured one after the other
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [0, 1, 3, 11])]
    watchers: Vec<usize>,
    /// Number of changes of Pods in a second
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    rate: u32,
    /// Seconds of changes with each number of watches, in each round
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    seconds: u32,
    /// Number of rounds, in each of which every number of watches has its turn
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Few of everything: only shows that everything works
    #[arg(long, conflicts_with_all = ["pods", "watchers", "rate", "seconds", "rounds"])]
    quick: bool,
    /// File for all samples; default: bench/pods.json in cargo's output directory
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Costs of changes with a number of watches, in all rounds.
#[derive(Default)]
struct Watched {
    watchers: usize,
    changes: usize,
    api_server_cpu: Duration,
    bytes: u64,
    events: u64,
}

fn main() -> Result<()> {
    let mut arguments = Arguments::parse();
    check_output(arguments.output.as_deref())?;
    if arguments.quick {
        (arguments.pods, arguments.watchers, arguments.seconds, arguments.rounds) = (200, vec![0, 2], 1, 1);
    }
    let sandbox = Sandbox::new(PREFIX);
    let control_plane = ControlPlane::start(&sandbox);
    let mut server = Server::with_pods(&control_plane, arguments.pods as usize)?;
    rest::wait(1, REST, REST_MAX, || server.cpu())?;
    let lists = [
        ("no compression, dropped", server.list("identity")?),
        ("gzip, dropped", server.list("gzip")?),
        ("gzip, decoded as by the relay", server.list_as_relay()?),
    ];
    let mut watched: Vec<_> =
        arguments.watchers.iter().map(|&watchers| Watched { watchers, ..Watched::default() }).collect();
    for round in 1..=arguments.rounds {
        for row in &mut watched {
            eprintln!("round {round}: {} watches", row.watchers);
            row.measure(&mut server, arguments.rate, Duration::from_secs(arguments.seconds.into()))?;
        }
    }
    let time = Duration::from_secs(u64::from(arguments.seconds) * u64::from(arguments.rounds));
    let mut report = Report::new("pods");
    for name in ["kube-apiserver", "etcd"] {
        report.add_version(name, control_plane.binary(name), &["--version"]);
    }
    report.tables = vec![table_of_lists(arguments.pods, &lists), table_of_watches(&watched, arguments.rate, time)];
    report.samples = samples(&lists, &watched);
    report.notes.push(note(arguments.rate, control_plane.api_server_pid().map(Memory::of)));
    report.finish(arguments.quick, arguments.output.as_deref())
}

impl Watched {
    /// Changes Pods beside the watches.
    fn measure(&mut self, server: &mut Server<'_>, rate_per_s: u32, time: Duration) -> Result<()> {
        let watches = (0..self.watchers).map(|_| server.watch()).collect::<Result<Vec<_>>>()?;
        rest::wait(1, REST, REST_MAX, || server.cpu())?;
        let before = server.cpu();
        let changes = server.change(rate_per_s, time)?;
        self.api_server_cpu += server.cpu().saturating_sub(before);
        self.changes += changes;
        for counts in watches.iter().map(|watch| &watch.counts) {
            let events = counts.events.load(Relaxed);
            ensure!(events >= changes as u64, "{changes} changes, but a watch had {events} events");
            self.events += events;
            self.bytes += counts.bytes.load(Relaxed);
        }
        Ok(())
    }
}

fn table_of_lists(pods: u32, lists: &[(&str, List)]) -> Table {
    let row = |(name, list): &(&str, List)| {
        let bytes = list.bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{:.1}", bytes as f64 / 1e6));
        let each = list.bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{}", bytes / u64::from(pods)));
        let seconds = |time: Duration| format!("{:.2}", time.as_secs_f64());
        let cells = vec![bytes, each, seconds(list.api_server_cpu), seconds(list.client_cpu), seconds(list.time)];
        ((*name).to_owned(), cells)
    };
    let columns = ["MB", "bytes of each", "API server's CPU s", "client's CPU s", "seconds"];
    Table {
        title: format!("One list of {pods} Pods in protobuf"),
        columns: columns.map(str::to_owned).into(),
        rows: lists.iter().map(row).collect(),
    }
}

fn table_of_watches(watched: &[Watched], rate_per_s: u32, time: Duration) -> Table {
    let alone = watched.iter().find(|row| row.watchers == 0).map(|row| row.api_server_cpu);
    let row = |row: &Watched| {
        let percent = |cpu: Duration| format!("{:.1}%", cpu.as_secs_f64() / time.as_secs_f64() * 100.0);
        let more = alone.map(|alone| row.api_server_cpu.saturating_sub(alone)).filter(|_| row.watchers > 0);
        let each_us = more.map(|more| format!("{:.0}", more.as_secs_f64() * 1e6 / row.events as f64));
        let kb = row.bytes as f64 / 1e3 / row.watchers as f64 / time.as_secs_f64();
        let has_watches = row.watchers > 0;
        let cells = [
            Some(percent(row.api_server_cpu)),
            more.map(percent),
            each_us,
            has_watches.then(|| format!("{kb:.0}")),
            has_watches.then(|| (row.bytes / row.events).to_string()),
        ];
        let cells = cells.map(|cell| cell.unwrap_or_else(|| "-".to_owned()));
        (row.watchers.to_string(), cells.into())
    };
    let columns = ["API server's CPU", "beyond none", "us for each event", "KB/s of each", "bytes of an event"];
    Table {
        title: format!("Watches of all Pods at {rate_per_s} changes a second"),
        columns: columns.map(str::to_owned).into(),
        rows: watched.iter().map(row).collect(),
    }
}

fn samples(lists: &[(&str, List)], watched: &[Watched]) -> Value {
    let list = |(name, list): &(&str, List)| {
        json!({
            "list": name, "bytes": list.bytes, "api_server_cpu_s": list.api_server_cpu.as_secs_f64(),
            "client_cpu_s": list.client_cpu.as_secs_f64(), "seconds": list.time.as_secs_f64(),
        })
    };
    let watch = |row: &Watched| {
        json!({
            "watchers": row.watchers, "changes": row.changes, "bytes": row.bytes, "events": row.events,
            "api_server_cpu_s": row.api_server_cpu.as_secs_f64(),
        })
    };
    json!({
        "lists": lists.iter().map(list).collect::<Vec<_>>(),
        "watches": watched.iter().map(watch).collect::<Vec<_>>(),
    })
}

fn note(rate_per_s: u32, memory: Option<Memory>) -> String {
    let memory = memory.map_or(0, |memory| memory.peak >> 20);
    format!(
        "Each Pod has two containers with 15 variables, volumes, annotations and a status. {rate_per_s} times a second \
         the status of one changes. CPU time is that of the API server's process, which at its peak had {memory} MiB; \
         it and the clients share the machine. A list is what the API server has in its cache. `decoded` takes the \
         relay's way: decompressed, cut into objects and decoded to the fields that policies need."
    )
}
