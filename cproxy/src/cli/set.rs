//! `cproxy set`: settings of a running agent.

use std::io;

use anyhow::{anyhow, bail};
use clap::{Args, Subcommand};
use tracing::Level;

use crate::{
    config::{RunDirSettings, choice},
    run_dir::{explain_silence, request_log_level},
};

/// Flags of `cproxy set`.
#[derive(Args, Debug)]
#[command(arg_required_else_help = false)]
pub(super) struct SetOptions {
    #[command(subcommand)]
    setting: Setting,
}

#[derive(Debug, Subcommand)]
enum Setting {
    /// Least severe level to log, until the agent starts again or gets SIGHUP
    LogLevel(LogLevelOptions),
}

#[derive(Args, Debug)]
struct LogLevelOptions {
    /// Level
    #[arg(value_parser = choice::<Level>())]
    level: Level,
    #[command(flatten)]
    run: RunDirSettings,
}

pub(super) fn run(options: &SetOptions) -> anyhow::Result<()> {
    let Setting::LogLevel(LogLevelOptions { level, run }) = &options.setting;
    let response = request_log_level(&run.run_dir, *level);
    let failed = |error: io::Error| {
        let silence = explain_silence(&run.run_dir, &error);
        // The request waits in the socket of an agent that does not answer.
        let effect = if error.kind() == io::ErrorKind::TimedOut { "; the level may still change" } else { "" };
        anyhow!("{silence}{effect}")
    };
    match response.map_err(failed)?.trim() {
        "ok" => Ok(()),
        other => bail!("the agent answers: {other}"),
    }
}
