//! `cproxy policy`: the child of `cproxy run` that loads and attaches the programs of network policy.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;
use cproxy_daemon::write_stderr;
use cproxy_datapath::bpf::{LinkedError, LoadError, PolicyError};

use super::output::print_error;
use crate::agent;

/// Flags of `cproxy policy`.
#[derive(Args, Debug)]
pub(super) struct PolicyOptions {
    #[arg(long)]
    action: String,
    #[arg(long)]
    cgroup: PathBuf,
    #[arg(long)]
    directions: String,
    #[arg(long)]
    pin_dir: PathBuf,
}

pub(super) fn run(options: &PolicyOptions) -> ExitCode {
    let PolicyOptions { action, cgroup, directions, pin_dir } = options;
    match agent::policy_child(action, pin_dir, cgroup, directions) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if let PolicyError::Linked(LinkedError::Load(LoadError::Refused { verifier_log, .. })) = &error {
                write_stderr(&format!("{verifier_log}\n"));
            }
            print_error(&error);
            ExitCode::FAILURE
        }
    }
}
