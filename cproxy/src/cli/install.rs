//! `cproxy install`: the child of `cproxy run` that loads and attaches the programs, after the agent's checks.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;
use cproxy_daemon::write_stderr;
use cproxy_datapath::bpf::{InstallError, LoadError};

use super::output::{print, print_error};
use crate::{agent, config::CounterSettings};

/// Flags of `cproxy install`.
#[derive(Args, Debug)]
pub(super) struct InstallOptions {
    #[arg(long)]
    cgroup: PathBuf,
    #[arg(long)]
    pin_dir: PathBuf,
    #[command(flatten)]
    counters: CounterSettings,
}

pub(super) fn run(options: &InstallOptions) -> ExitCode {
    let counters = options.counters.service_counters;
    let installed = agent::install_programs(&options.pin_dir, &options.cgroup, counters).inspect_err(|error| {
        if let InstallError::Load(LoadError::Refused { verifier_log, .. }) = error {
            write_stderr(&format!("{verifier_log}\n"));
        }
    });
    let (error, is_lasting) = match installed {
        Ok(programs) => match print(&format!("{programs}\n")) {
            Ok(()) => return ExitCode::SUCCESS,
            Err(error) => (error, false),
        },
        Err(error) => {
            let is_lasting = error.is_lasting();
            (anyhow::Error::from(error), is_lasting)
        }
    };
    print_error(&format_args!("{error:#}"));
    if is_lasting { ExitCode::FAILURE } else { ExitCode::from(agent::EXIT_RETRY) }
}
