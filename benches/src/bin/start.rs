//! Time from the agent's start to a complete table, phase by phase, and its CPU time: from manifests, so that no
//! network takes part, from an API server, and through a relay.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use cproxy_benches::{
    node,
    report::{Report, Table, check_output},
    start,
    summary::Summary,
};
use cproxy_tests::{
    control_plane::{ControlPlane, NODE},
    manifest,
    population::Shape,
    process::{Agent, cproxy_binary},
    relay_server::{RelayServer, RunningRelay, relay_binary},
    sandbox::Sandbox,
    writer::Writer,
};
use serde_json::{Map, Value};

const PREFIX: &str = "cproxy-bench";

/// Address of the relay.
const RELAY: &str = "127.0.0.1:7443";

/// Command line.
#[derive(Parser)]
#[command(name = "start", about = "Time from the agent's start to a complete table")]
struct Arguments {
    /// Number of Services, and of endpoints of each; may be repeated
    #[arg(long = "shape", value_name = "SERVICESxENDPOINTS", default_values = ["100x10", "5000x10"])]
    shapes: Vec<Shape>,
    /// Source of the objects; may be repeated; default: all
    #[arg(long = "source", value_name = "SOURCE")]
    sources: Vec<Source>,
    /// Number of starts from each source
    #[arg(long, value_name = "N", default_value_t = 21, value_parser = clap::value_parser!(u32).range(1..))]
    starts: u32,
    /// A small shape, two starts: only shows that everything works
    #[arg(long, conflicts_with_all = ["shapes", "starts"])]
    quick: bool,
    /// File for all samples; default: bench/start.json in cargo's output directory
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Source of the objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Source {
    Manifests,
    ApiServer,
    Relay,
}

const READY: &str = "ready_ms";

/// Fields of a start, with their meanings.
const FIELDS: [(&str, &str); 7] = [
    (READY, "from the start to ready"),
    ("prepare_ms", "  input and the machine's state"),
    ("install_ms", "  programs verified and attached"),
    ("open_ms", "  maps opened"),
    ("list_ms", "  lists complete"),
    ("write_ms", "  table written"),
    (start::CPU, "CPU time"),
];

fn main() -> Result<()> {
    let mut arguments = Arguments::parse();
    check_output(arguments.output.as_deref())?;
    if arguments.quick {
        (arguments.shapes, arguments.starts) = (vec![Shape::new(20, 5)], 2);
    }
    if arguments.sources.is_empty() {
        arguments.sources = Source::value_variants().to_vec();
    }
    let mut report = Report::new("start");
    report.add_version("cproxy", cproxy_binary(), &["version"]);
    if arguments.sources.contains(&Source::Relay) {
        report.add_version("cproxy-relay", relay_binary(), &["version"]);
    }
    let mut samples = Map::new();
    for &shape in &arguments.shapes {
        for (source, starts) in starts(shape, &arguments.sources, arguments.starts)? {
            let name = format!("{shape}, {}", source.title());
            report.tables.push(table(shape, source, &starts)?);
            samples.insert(name, starts.into());
        }
    }
    report.samples = samples.into();
    report.notes.push(format!(
        "{} starts of `cproxy run` from each source, one after the other and the sources in turn, each on a machine \
         without pins or files of cproxy. The times are those in the agent's log; they leave out the operating \
         system's time to start the process. CPU time is that of the agent and of the child that installs the \
         programs, which the kernel counts in steps of 10 ms. API server, relay and agent share the machine. If the \
         agent is in a memory cgroup, the child first leaves that cgroup and waits for a grace period of the kernel: \
         about 10 ms, which guests without an init system do not pay.",
        arguments.starts
    ));
    report.finish(arguments.quick, arguments.output.as_deref())
}

/// Starts from each source, in turn.
fn starts(shape: Shape, sources: &[Source], count: u32) -> Result<Vec<(Source, Vec<Value>)>> {
    let sandbox = Sandbox::new(PREFIX);
    manifest::write(&sandbox.manifest_dir(), "all.json", shape.objects(0..shape.services));
    let has_servers = sources.iter().any(|source| *source != Source::Manifests);
    let control_plane = has_servers.then(|| control_plane(&sandbox, shape));
    let relay = control_plane.as_ref().filter(|_| sources.contains(&Source::Relay)).map(|of| relay(&sandbox, of));
    let mut all: Vec<_> = sources.iter().map(|&source| (source, Vec::new())).collect();
    for number in 1..=count {
        for (source, starts) in &mut all {
            eprintln!("{shape} from {}: start {number}", source.title());
            let found = start::measure(&sandbox, source.agent(&sandbox, control_plane.as_ref())?)?;
            let fields = FIELDS.iter().map(|(field, _)| ((*field).to_owned(), found.get(*field).cloned().into()));
            starts.push(fields.collect::<Map<_, _>>().into());
        }
    }
    drop(relay);
    Ok(all)
}

fn control_plane(sandbox: &Sandbox, shape: Shape) -> ControlPlane<'_> {
    let control_plane = ControlPlane::start(sandbox);
    node::create(sandbox, &control_plane);
    eprintln!("{shape}: creating the objects");
    Writer::new(&control_plane).create(shape.objects(0..shape.services));
    control_plane
}

fn relay(sandbox: &Sandbox, control_plane: &ControlPlane<'_>) -> RunningRelay {
    let relay = RelayServer::new(sandbox).kubeconfig(control_plane.admin_kubeconfig()).listen(RELAY);
    relay.without_authentication().start()
}

impl Source {
    fn title(self) -> &'static str {
        match self {
            Self::Manifests => "manifests",
            Self::ApiServer => "API server",
            Self::Relay => "relay",
        }
    }

    /// An agent that reads the objects here.
    fn agent<'s>(self, sandbox: &'s Sandbox, control_plane: Option<&ControlPlane<'_>>) -> Result<Agent<'s>> {
        let agent = Agent::new(sandbox);
        if self == Self::Manifests {
            return Ok(agent.manifests(sandbox.manifest_dir()));
        }
        let control_plane = control_plane.context("there is no control plane")?;
        let url = if self == Self::Relay { format!("http://{RELAY}") } else { control_plane.server_url() };
        let agent = agent.kubeconfig(control_plane.agent_kubeconfig());
        Ok(agent.args(["--apiserver", &url, "--node-name", NODE]))
    }
}

/// One field of all starts.
fn times(starts: &[Value], field: &str) -> impl Iterator<Item = f64> {
    starts.iter().filter_map(move |start| start.get(field)?.as_f64())
}

fn table(shape: Shape, source: Source, starts: &[Value]) -> Result<Table> {
    let row = |&(field, meaning): &(&str, &str)| {
        Ok((meaning.to_owned(), Summary::of(times(starts, field)).context("there are no samples")?.cells(1)))
    };
    let title = format!("{} Services with {} endpoints each, {}, ms", shape.services, shape.endpoints, source.title());
    Ok(Table {
        title,
        columns: Summary::COLUMNS.map(str::to_owned).into(),
        rows: FIELDS.iter().map(row).collect::<Result<_>>()?,
    })
}
