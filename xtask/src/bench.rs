//! `cargo xtask bench`: the measurements that the documentation quotes, as a command that anyone can repeat.

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::{agent, control_plane, run, setup};

/// Which benchmark, and what to tell it.
#[derive(Args)]
pub(crate) struct Arguments {
    /// What to measure
    benchmark: Benchmark,
    /// Passed on to the benchmark
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// A benchmark: a binary of the benchmarks' package.
#[derive(Clone, Copy, ValueEnum)]
enum Benchmark {
    /// What the agent costs in memory, CPU time and time, beside kube-proxy
    Agent,
    /// How long a change in the cluster takes until connections follow it
    Propagation,
    /// What the socket programs cost, run by run and call by call
    Datapath,
    /// All peers in a virtual machine
    Guest,
}

impl Benchmark {
    fn binary(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Propagation => "propagation",
            Self::Datapath => "datapath",
            Self::Guest => "traffic",
        }
    }

    fn needs_control_plane(self) -> bool {
        matches!(self, Self::Agent | Self::Propagation | Self::Guest)
    }
}

/// Builds what the benchmark needs and runs it.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    run::require_root("a benchmark")?;
    let mut command = run::cargo();
    command.args(["run", "--release", "--package", "cproxy-benches", "--bin", arguments.benchmark.binary(), "--"]);
    if let Benchmark::Guest = arguments.benchmark {
        command.arg("guest");
        setup::for_guests()?;
        command.env("CPROXY_GUEST_KERNEL", crate::kernels::packaged_for_kube_proxy(crate::kernels::LINUX_6_1)?);
        command.env("CPROXY_INITRAMFS", crate::image::initramfs_of(&agent::build()?.shipped)?);
    }
    command.args(&arguments.arguments);
    command.env(agent::VARIABLE, agent::build()?.shipped);
    if arguments.benchmark.needs_control_plane() {
        setup::for_cluster()?;
        command.env(control_plane::VARIABLE, control_plane::ensure()?);
    }
    run::run(&mut command)
}
