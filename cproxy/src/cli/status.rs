//! `cproxy status`: one screen about agent, source and table.

use std::process::ExitCode;

use clap::Args;

use super::{
    options::{Format, OutputOptions, Places},
    output::{print, screen},
};
use crate::{config::Switch, diagnose::status::status, report::pretty_json};

/// Flags of `cproxy status`.
#[derive(Args, Debug)]
pub(super) struct StatusOptions {
    #[command(flatten)]
    pub(super) switch: Switch,
    #[command(flatten)]
    output: OutputOptions,
    #[command(flatten)]
    places: Places,
}

/// Returns 1 unless an agent is ready and all is well.
pub(super) fn run(options: &StatusOptions) -> anyhow::Result<ExitCode> {
    let disabled = options.switch.disabled();
    let status = status(&options.places.pin.pin_dir, &options.places.run.run_dir, disabled);
    print(&match options.output.output {
        Format::Table => status.text(&screen()),
        Format::Json => format!("{}\n", pretty_json(&status)?),
    })?;
    Ok(if status.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
