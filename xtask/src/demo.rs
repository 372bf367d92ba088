//! `cargo xtask demo`: the quickest way to see the agent work, without a cluster of one's own.

use anyhow::Result;
use clap::Args;

use crate::{agent, control_plane, run};

/// What the demonstration runs against.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Runs against a real Kubernetes control plane on this machine
    #[arg(long)]
    cluster: bool,
}

/// Builds what the demonstration needs and runs it.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    run::require_root("the demonstration")?;
    let mut command = run::cargo();
    command.args(["run", "--quiet", "--package", "cproxy-tests", "--bin", "demo", "--"]);
    command.env(agent::VARIABLE, agent::build()?.shipped);
    if arguments.cluster {
        command.env(control_plane::VARIABLE, control_plane::ensure()?).arg("--cluster");
    }
    run::run(&mut command)
}
