//! `cproxy reseed`

use clap::Args;

use super::{RunDirOption, print};
use crate::admin;

/// Flags of `cproxy reseed`.
#[derive(Args, Debug)]
pub(super) struct Options {
    #[command(flatten)]
    run: RunDirOption,
}

pub(super) fn run(options: &Options) -> anyhow::Result<()> {
    let dir = &options.run.run_dir;
    let answer = admin::ask_to_reseed(dir);
    let answer = answer.map_err(|error| anyhow::anyhow!("no agent answers at {}: {error}", dir.display()))?;
    match answer.trim().strip_prefix("error: ") {
        Some(error) => anyhow::bail!("{error}"),
        None => print("endpoints are chosen from a new seed\n"),
    }
}
