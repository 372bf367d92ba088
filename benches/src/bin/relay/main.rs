//! One relay with thousands of clients: its memory, CPU time and latency, beside the API server's.
//!
//! Relay, load generator and control plane are processes of one machine. The clients are the agent's own code with a
//! connection each, but they only count what they get, apart from some that decode and compare everything.

mod bystander;
mod changes;
mod clock;
mod generator;
mod load;
mod pin;
mod place;
mod policies;
mod rates;
mod report;
mod starts;
mod storms;

use std::{path::PathBuf, time::Duration};

use anyhow::Result;
use clap::{Parser, ValueEnum};
use cproxy_benches::report::check_output;
use cproxy_tests::{
    population::Shape, process::cproxy_binary, relay_server::relay_binary, sandbox::Sandbox, usage::Memory,
};

use crate::{
    changes::Changer,
    generator::Generator,
    place::{Place, memory_at_rest, socket_buffers_bytes},
    report::{Footprint, Results},
};

const PREFIX: &str = "cproxy-bench";

/// Argument with which this program is the load generator.
pub(crate) const LOAD: &str = "load";

/// Names of the servers in results.
pub(crate) const RELAY: &str = "relay";
const API_SERVER: &str = "API server";

/// Number of endpoints of each Service.
const ENDPOINTS: u32 = 10;

/// Time from the start of one client to that of the next, where it is not measured: the generator needs as much to
/// decode the lists of one.
pub(crate) const CALM: Duration = Duration::from_millis(18);

/// Services of the smaller population from which agents start.
const FEW_SERVICES: u32 = 1_000;

/// Command line.
#[derive(Parser)]
#[command(name = "relay", about = "What thousands of clients cost a relay")]
struct Arguments {
    /// How many clients; more numbers, separated by commas, are measured one after the other. Storms have the most
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [2_000, 10_000])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=50_000))]
    clients: Vec<u32>,
    /// How many clients the API server has itself
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [500, 1_000, 2_000])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=50_000))]
    direct_clients: Vec<u32>,
    /// How many Services, with 10 endpoints each
    #[arg(long, value_name = "N", default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    services: u32,
    /// Seconds of changes at each rate
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    seconds: u32,
    /// Seconds for which the relay cannot reach the API server
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    cut_seconds: u32,
    /// How often an agent starts from each source
    #[arg(long, value_name = "N", default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    starts: u32,
    /// Measures one part alone
    #[arg(long, value_name = "PART")]
    only: Option<Part>,
    /// Few of everything: only shows that everything works
    #[arg(long)]
    quick: bool,
    /// File for all samples; default: bench/relay.json in cargo's output directory
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Memory with clients, and latency of changes
    Rates,
    /// The same with clients of the API server itself
    Direct,
    /// Many clients that arrive or come back
    Storms,
    /// Clients that do not read
    Slow,
    /// Start of an agent
    Starts,
    /// Clients that follow the policy of a pod
    Policies,
}

fn main() -> Result<()> {
    if std::env::args().nth(1).as_deref() == Some(LOAD) {
        return load::run();
    }
    let arguments = arguments();
    check_output(arguments.output.as_deref())?;
    let sandbox = Sandbox::new(PREFIX);
    let has_few = arguments.has(Part::Starts) && arguments.services > FEW_SERVICES;
    let first = if has_few { FEW_SERVICES } else { arguments.services };
    let mut place = Place::prepare(&sandbox, Shape::new(first, ENDPOINTS));
    let mut results = Results::default();
    if has_few {
        let mut changer = Changer::new(&place.control_plane, place.shape);
        results.measure(Part::Starts, &mut place, &mut changer, &arguments);
        place.grow(Shape::new(arguments.services, ENDPOINTS));
    }
    let mut changer = Changer::new(&place.control_plane, place.shape);
    for &part in Part::value_variants().iter().filter(|part| arguments.has(**part)) {
        results.measure(part, &mut place, &mut changer, &arguments);
    }
    let mut report = report::of(results);
    report.add_version("cproxy", cproxy_binary(), &["version"]);
    report.add_version("cproxy-relay", relay_binary(), &["version"]);
    for name in ["kube-apiserver", "etcd"] {
        report.add_version(name, place.control_plane.binary(name), &["--version"]);
    }
    report.finish(arguments.quick, arguments.output.as_deref())
}

fn arguments() -> Arguments {
    let mut arguments = Arguments::parse();
    if arguments.quick {
        (arguments.clients, arguments.direct_clients) = (vec![20, 50], vec![20]);
        (arguments.services, arguments.seconds, arguments.cut_seconds, arguments.starts) = (50, 2, 3, 1);
    }
    arguments.clients.sort_unstable();
    arguments.direct_clients.sort_unstable();
    arguments
}

