//! Time from the agent's start to a complete table, phase by phase. The agent reads manifests, so that no network takes
//! part; an API server would add the time of its answers.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, Result};
use clap::Parser;
use cproxy_benches::{
    plot::{Axis, Chart, Series},
    report::{Report, Table, check_output},
    summary::Summary,
};
use cproxy_tests::{
    manifest,
    population::Shape,
    process::{Agent, cproxy, cproxy_binary},
    sandbox::Sandbox,
};
use serde_json::{Map, Value, json};

const PREFIX: &str = "cproxy-bench";

/// Limit on a start, longer than any start takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Command line.
#[derive(Parser)]
#[command(name = "start", about = "Time from the agent's start to a complete table")]
struct Arguments {
    /// Number of Services, and of endpoints of each; may be repeated
    #[arg(long = "shape", value_name = "SERVICESxENDPOINTS", default_values = ["100x10", "5000x10"])]
    shapes: Vec<Shape>,
    /// Number of starts
    #[arg(long, value_name = "N", default_value_t = 21, value_parser = clap::value_parser!(u32).range(1..))]
    starts: u32,
    /// A small shape, two starts: only shows that everything works
    #[arg(long, conflicts_with_all = ["shapes", "starts"])]
    quick: bool,
    /// File for all samples; default: bench/start.json in cargo's output directory
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

const READY: &str = "ready_ms";

/// Fields of the log line `ready`, with their meanings.
const PHASES: [(&str, &str); 6] = [
    (READY, "from the start to ready"),
    ("prepare_ms", "  input and the machine's state"),
    ("install_ms", "  programs verified and attached"),
    ("open_ms", "  maps opened"),
    ("list_ms", "  lists complete"),
    ("write_ms", "  table written"),
];

fn main() -> Result<()> {
    let mut arguments = Arguments::parse();
    check_output(arguments.output.as_deref())?;
    if arguments.quick {
        (arguments.shapes, arguments.starts) = (vec![Shape::new(20, 5)], 2);
    }
    let mut report = Report::new("start");
    report.add_version("cproxy", cproxy_binary(), &["version"]);
    let mut samples = Map::new();
    let mut series = Vec::new();
    for &shape in &arguments.shapes {
        let starts = starts(shape, arguments.starts)?;
        series.push(Series::distribution(shape.to_string(), times(&starts, READY)));
        report.tables.push(table(shape, &starts)?);
        samples.insert(shape.to_string(), starts.into());
    }
    report.charts.push(Chart {
        name: "ready".to_owned(),
        title: "From the agent's start to ready, Services x endpoints".to_owned(),
        x: Axis::percent_of("starts"),
        y: Axis::linear("ms"),
        series,
    });
    report.samples = samples.into();
    report.notes.push(format!(
        "{} starts of `cproxy run --manifests`, one after the other, each on a machine without pins or files of \
         cproxy. The times are those in the agent's log; they leave out the operating system's time to start the \
         process. If the agent is in a memory cgroup, the child that installs the programs first leaves that cgroup \
         and waits for a grace period of the kernel: about 10 ms, which guests without an init system do not pay.",
        arguments.starts
    ));
    report.finish(arguments.quick, arguments.output.as_deref())
}

/// Times of each start, from the log.
fn starts(shape: Shape, count: u32) -> Result<Vec<Value>> {
    let sandbox = Sandbox::new(PREFIX);
    manifest::write(&sandbox.manifest_dir(), "all.json", shape.objects(0..shape.services));
    let start = |number| {
        eprintln!("{shape}: start {number}");
        let agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).args(["--log-format", "json"]);
        let (mut agent, _) = agent.start_and_time(TIMEOUT);
        agent.stop();
        cproxy(&sandbox, &["cleanup"]).success();
        let log = agent.log();
        let mut lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let line = lines.find(|line| line.get("ready_ms").is_some()).context("no line of the log says `ready`")?;
        Ok(PHASES.iter().map(|(field, _)| ((*field).to_owned(), json!(line.get(field)))).collect::<Map<_, _>>().into())
    };
    (1..=count).map(start).collect()
}

/// One phase of all starts.
fn times(starts: &[Value], field: &str) -> impl Iterator<Item = f64> {
    starts.iter().filter_map(move |start| start.get(field)?.as_f64())
}

fn table(shape: Shape, starts: &[Value]) -> Result<Table> {
    let row = |&(field, meaning): &(&str, &str)| {
        Ok((meaning.to_owned(), Summary::of(times(starts, field)).context("there are no samples")?.cells(1)))
    };
    Ok(Table {
        title: format!("{} Services with {} endpoints each, ms", shape.services, shape.endpoints),
        columns: Summary::COLUMNS.map(str::to_owned).into(),
        rows: PHASES.iter().map(row).collect::<Result<_>>()?,
    })
}
