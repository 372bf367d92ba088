//! Cost of connections through a ClusterIP, beside that of alternatives: each peer has a network namespace of its own,
//! all use the same servers behind the same Services, and in every round the peers run one after the other.

mod balance;
mod connect;
mod contest;
mod guest;
mod live;
mod redis;
mod redis_cluster;
mod request;
mod rolling;
mod servers;
mod small_guest;
mod udp;
mod wrk;

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::{Args, Parser};
use contest::Rounds;
use cproxy_benches::{
    arena::{Arena, Cluster, Peer, Subject, worker},
    report::{self, Report},
};
use cproxy_tests::{population::Shape, sandbox::Sandbox};

const PREFIX: &str = "cproxy-bench";

/// Number of endpoints of each Service.
const ENDPOINTS: u32 = 10;

/// Choice of the benchmark.
#[derive(Parser)]
#[command(name = "traffic", about = "What connections through a ClusterIP cost, beside what people would use instead")]
enum Benchmark {
    /// How long connect(2) takes
    Connect(Plan),
    /// Short HTTP connections, 2,000 at a time
    Wrk(Plan),
    /// A whole short HTTP request on a connection of its own
    Request(Plan),
    /// redis, by connections that stay and by short ones; a client behind a macvlan; connections that are idle for long
    Redis(Plan),
    /// A redis cluster of three shards, each behind a ClusterIP of its own
    RedisCluster(Plan),
    /// Requests that fail while the pods of a Deployment are replaced
    Rolling(Plan),
    /// DNS over UDP, and one stream of many bytes
    Udp(Plan),
    /// How evenly connections are spread over backends
    Balance(Plan),
    /// The same in a virtual machine, whose kernel has IPVS, timed in instructions
    Guest(Plan),
    /// Each peer alone in a virtual machine with half a core and 500 MiB, timed in instructions
    SmallGuest(Plan),
    /// The part that runs in that virtual machine
    #[command(hide = true)]
    Inside(Plan),
    /// Carries out orders
    #[command(name = worker::ARGUMENT, hide = true)]
    Worker,
}

