//! `cargo xtask bench`: the measurements that the documentation quotes.

mod chart;
pub(crate) mod docs;
mod page;
mod results;
mod views;

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};

use crate::{
    binary::{AGENT, RELAY},
    kernels::{self, LINUX_6_1},
    releases::{KUBERNETES, POLICY_ENGINES},
    run, setup,
    vm::GuestFiles,
};

/// A benchmark and its arguments.
#[derive(Args)]
pub(crate) struct BenchArguments {
    /// Benchmark to run, or `all` or `docs`
    benchmark: Selection,
    /// Arguments of the benchmark, such as --quick or --rounds N; `-- --help` lists them. `all` only accepts --quick
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// A benchmark, or an action on all of them.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Selection {
    /// Time of connect() through a ClusterIP, beside kube-proxy
    Connect,
    /// Throughput and latency of HTTP clients through a ClusterIP, beside kube-proxy
    Wrk,
    /// Time of a whole short HTTP request through a ClusterIP, connect() included, beside kube-proxy
    Request,
    /// Throughput and latency of redis' clients through a ClusterIP, beside kube-proxy
    Redis,
    /// Throughput and latency of a redis cluster of three shards through their ClusterIPs, beside kube-proxy
    RedisCluster,
    /// Requests that fail while the pods of a Deployment are replaced, beside kube-proxy
    Rolling,
    /// Throughput and latency of DNS and other UDP clients through a ClusterIP, beside kube-proxy
    Udp,
    /// Cost of the socket programs, for each run and each call
    Datapath,
    /// Memory, CPU time and start of the agent, beside kube-proxy
    Agent,
    /// Time from the agent's start to a complete table
    Start,
    /// Time from a change in the cluster until connections follow it
    Propagation,
    /// Cost of each further agent for the API server, beside kube-proxy
    Fanout,
    /// Memory, CPU time and latency of the relay with thousands of clients, beside the API server
    Relay,
    /// Cost of lists and watches of all Pods for the API server
    Pods,
    /// Cost of a network policy for the pod and its agent, beside the kernel's packet filters
    Policy,
    /// Cost of calls from outside to the address of a load balancer
    Receive,
    /// CPU time and memory of the agent while it looks for stale sockets
    Sockets,
    /// Distribution of connections over endpoints, beside kube-proxy
    Balance,
    /// Connections in a virtual machine whose kernel has IPVS, counted in instructions
    Guest,
    /// Each peer alone in a virtual machine with half a core and 500 MiB, counted in instructions
    SmallGuest,
    /// Runs all of them and writes docs/benchmarks.md
    All,
    /// Writes docs/benchmarks.md and its charts from existing results
    Docs,
}

/// Requirements of a benchmark besides the agent, each set including those before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Requirements {
    Nothing,
    ControlPlane,
    Programs,
}

/// In the order in which they run and are documented: first those that compare with a machine without cproxy.
const BENCHMARKS: [Selection; 20] = [
    Selection::Datapath,
    Selection::SmallGuest,
    Selection::Connect,
    Selection::Request,
    Selection::Wrk,
    Selection::Guest,
    Selection::Redis,
    Selection::RedisCluster,
    Selection::Rolling,
    Selection::Udp,
    Selection::Agent,
    Selection::Start,
    Selection::Propagation,
    Selection::Fanout,
    Selection::Relay,
    Selection::Pods,
    Selection::Policy,
    Selection::Receive,
    Selection::Sockets,
    Selection::Balance,
];

/// A run that only shows that everything works.
const QUICK: &str = "--quick";

/// Runs one benchmark or all.
pub(crate) fn run(arguments: &BenchArguments) -> Result<ExitCode> {
    match arguments.benchmark {
        Selection::All => all(&arguments.arguments),
        Selection::Docs => docs::write().map(|()| ExitCode::SUCCESS),
        one => {
            run::require_root("a benchmark")?;
            one.run(&arguments.arguments).map(|()| ExitCode::SUCCESS)
        }
    }
}

