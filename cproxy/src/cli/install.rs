//! `cproxy install`: the child of `cproxy run`, with the agent's checks behind it.

use std::path::PathBuf;

use clap::Args;

use super::print;
use crate::{agent, bpf::InstallError};

/// Flags of `cproxy install`.
#[derive(Args, Debug)]
pub(super) struct Options {
    #[arg(long)]
    cgroup: PathBuf,
    #[arg(long)]
    pin_dir: PathBuf,
}

pub(super) fn run(options: &Options) -> anyhow::Result<()> {
    let installed = agent::install_here(&options.pin_dir, &options.cgroup).inspect_err(|error| {
        if let InstallError::Load { verifier_log, .. } = error {
            eprintln!("{verifier_log}");
        }
    });
    print(&format!("{}\n", installed?))
}
