//! Cost of each further agent for the API server: every microVM has an agent of its own, so one API server serves
//! thousands of watchers.
//!
//! Fleets of agents of several sizes follow one API server, one fleet after the other; fleets of kube-proxies do the
//! same. A fleet starts all at once. Then single EndpointSlices change; then the API server crashes and comes back.
//! Last, many agents start while another client reads one Service again and again.

mod burst;
mod fleet;
mod measure;
mod place;
mod report;
mod table;
mod verdicts;

use std::{path::PathBuf, time::Duration};

use anyhow::Result;
use clap::Parser;
use cproxy_benches::report::{Report, check_output};
use cproxy_tests::{population::Shape, process::cproxy_binary, sandbox::Sandbox};

use crate::{
    burst::Burst,
    fleet::Kind,
    measure::{Found, Group, Plan},
    place::Place,
};

const PREFIX: &str = "cproxy-bench";

/// Number of endpoints of each Service.
const ENDPOINTS: u32 = 10;

/// Memory of a kube-proxy and of its rules in the kernel, rounded up: without Services, and for each.
const KUBE_PROXY_BYTES: u64 = 64 << 20;
const KUBE_PROXY_SERVICE_BYTES: u64 = 64 << 10;

/// Memory that is left to the API server and everything else.
const RESERVE_BYTES: u64 = 4 << 30;

/// Command line.
#[derive(Parser)]
#[command(name = "fanout", about = "What each further agent costs the API server")]
struct Arguments {
    /// How many Services, with 10 endpoints each; more numbers, separated by commas, are measured one after the other
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [1_000, 5_000])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=20_000))]
    services: Vec<u32>,
    /// How many agents; more numbers are one fleet after the other
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [1, 10, 100])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000))]
    agents: Vec<u32>,
    /// How many kube-proxies, if memory allows; 0 is none; default: as many as agents
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(0..=1_000))]
    kube_proxies: Option<Vec<u32>>,
    /// How many agents start in a burst; 0 is none
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(0..=1_000))]
    burst: u32,
    /// Binary of an earlier agent with the same table layout, which is measured like the present one
    #[arg(long, value_name = "FILE")]
    beside: Option<PathBuf>,
    /// Number of single changes
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    changes: u32,
    /// Few of everything: only shows that everything works
    #[arg(long, conflicts_with_all = ["services", "agents", "kube_proxies", "burst", "changes"])]
    quick: bool,
    /// File for all samples; default: bench/fanout.json in cargo's output directory
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Everything that was measured, and what could not be.
#[derive(Default)]
struct Results {
    fleets: Vec<Found>,
    bursts: Vec<Burst>,
    failures: Vec<String>,
}

fn main() -> Result<()> {
    let mut arguments = Arguments::parse();
    check_output(arguments.output.as_deref())?;
    let plan = plan(&mut arguments);
    let sandbox = Sandbox::new(PREFIX);
    let mut place = Place::prepare(&sandbox, arguments.beside.clone());
    let mut results = Results::default();
    arguments.services.sort_unstable();
    for &services in &arguments.services {
        let shape = Shape::new(services, ENDPOINTS);
        place.grow(shape);
        for group in arguments.groups(shape) {
            results.measure_fleet(&mut place, group, &plan);
        }
        for kind in arguments.agent_kinds().filter(|_| arguments.burst > 0) {
            let group = Group { kind, shape, wanted: arguments.burst, count: arguments.burst };
            results.measure_burst(&mut place, group, &plan);
        }
    }
    let report = report::of(&results.fleets, &results.bursts, &plan);
    let mut report = Report { failures: results.failures, ..report };
    add_versions(&mut report, &place);
    // An orderly end would take a second, and no client is connected any more.
    place.control_plane.kill_api_server();
    report.finish(arguments.quick, arguments.output.as_deref())
}

/// The plan; with `--quick` also smaller numbers in the arguments.
fn plan(arguments: &mut Arguments) -> Plan {
    if !arguments.quick {
        let [rest, rest_after_crash, idle] = [500, 5_000, 10_000].map(Duration::from_millis);
        return Plan { changes: arguments.changes, starts_of_one: 5, rest, rest_after_crash, idle };
    }
    (arguments.services, arguments.agents, arguments.kube_proxies) = (vec![20], vec![3], Some(vec![1]));
    (arguments.changes, arguments.burst) = (1, 5);
    let [rest, rest_after_crash, idle] = [200, 500, 500].map(Duration::from_millis);
    Plan { changes: 1, starts_of_one: 1, rest, rest_after_crash, idle }
}