/// Runs all benchmarks, even if some fail, and writes the page about the others.
fn all(arguments: &[String]) -> Result<ExitCode> {
    if let Some(other) = arguments.iter().find(|argument| *argument != QUICK) {
        bail!("`all` only accepts {QUICK}, not {other}: pass it to a single benchmark");
    }
    run::require_root("a benchmark")?;
    let names = BENCHMARKS.map(Selection::name);
    let mut failed = Vec::new();
    for benchmark in BENCHMARKS {
        run::report(format!("bench: {}", benchmark.name()));
        // Selection an earlier run has found is not of this one.
        docs::remove(benchmark.name())?;
        if let Err(error) = benchmark.run(arguments) {
            run::report(format!("bench: {} failed: {error:#}", benchmark.name()));
            failed.push(benchmark.name());
        }
    }
    if arguments.is_empty() {
        docs::write()?;
    }
    match failed.as_slice() {
        [] => Ok(ExitCode::SUCCESS),
        failed => {
            run::report(format!("bench: {} of {} failed: {}", failed.len(), names.len(), failed.join(" ")));
            Ok(ExitCode::FAILURE)
        }
    }
}

impl Selection {
    /// Name on the command line.
    fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Wrk => "wrk",
            Self::Request => "request",
            Self::Redis => "redis",
            Self::RedisCluster => "redis-cluster",
            Self::Rolling => "rolling",
            Self::Udp => "udp",
            Self::Datapath => "datapath",
            Self::Agent => "agent",
            Self::Start => "start",
            Self::Propagation => "propagation",
            Self::Fanout => "fanout",
            Self::Relay => "relay",
            Self::Pods => "pods",
            Self::Policy => "policy",
            Self::Receive => "receive",
            Self::Sockets => "sockets",
            Self::Balance => "balance",
            Self::Guest => "guest",
            Self::SmallGuest => "small-guest",
            Self::All => "all",
            Self::Docs => "docs",
        }
    }

    /// Its binary, and whether that has several benchmarks, whose names are its subcommands.
    fn binary(self) -> (&'static str, bool) {
        match self {
            Self::Policy => (self.name(), false),
            one if one.needs() == Requirements::Programs => ("traffic", true),
            other => (other.name(), false),
        }
    }

    /// Cargo's profile. The relay's clients share two CPUs with it, so that they have to be fast.
    fn profile(self) -> &'static str {
        if let Self::Relay = self { "relay" } else { "release" }
    }

    fn needs(self) -> Requirements {
        match self {
            Self::Connect | Self::Request | Self::Wrk | Self::Redis | Self::RedisCluster => Requirements::Programs,
            Self::Rolling | Self::Udp | Self::Balance | Self::Guest | Self::SmallGuest => Requirements::Programs,
            Self::Policy => Requirements::Programs,
            Self::Agent | Self::Start | Self::Propagation | Self::Fanout => Requirements::ControlPlane,
            Self::Relay | Self::Pods => Requirements::ControlPlane,
            Self::Datapath | Self::Receive | Self::Sockets | Self::All | Self::Docs => Requirements::Nothing,
        }
    }

    /// Builds what the benchmark needs and runs it.
    fn run(self, arguments: &[String]) -> Result<()> {
        let (binary, has_subcommands) = self.binary();
        let mut command = run::cargo();
        command.args(["run", "--profile", self.profile(), "--package", "cproxy-benches", "--bin", binary, "--"]);
        command.args(has_subcommands.then(|| self.name())).args(arguments);
        let agent = AGENT.build()?.shipped;
        command.env(AGENT.variable, &agent);
        if let Self::Start | Self::Relay | Self::Policy = self {
            command.env(RELAY.variable, RELAY.build()?.shipped);
        }
        if self.needs() >= Requirements::Programs {
            setup::for_benches()?;
        }
        if self.needs() >= Requirements::ControlPlane {
            setup::for_cluster()?;
            command.env(KUBERNETES.variable, KUBERNETES.ensure()?);
        }
        if let Self::Policy = self {
            command.env(POLICY_ENGINES.variable, POLICY_ENGINES.ensure()?);
        }
        if let Self::Guest | Self::SmallGuest = self {
            GuestFiles::new(&agent)?.set_variables(&mut command, &kernels::packaged_for_kube_proxy(LINUX_6_1)?);
        }
        run::run(&mut command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_benchmark_is_typed_by_its_name_and_runs_with_all() {
        for what in Selection::value_variants() {
            assert_eq!(what.to_possible_value().unwrap().get_name(), what.name());
            let is_one = !matches!(what, Selection::All | Selection::Docs);
            assert_eq!(BENCHMARKS.contains(what), is_one, "{}", what.name());
        }
    }

    #[test]
    fn all_rejects_arguments_of_single_benchmarks() {
        let error = all(&["--quick".to_owned(), "--changes".to_owned()]).unwrap_err();
        assert!(error.to_string().contains("not --changes"), "{error}");
    }
}
