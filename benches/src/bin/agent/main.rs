//! Cost of the agent beside kube-proxy: memory, CPU time, and time until the kernel has the API server's objects.
//!
//! All peers follow the same objects of one API server. They run one after the other, so that none takes CPU time from
//! another. Each kube-proxy has a network namespace of its own, and its rules are removed with it. TCP connections to
//! one Service's ClusterIP, the same for all peers, show the state of the kernel, since the backends return their
//! names.
//!
//! kube-proxy runs with its defaults, as it is deployed. It writes its rules at most once a second, so the pause
//! between two changes is longer than that. Its time to ready ends with the first connection that is answered, since it
//! writes all rules in one transaction. The time of cproxy ends when the file `ready` appears, after everything is
//! written.

mod measure;
mod peer;
mod report;

use std::{path::PathBuf, time::Duration};

use anyhow::Result;
use clap::Parser;
use cproxy_benches::{
    kube_proxy, node,
    report::{Report, check_output},
    subject,
};
use cproxy_tests::{
    control_plane::ControlPlane, population::Shape, process::cproxy_binary, sandbox::Sandbox, writer::Writer,
};

use crate::{
    measure::{Found, Plan},
    peer::Peer,
};

const PREFIX: &str = "cproxy-bench";

/// Shapes for all peers.
const USUAL: [Shape; 2] = [Shape::new(100, 10), Shape::new(5_000, 10)];
/// Shape for cproxy alone: each kube-proxy takes minutes for it.
const MANY: Shape = Shape::new(10_000, 25);

/// Number of slices that change at the same time in a burst.
const BURST: usize = 1_000;
/// Number of bursts, to see whether memory grows with each.
const BURSTS: u32 = 5;

/// Command line.
#[derive(Parser)]
#[command(name = "agent", about = "Cost of the agent beside kube-proxy")]
struct Arguments {
    /// Number of Services, and of endpoints of each; may be repeated; default: 100x10, 5000x10 and, cproxy
    /// alone, 10000x25
    #[arg(long = "shape", value_name = "SERVICESxENDPOINTS")]
    shapes: Vec<Shape>,
    /// Peer to measure; may be repeated; default: cproxy, iptables and nftables
    #[arg(long = "peer", value_name = "PEER")]
    peers: Vec<Peer>,
    /// Number of starts of each peer
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    starts: u32,
    /// Number of single changes
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    changes: u32,
    /// A small shape, one start, few changes: only shows that everything works
    #[arg(long, conflicts_with_all = ["shapes", "starts", "changes"])]
    quick: bool,
    /// File for all samples; default: bench/agent.json in cargo's output directory
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Measurements with one shape.
struct Column {
    shape: Shape,
    found: Vec<Found>,
    /// Reasons why peers could not be measured.
    failures: Vec<String>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    check_output(arguments.output.as_deref())?;
    let peers = if arguments.peers.is_empty() { &Peer::USUAL } else { arguments.peers.as_slice() };
    let mut shapes = arguments.shapes.iter().map(|&shape| (shape, peers)).collect::<Vec<_>>();
    if shapes.is_empty() {
        shapes.extend(USUAL.map(|shape| (shape, peers)));
        shapes.extend(peers.contains(&Peer::Cproxy).then_some((MANY, [Peer::Cproxy].as_slice())));
    }
    let mut plan = Plan {
        starts: arguments.starts,
        changes: arguments.changes,
        burst: BURST,
        bursts: BURSTS,
        rest: Duration::from_millis(500),
        quiet: Duration::from_secs(30),
    };
    if arguments.quick {
        let (rest, quiet) = (Duration::from_millis(200), Duration::from_millis(500));
        plan = Plan { starts: 1, changes: 1, burst: 50, bursts: 2, rest, quiet };
        shapes = vec![(Shape::new(20, 5), peers)];
    }
    let mut columns = Vec::new();
    let mut versions = Vec::new();
    for (shape, peers) in shapes {
        columns.push(measure_shape(shape, peers, &plan, &mut versions));
    }
    let report = Report { versions, ..report::of(&columns, &plan) };
    report.finish(arguments.quick, arguments.output.as_deref())
}

/// Starts a control plane with the objects and measures one peer after the other.
fn measure_shape(shape: Shape, peers: &[Peer], plan: &Plan, versions: &mut Vec<(String, String)>) -> Column {
    let sandbox = Sandbox::new(PREFIX);
    sandbox.add_addresses(subject::BACKENDS);
    let mut control_plane = ControlPlane::start(&sandbox);
    node::create(&sandbox, &control_plane);
    let writer = Writer::new(&control_plane);
    *versions = versions_of(&control_plane);
    eprintln!("{shape}: creating the objects");
    writer.create(shape.objects(0..shape.services));
    writer.create(subject::objects());
    let place = peer::Place { sandbox: &sandbox, control_plane: &control_plane, writer: &writer, shape };
    let mut found = Vec::new();
    let mut failures = Vec::new();
    for &peer in peers {
        eprintln!("{shape}: measuring {peer}");
        // The other peers' results are useful without this one.
        match measure::measure(&place, peer, plan) {
            Ok(figures) => found.push(figures),
            Err(error) => {
                eprintln!("{shape}: {peer} failed: {error:#}");
                failures.push(format!("{shape}: {peer}: {error:#}"));
                writer.replace([subject::slice(0)]);
            }
        }
    }
    // An orderly end would take a second, and no client is connected any more.
    control_plane.kill_api_server();
    Column { shape, found, failures }
}

fn versions_of(control_plane: &ControlPlane<'_>) -> Vec<(String, String)> {
    let mut report = Report::new("agent");
    report.add_version("cproxy", cproxy_binary(), &["version"]);
    for name in ["kube-apiserver", "kube-proxy"] {
        report.add_version(name, control_plane.binary(name), &["--version"]);
    }
    report.add_version("iptables", kube_proxy::LEGACY_IPTABLES, &["iptables", "--version"]);
    report.add_version("nftables", "nft", &["--version"]);
    report.versions
}
