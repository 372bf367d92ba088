//! `cargo xtask demo`: the quickest way to see the agent work, without a cluster.

use std::process::Command;

use anyhow::{Context as _, Result};
use clap::Args;

use crate::{
    binary, paths,
    releases::KUBERNETES,
    run, setup,
    steps::{Step, Steps},
};

/// The programs, by their targets' names.
const AGENT: &str = "cproxy";
const DEMO: &str = "demo";

/// Options of the demonstration.
#[derive(Args)]
pub(crate) struct DemoArguments {
    /// Runs against a real Kubernetes control plane on this machine
    #[arg(long)]
    cluster: bool,
}

/// Builds and runs the demonstration.
pub(crate) fn run(arguments: &DemoArguments) -> Result<()> {
    run::require_root("the demonstration")?;
    let mut steps = steps(arguments);
    steps.next();
    setup::beside(build().arg("--keep-going"), || ())?;
    steps.next();
    let mut programs = run::executables(&mut build())?;
    let mut program = |name| programs.remove(name).with_context(|| format!("cargo names no file of `{name}`"));
    let (agent, mut demo) = (program(AGENT)?, Command::new(program(DEMO)?));
    if arguments.cluster {
        steps.next();
        demo.env(KUBERNETES.variable, KUBERNETES.ensure()?).arg("--cluster");
    }
    steps.next();
    run::run(demo.env(binary::AGENT.variable, agent))
}

fn steps(arguments: &DemoArguments) -> Steps {
    let is_built = paths::target().join("debug").join(DEMO).exists();
    let mut steps = vec![
        Step::once("setting up this machine and compiling dependencies meanwhile", setup::is_ready_to_build(), 90),
        Step::once("building the agent and the demonstration", is_built, 60),
    ];
    if arguments.cluster {
        let is_built = KUBERNETES.is_built();
        steps.push(Step::once("building the control plane", is_built, 300));
    }
    steps.push(Step::new("the demonstration", 0));
    Steps::new("demo", steps)
}

/// Both programs at once, in the tests' profile and with the features that tests have: every dependency is compiled
/// once for all of them. Features are those of the packages that are selected, so all are.
fn build() -> Command {
    let mut command = run::cargo();
    command.args(["build", "--workspace", "--bin", AGENT, "--bin", DEMO]);
    command
}
