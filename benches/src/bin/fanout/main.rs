//! Cost of each further agent for the API server: every microVM has an agent of its own, so one API server serves
//! thousands of watchers.
//!
//! Fleets of agents of several sizes follow one API server, one fleet after the other; fleets of kube-proxies do the
//! same. A fleet starts all at once, which is the worst load a cluster can put on an API server. Then single
//! EndpointSlices change; then the API server crashes and comes back.

mod fleet;
mod measure;
mod report;
mod table;

use std::{path::PathBuf, time::Duration};

use anyhow::{Result, ensure};
use clap::Parser;
use cproxy_benches::{
    node,
    report::{Report, check_output},
    subject,
};
use cproxy_tests::{
    control_plane::ControlPlane, population::Shape, process::cproxy_binary, sandbox::Sandbox, writer::Writer,
};

use crate::{
    fleet::Kind,
    measure::{Place, Plan},
};

const PREFIX: &str = "cproxy-bench";

/// Number of network namespaces that one sandbox has room for beside its own.
const NAMESPACES_MAX: u32 = 60;

/// Command line.
#[derive(Parser)]
#[command(name = "fanout", about = "What each further agent costs the API server")]
struct Arguments {
    /// How many agents; more numbers, separated by commas, are one fleet after the other
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [1, 10, 50, 100])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000))]
    agents: Vec<u32>,
    /// The same of kube-proxies
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [1, 10])]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=40))]
    kube_proxies: Vec<u32>,
    /// How many Services, and how many endpoints each has
    #[arg(long, value_name = "SERVICESxENDPOINTS", default_value = "1000x10")]
    shape: Shape,
    /// Number of single changes
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    changes: u32,
    /// Few of everything: only shows that everything works
    #[arg(long, conflicts_with_all = ["agents", "kube_proxies", "shape", "changes"])]
    quick: bool,
    /// File for all samples; default: bench/fanout.json in cargo's output directory
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

fn main() -> Result<()> {
    let mut arguments = Arguments::parse();
    check_output(arguments.output.as_deref())?;
    let mut plan = Plan {
        changes: arguments.changes,
        rest: Duration::from_millis(500),
        idle: Duration::from_secs(10),
        returning: &Kind::ALL,
    };
    if arguments.quick {
        let (rest, idle) = (Duration::from_millis(200), Duration::from_millis(500));
        plan = Plan { changes: 1, rest, idle, returning: &[Kind::Cproxy] };
        (arguments.agents, arguments.kube_proxies) = (vec![3], vec![1]);
        arguments.shape = Shape::new(20, 5);
    }
    let agents = arguments.agents.iter().map(|&count| (Kind::Cproxy, count));
    let kube_proxies = arguments.kube_proxies.iter().filter(|count| **count > 0).map(|&count| (Kind::KubeProxy, count));
    let fleets = agents.chain(kube_proxies).collect::<Vec<_>>();
    let namespaces = fleets.iter().map(|&(kind, count)| if kind == Kind::Cproxy { 1 } else { count }).sum::<u32>();
    ensure!(namespaces <= NAMESPACES_MAX, "{namespaces} network namespaces are too many: name fewer kube-proxies");

    let sandbox = Sandbox::new(PREFIX);
    let mut place = prepare(&sandbox, arguments.shape);
    let mut found = Vec::new();
    let mut failures = Vec::new();
    for &(kind, count) in &fleets {
        eprintln!("measuring {count} of {kind}");
        // The other fleets' results are useful without this one.
        match measure::measure(&mut place, kind, count, &plan) {
            Ok(figures) => found.push(figures),
            Err(error) => {
                eprintln!("{count} of {kind} failed: {error:#}");
                failures.push(format!("{count} of {kind}: {error:#}"));
            }
        }
    }
    let mut report = Report { failures, ..report::of(arguments.shape, &found, &plan) };
    add_versions(&mut report, &place.control_plane);
    // An orderly end would take a second, and no client is connected any more.
    place.control_plane.kill_api_server();
    report.finish(arguments.quick, arguments.output.as_deref())
}

/// Starts a control plane with the objects.
fn prepare(sandbox: &Sandbox, shape: Shape) -> Place<'_> {
    let control_plane = ControlPlane::start(sandbox);
    node::create(sandbox, &control_plane);
    let writer = Writer::new(&control_plane);
    eprintln!("{shape}: creating the objects");
    writer.create(shape.objects(0..shape.services));
    writer.create(subject::objects());
    Place { sandbox, control_plane, writer, made: 0 }
}

fn add_versions(report: &mut Report, control_plane: &ControlPlane<'_>) {
    report.add_version("cproxy", cproxy_binary(), &["version"]);
    for name in ["kube-apiserver", "etcd", "kube-proxy"] {
        report.add_version(name, control_plane.binary(name), &["--version"]);
    }
    report.add_version("nftables", "nft", &["--version"]);
}
