//! `cargo xtask manual`: man pages, shell completions and the settings in documents, from the agent's command line.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use clap::Args;

use crate::{paths, run, setup};

/// The generator, and its package.
const PROGRAM: &str = "cproxy-manual";

/// Options of the manual.
#[derive(Args)]
pub(crate) struct ManualArguments {
    /// Directory for `man/` and `completions/`; it is made if it does not exist
    #[arg(required_unless_present = "update")]
    directory: Option<PathBuf>,
    /// Write the settings into docs/reference.md and the example file, and print the files that have changed
    #[arg(long, conflicts_with = "directory")]
    update: bool,
}

/// Builds the generator, which needs the agent's library, and runs it.
pub(crate) fn run(arguments: &ManualArguments) -> Result<()> {
    match &arguments.directory {
        Some(directory) => write(directory),
        None => run::run(generator()?.arg("--update").arg(paths::workspace())),
    }
}

/// Writes both below a directory.
pub(crate) fn write(directory: &Path) -> Result<()> {
    run::run(generator()?.arg(directory))
}

fn generator() -> Result<Command> {
    setup::for_building()?;
    // With the features that tests have, so that dependencies are compiled once.
    let built = run::executables(run::cargo().args(["build", "--quiet", "--workspace", "--bin", PROGRAM]))?;
    let generator = built.get(PROGRAM).with_context(|| format!("cargo names no file of {PROGRAM}"))?;
    Ok(Command::new(generator))
}
