//! `cproxy reseed`

use clap::Args;
use cproxy_core::printable;

use super::output::print;
use crate::{
    config::RunDirSettings,
    run_dir::{explain_silence, request_reseed},
};

/// Flags of `cproxy reseed`.
#[derive(Args, Debug)]
pub(super) struct ReseedOptions {
    /// With `--policy`, keep the pod closed until the VM has been restored, or `cproxy reseed` is called again
    #[arg(long)]
    before_snapshot: bool,
    #[command(flatten)]
    run: RunDirSettings,
}

pub(super) fn run(options: &ReseedOptions) -> anyhow::Result<()> {
    let dir = &options.run.run_dir;
    let response = request_reseed(dir, options.before_snapshot);
    let response = response.map_err(|error| anyhow::anyhow!(explain_silence(dir, &error)))?;
    match response.trim() {
        "ok" => print("endpoints are chosen from a new seed\n"),
        other => anyhow::bail!("{}", printable(other.strip_prefix("error: ").unwrap_or(other))),
    }
}
