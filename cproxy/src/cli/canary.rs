//! `cproxy canary`: the child of `cproxy run` that walks the canary in the cgroup of the workload.

use std::path::PathBuf;

use clap::Args;

use super::output::print;
use crate::agent;

/// Flags of `cproxy canary`.
#[derive(Args, Debug)]
pub(super) struct CanaryOptions {
    #[arg(long)]
    pin_dir: PathBuf,
    routes: Vec<String>,
}

pub(super) fn run(options: &CanaryOptions) -> anyhow::Result<()> {
    print(&agent::walk_canary(&options.pin_dir, &options.routes)?)
}