impl Arguments {
    /// Kinds of agents.
    fn agent_kinds(&self) -> impl Iterator<Item = Kind> + use<> {
        [Some(Kind::Cproxy), self.beside.as_ref().map(|_| Kind::Before)].into_iter().flatten()
    }

    /// The fleets in the order of their sizes, so that those of the same size stand beside each other.
    fn groups(&self, shape: Shape) -> Vec<Group> {
        let group = move |kind| move |&wanted: &u32| Group { kind, shape, wanted, count: wanted };
        let agents = self.agent_kinds().flat_map(|kind| self.agents.iter().map(group(kind)));
        let kube_proxies = self.kube_proxies.as_ref().unwrap_or(&self.agents).iter().filter(|count| **count > 0);
        let mut groups = agents.chain(kube_proxies.map(group(Kind::KubeProxy))).collect::<Vec<_>>();
        groups.sort_by_key(|group| group.wanted);
        groups
    }
}

impl Results {
    /// Measures as many of the group as there is memory for. A failure leaves the other results useful.
    fn measure_fleet(&mut self, place: &mut Place<'_>, group: Group, plan: &Plan) {
        let count = match group.kind {
            Kind::KubeProxy => kube_proxies_that_fit(group.wanted, group.shape.services, available_bytes()),
            Kind::Cproxy | Kind::Before => group.wanted,
        };
        let group = Group { count, ..group };
        eprintln!("{}: measuring {count} of {}", group.shape, group.kind);
        match measure::measure(place, group, plan) {
            Ok(found) => self.fleets.push(found),
            Err(error) => self.failures.push(format!("{}: {count} of {}: {error:#}", group.shape, group.kind)),
        }
    }

    fn measure_burst(&mut self, place: &mut Place<'_>, group: Group, plan: &Plan) {
        eprintln!("{}: measuring a burst of {} of {}", group.shape, group.count, group.kind);
        match burst::measure(place, group, plan) {
            Ok(burst) => self.bursts.push(burst),
            Err(error) => self.failures.push(format!("{}: burst of {}: {error:#}", group.shape, group.kind)),
        }
    }
}

fn add_versions(report: &mut Report, place: &Place<'_>) {
    report.add_version("cproxy", cproxy_binary(), &["version"]);
    if let Some(before) = &place.before {
        report.add_version("cproxy before", before, &["version"]);
    }
    for name in ["kube-apiserver", "etcd", "kube-proxy"] {
        report.add_version(name, place.control_plane.binary(name), &["--version"]);
    }
    report.add_version("nftables", "nft", &["--version"]);
}

/// The number of kube-proxies, at most `wanted` and at least one, that fit into the available memory.
fn kube_proxies_that_fit(wanted: u32, services: u32, available_bytes: u64) -> u32 {
    let each = KUBE_PROXY_BYTES + KUBE_PROXY_SERVICE_BYTES * u64::from(services);
    let fit = available_bytes.saturating_sub(RESERVE_BYTES) / each;
    u32::try_from(fit).unwrap_or(u32::MAX).clamp(1, wanted)
}

/// Memory that processes can use now; none if the kernel does not report it.
fn available_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or_default() << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fleets_of_the_same_size_follow_each_other() {
        let arguments =
            Arguments::parse_from(["fanout", "--agents", "1,10", "--kube-proxies", "0,10", "--beside", "x"]);
        let groups = arguments.groups(Shape::new(1, ENDPOINTS)).into_iter().map(|group| (group.wanted, group.kind));
        let wanted =
            [(1, Kind::Cproxy), (1, Kind::Before), (10, Kind::Cproxy), (10, Kind::Before), (10, Kind::KubeProxy)];
        assert_eq!(groups.collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn kube_proxies_leave_memory_for_the_rest() {
        assert_eq!(kube_proxies_that_fit(100, 1_000, 64 << 30), 100);
        assert_eq!(kube_proxies_that_fit(100, 5_000, RESERVE_BYTES + (10 << 30)), 27);
        assert_eq!(kube_proxies_that_fit(100, 5_000, 0), 1);
    }
}
