//! `cargo xtask manual`: man pages and shell completions, generated from the agent's command line.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use clap::Args;

use crate::{run, setup};

/// The generator, and its package.
const PROGRAM: &str = "cproxy-manual";

/// Options of the manual.
#[derive(Args)]
pub(crate) struct ManualArguments {
    /// Directory for `man/` and `completions/`; it is made if it does not exist
    directory: PathBuf,
}

/// Builds the generator, which needs the agent's library, and runs it.
pub(crate) fn run(arguments: &ManualArguments) -> Result<()> {
    write(&arguments.directory)
}

/// Writes both below a directory.
pub(crate) fn write(directory: &Path) -> Result<()> {
    setup::for_building()?;
    // With the features that tests have, so that dependencies are compiled once.
    let built = run::executables(run::cargo().args(["build", "--quiet", "--workspace", "--bin", PROGRAM]))?;
    let generator = built.get(PROGRAM).with_context(|| format!("cargo names no file of {PROGRAM}"))?;
    run::run(Command::new(generator).arg(directory))
}
