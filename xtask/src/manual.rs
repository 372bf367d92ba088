//! `cargo xtask manual`: man pages and shell completions, generated from the agent's command line.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use crate::{run, setup};

/// Options of the manual.
#[derive(Args)]
pub(crate) struct ManualArguments {
    /// Directory for `man/` and `completions/`; it is made if it does not exist
    directory: PathBuf,
}

/// Builds the generator, which needs the agent's library, and runs it.
pub(crate) fn run(arguments: &ManualArguments) -> Result<()> {
    setup::for_building()?;
    let mut generator = run::cargo();
    run::run(generator.args(["run", "--quiet", "--package", "cproxy-manual", "--"]).arg(&arguments.directory))
}
