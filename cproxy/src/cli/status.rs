//! `cproxy status`: one screen about agent, source and table.

use std::process::ExitCode;

use clap::Args;

use super::{
    options::Format,
    output::{print, screen},
};
use crate::{
    config::{PinDirSettings, RunDirSettings},
    diagnose::status::status,
};

/// Flags of `cproxy status`.
#[derive(Args, Debug)]
pub(super) struct StatusOptions {
    /// Output format
    #[arg(short, long, env = "CPROXY_OUTPUT", value_enum, default_value_t)]
    output: Format,
    #[command(flatten)]
    pin: PinDirSettings,
    #[command(flatten)]
    run: RunDirSettings,
}

/// Returns 1 unless an agent is ready and all is well.
pub(super) fn run(options: &StatusOptions) -> anyhow::Result<ExitCode> {
    let status = status(&options.pin.pin_dir, &options.run.run_dir);
    print(&match options.output {
        Format::Table => status.text(&screen()),
        Format::Json => format!("{}\n", serde_json::to_string_pretty(&status)?),
    })?;
    Ok(if status.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
