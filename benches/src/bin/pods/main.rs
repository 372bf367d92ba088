//! Cost of following all Pods, as the relay does for policies: watches while Pods change, and one list.

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
    /// Number of Pods of the list; 100,000 need 15 GiB of memory
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..))]
    pods: u32,
    /// Number of Pods while watches are measured, at most that of the list
    #[arg(long, value_name = "N", default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..))]
    watched_pods: u32,
    /// Number of watches; more numbers, separated by commas, are measured one after the other, beside none
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [11, 33, 100])]
    watchers: Vec<u32>,
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
    #[arg(long, conflicts_with_all = ["pods", "watched_pods", "watchers", "rate", "seconds", "rounds"])]
    quick: bool,
    /// File for all samples; default: bench/pods.json in cargo's output directory
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Costs of changes with a number of watches, in all rounds.
struct Watched {
    name: String,
    watchers: u32,
    changes: usize,
    api_server_cpu: Duration,
    bytes: u64,
    events: u64,
}

fn main() -> Result<()> {
    let mut arguments = Arguments::parse();
    check_output(arguments.output.as_deref())?;
    if arguments.quick {
        (arguments.pods, arguments.watched_pods, arguments.watchers) = (200, 100, vec![2]);
        (arguments.seconds, arguments.rounds) = (1, 1);
    }
    ensure!(
        arguments.watched_pods <= arguments.pods,
        "--watched-pods {} is more than --pods {}",
        arguments.watched_pods,
        arguments.pods
    );
    let sandbox = Sandbox::new(PREFIX);
    let control_plane = ControlPlane::start(&sandbox);
    let mut server = Server::new(&control_plane)?;
    server.create_pods(arguments.watched_pods as usize)?;
    let mut watched = vec![Watched::new("none".to_owned(), 0), Watched::new("none, again".to_owned(), 0)];
    watched.extend(arguments.watchers.iter().map(|&watchers| Watched::new(watchers.to_string(), watchers)));
    for round in 1..=arguments.rounds {
        // The server's cost of a change drifts: every second round goes the other way.
        watched.reverse();
        for row in &mut watched {
            eprintln!("round {round}: watches: {}", row.name);
            row.measure(&mut server, arguments.rate, Duration::from_secs(arguments.seconds.into()))?;
        }
    }
    watched.sort_by_key(|row| (row.watchers, row.name.len()));
    server.create_pods(arguments.pods as usize)?;
    rest::wait(1, REST, REST_MAX, || server.cpu())?;
    let lists = [
        ("no compression, dropped", server.list("identity")?),
        ("gzip, dropped", server.list("gzip")?),
        ("gzip, decoded as by the relay", server.list_as_relay()?),
    ];
    let time = Duration::from_secs(u64::from(arguments.seconds) * u64::from(arguments.rounds));
    let mut report = Report::new("pods");
    for name in ["kube-apiserver", "etcd"] {
        report.add_version(name, control_plane.binary(name), &["--version"]);
    }
    report.tables = vec![table_of_lists(arguments.pods, &lists), table_of_watches(&watched, arguments.rate, time)];
    report.samples = samples(&lists, &watched);
    report.notes.push(note(&arguments, control_plane.api_server_pid().map(Memory::of)));
    report.finish(arguments.quick, arguments.output.as_deref())
}

impl Watched {
    fn new(name: String, watchers: u32) -> Self {
        Self { name, watchers, changes: 0, api_server_cpu: Duration::ZERO, bytes: 0, events: 0 }
    }

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
    let without: Vec<_> = watched.iter().filter(|row| row.watchers == 0).map(|row| row.api_server_cpu).collect();
    let alone = without.iter().sum::<Duration>() / without.len().max(1) as u32;
    let row = |row: &Watched| {
        let has_watches = row.watchers > 0;
        let cpu_s = row.api_server_cpu.as_secs_f64();
        let beyond_s = cpu_s - alone.as_secs_f64();
        let percent = |cpu_s: f64| format!("{:.1}%", cpu_s / time.as_secs_f64() * 100.0);
        let kb_each = row.bytes as f64 / 1e3 / f64::from(row.watchers) / time.as_secs_f64();
        let cells = [
            Some(percent(cpu_s)),
            Some(format!("{:.2}", cpu_s * 1e3 / row.changes as f64)),
            has_watches.then(|| format!("{:.1}", beyond_s * 1e6 / row.events as f64)),
            has_watches.then(|| format!("{kb_each:.0}")),
            has_watches.then(|| (row.bytes / row.events).to_string()),
        ];
        (row.name.clone(), cells.map(|cell| cell.unwrap_or_else(|| "-".to_owned())).into())
    };
    let columns = ["API server's CPU", "ms for each change", "us for each event", "KB/s of each", "bytes of an event"];
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
            "watches": row.name, "changes": row.changes, "bytes": row.bytes, "events": row.events,
            "api_server_cpu_s": row.api_server_cpu.as_secs_f64(),
        })
    };
    json!({
        "lists": lists.iter().map(list).collect::<Vec<_>>(),
        "watches": watched.iter().map(watch).collect::<Vec<_>>(),
    })
}

fn note(arguments: &Arguments, memory: Option<Memory>) -> String {
    let memory = memory.map_or(0, |memory| memory.peak >> 20);
    let Arguments { watched_pods, rate, .. } = arguments;
    format!(
        "Each Pod has two containers with 15 variables, volumes, annotations and a status. Watches are measured with \
         {watched_pods} Pods, whose status changes {rate} times a second: with more, the cost of the changes varies by \
         more than that of their events. An event's is what the server takes beyond the mean without watches. CPU time \
         is that of the API server's process, which at its peak had {memory} MiB; it and the clients share the \
         machine. A list is what the API server has in its cache. `decoded` takes the relay's way: decompressed, cut \
         into objects and decoded to the fields that policies need."
    )
}