/// How much is measured.
#[derive(Args, Clone)]
struct Plan {
    /// How many Services there are; may be repeated
    #[arg(long = "services", value_name = "N", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    services: Vec<u32>,
    /// How many endpoints each has; default: 10, in a virtual machine 2
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    endpoints: Option<u32>,
    /// Peer to measure; may be repeated; default: all that this machine's kernel has
    #[arg(long = "peer", value_name = "PEER")]
    peers: Vec<Peer>,
    /// How many rounds; in each, every peer has its turn
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// `connect` alone: only beside live connections, and to Services in random order
    #[arg(long)]
    live: bool,
    /// Few Services, one round: only shows that everything works
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
    /// Where every sample goes; default: the benchmark's name and .json, in the directory `bench` of cargo's output
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Plan {
    fn services(&self, default: &[u32]) -> Vec<u32> {
        let mut services = match (self.quick, &*self.services) {
            (true, []) => vec![10],
            (false, []) => default.to_vec(),
            (_, given) => given.to_vec(),
        };
        services.sort_unstable();
        services
    }

    fn shape(&self, services: u32) -> Shape {
        Shape::new(services, self.endpoints.unwrap_or(ENDPOINTS))
    }

    fn rounds(&self, default: Rounds) -> Rounds {
        if self.quick { Rounds::of_all(1) } else { self.rounds.map_or(default, Rounds::of_all) }
    }

    /// Early checks of conditions that would otherwise fail only after long work.
    fn check(&self) -> Result<()> {
        let has = |peer| self.peers.contains(&peer);
        ensure!(
            !(has(Peer::Cproxy) && has(Peer::CproxyRoundRobin)),
            "cproxy and cproxy-round-robin cannot be measured beside each other; `balance` with cproxy measures both"
        );
        for (index, peer) in self.peers.iter().enumerate() {
            ensure!(!self.peers.iter().skip(index + 1).any(|other| other == peer), "--peer {peer} is given twice");
        }
        report::check_output(self.output.as_deref())
    }

    fn peers(&self) -> &[Peer] {
        if self.peers.is_empty() { &Peer::USUAL } else { &self.peers }
    }

    /// Measures at each number of Services until one fails; earlier results stay.
    fn at_each<R>(
        &self,
        arena: &mut Arena<'_>,
        services: &[u32],
        failures: &mut Vec<String>,
        mut measure: impl FnMut(&mut Arena<'_>) -> Result<R>,
    ) -> Vec<(u32, R)> {
        let mut all = Vec::new();
        for &services in services {
            let found = arena.grow(self.shape(services)).and_then(|()| {
                arena.stop();
                eprintln!("{services} Services: measuring");
                let found = measure(arena);
                arena.resume();
                found
            });
            match found {
                Ok(found) => all.push((services, found)),
                Err(error) => {
                    eprintln!("{services} Services: failed: {error:#}");
                    failures.push(format!("{services} Services: {error:#}"));
                    break;
                }
            }
        }
        all
    }

    /// Measures with all peers as [`Self::at_each`] does and, unless the options name other Services or peers, cproxy
    /// alone with `many` Services. Those come from manifests, since an API server takes longer for each Service the
    /// more Services it has. `serve` starts the servers.
    fn at_each_and_many<S, R>(
        &self,
        benchmark: &'static str,
        subject: Subject,
        [services, many]: [&[u32]; 2],
        serve: impl Fn(&Sandbox) -> Result<S>,
        mut measure: impl FnMut(&mut Arena<'_>) -> Result<R>,
    ) -> Result<(Report, Vec<(u32, R)>)> {
        // Only one sandbox can exist at a time.
        let (mut report, mut all) = {
            let sandbox = Sandbox::new(PREFIX);
            let _server = serve(&sandbox)?;
            let mut arena = self.arena(&sandbox, &[subject])?;
            let mut report = servers::report(benchmark, &arena);
            let all = self.at_each(&mut arena, &self.services(services), &mut report.failures, &mut measure);
            (report, all)
        };
        if !self.quick && self.services.is_empty() {
            let sandbox = Sandbox::new(PREFIX);
            let _server = serve(&sandbox)?;
            let mut arena = Arena::new(&sandbox, Cluster::Manifests, &[Peer::Direct, Peer::Cproxy], &[subject])?;
            all.extend(self.at_each(&mut arena, many, &mut report.failures, measure));
            report.notes.push(
                "In runs without kube-proxy, which have the most Services, cproxy reads manifests instead of an API \
                 server; programs and maps are the same."
                    .to_owned(),
            );
        }
        Ok((report, all))
    }

    /// All peers with these measured Services.
    fn arena<'s>(&self, sandbox: &'s Sandbox, subjects: &[Subject]) -> Result<Arena<'s>> {
        self.arena_of(sandbox, self.peers(), subjects)
    }

    /// These peers with these measured Services.
    fn arena_of<'s>(&self, sandbox: &'s Sandbox, peers: &[Peer], subjects: &[Subject]) -> Result<Arena<'s>> {
        Arena::new(sandbox, Cluster::start(sandbox), peers, subjects)
    }
}

fn main() -> Result<()> {
    let benchmark = Benchmark::parse();
    let is_connect = matches!(benchmark, Benchmark::Connect(_));
    let (plan, run): (_, fn(&Plan) -> Result<Report>) = match benchmark {
        Benchmark::Worker => return worker::run(),
        Benchmark::Inside(plan) => return guest::inside(&plan),
        Benchmark::Connect(plan) => (plan, connect::run),
        Benchmark::Wrk(plan) => (plan, wrk::run),
        Benchmark::Request(plan) => (plan, request::run),
        Benchmark::Redis(plan) => (plan, redis::run),
        Benchmark::RedisCluster(plan) => (plan, redis_cluster::run),
        Benchmark::Rolling(plan) => (plan, rolling::run),
        Benchmark::Udp(plan) => (plan, udp::run),
        Benchmark::Guest(plan) => (plan, guest::run),
        Benchmark::SmallGuest(plan) => (plan, small_guest::run),
        Benchmark::Balance(plan) => (plan, balance::run),
    };
    ensure!(is_connect || !plan.live, "--live is for `connect` alone");
    plan.check()?;
    let report = run(&plan)?;
    report.finish(plan.quick, plan.output.as_deref())
}