impl Arguments {
    fn has(&self, part: Part) -> bool {
        self.only.is_none_or(|only| only == part)
    }
}

impl Results {
    /// Measures a part. A failure leaves the other results useful.
    fn measure(&mut self, part: Part, place: &mut Place<'_>, changer: &mut Changer, arguments: &Arguments) {
        eprintln!("{}: measuring {part:?}", place.shape);
        let measured = match part {
            Part::Rates => self.measure_rates(place, changer, arguments),
            Part::Direct => self.measure_direct(place, changer, arguments),
            Part::Storms => self.measure_storms(place, changer, arguments),
            Part::Slow => storms::measure_beside_slow(place, changer, rates::RATES[1], arguments.seconds)
                .map(|slow| self.slow = Some(slow)),
            Part::Policies => self.measure_policies(place, arguments),
            Part::Starts => starts::measure(place, arguments.starts).map(|starts| self.starts.extend(starts)),
        };
        if let Err(error) = measured {
            eprintln!("{part:?} failed: {error:#}");
            self.failures.push(format!("{part:?}: {error:#}"));
        }
    }

    fn measure_rates(&mut self, place: &Place<'_>, changer: &mut Changer, arguments: &Arguments) -> Result<()> {
        let relay = place.start_relay(0, &[])?;
        let mut generator = Generator::start(place.sandbox)?;
        let (idle, buffers) = (memory_at_rest(relay.pid()), socket_buffers_bytes());
        for &clients in &arguments.clients {
            add_clients(place, 1, &mut generator, clients)?;
            let memory = memory_at_rest(relay.pid());
            let buffers_bytes = socket_buffers_bytes().saturating_sub(buffers);
            let upstream = place.upstream_watches();
            self.add_footprint(Footprint { server: RELAY, clients, idle, memory, buffers_bytes, upstream });
            for rate in rates::RATES {
                let subject = rates::Subject { server: RELAY, relay: Some(&relay), remark: "" };
                let measured = rates::measure(place, &subject, &mut generator, changer, rate, arguments.seconds)?;
                self.rates.push(measured);
                let checked = rates::check(place, &mut generator, changer)?;
                eprintln!("{checked} clients have what was written; the relay has {:?}", Memory::of(relay.pid()));
            }
            let lists = generator.counts()?.lists;
            eprintln!("{clients} clients: {lists} lists so far");
        }
        let metrics = relay.metrics();
        let metrics: Vec<_> = metrics.lines().filter(|line| !line.starts_with('#')).collect();
        eprintln!("{}", metrics.join("\n"));
        Ok(())
    }

    fn measure_direct(&mut self, place: &Place<'_>, changer: &mut Changer, arguments: &Arguments) -> Result<()> {
        let mut generator = Generator::start(place.sandbox)?;
        let server = place.api_server()?;
        let (idle, buffers) = (memory_at_rest(server), socket_buffers_bytes());
        for &clients in &arguments.direct_clients {
            add_clients(place, 0, &mut generator, clients)?;
            let memory = memory_at_rest(server);
            let buffers_bytes = socket_buffers_bytes().saturating_sub(buffers);
            let upstream = place.upstream_watches();
            self.add_footprint(Footprint { server: API_SERVER, clients, idle, memory, buffers_bytes, upstream });
            for rate in rates::RATES {
                let subject = rates::Subject { server: API_SERVER, relay: None, remark: "" };
                let measured = rates::measure(place, &subject, &mut generator, changer, rate, arguments.seconds)?;
                self.rates.push(measured);
            }
        }
        Ok(())
    }

    fn measure_storms(&mut self, place: &mut Place<'_>, changer: &mut Changer, arguments: &Arguments) -> Result<()> {
        let clients = arguments.clients.last().copied().unwrap_or(1);
        let cut = Duration::from_secs(arguments.cut_seconds.into());
        storms::measure(place, changer, clients, cut, &mut self.storms)
    }

    fn measure_policies(&mut self, place: &Place<'_>, arguments: &Arguments) -> Result<()> {
        let clients = arguments.clients.last().copied().unwrap_or(1);
        let (footprint, at_rate, rollout) = policies::measure(place, clients, arguments.seconds)?;
        self.footprints.push(footprint);
        self.rates.push(at_rate);
        self.storms.push(rollout);
        Ok(())
    }

    fn add_footprint(&mut self, footprint: Footprint) {
        eprintln!("{}", footprint.text());
        self.footprints.push(footprint);
    }
}

/// Starts clients until there are this many, and waits until they have all lists.
fn add_clients(place: &Place<'_>, relays: usize, generator: &mut Generator, clients: u32) -> Result<()> {
    let new = clients.saturating_sub(generator.clients);
    generator.start_clients(&place.clients(relays, new, CALM * new))?;
    generator.wait_for_lists().map(drop)
}
