//! Licences, sources and duplicates of the dependencies, checked by cargo-deny against `deny.toml`.

use std::process::Command;

use anyhow::Result;

use crate::{paths, run, setup::tool::Tool};

pub(crate) const CARGO_DENY: Tool =
    Tool { name: "cargo-deny", version: "0.20.2", duration: "two minutes", options: &["--no-default-features"] };

/// Fails when a dependency breaks a rule of `deny.toml`.
pub(crate) fn check() -> Result<()> {
    // cargo-deny looks at the manifests of all dependencies, also of those that no build has needed so far.
    run::run(run::to_stderr(run::cargo().args(["fetch", "--quiet"]))?)?;
    let mut command = Command::new(CARGO_DENY.ensure()?);
    command.current_dir(paths::workspace()).env("CARGO", run::cargo_program());
    run::run(run::to_stderr(command.args([
        "--offline",
        "check",
        "--hide-inclusion-graph",
        "bans",
        "licenses",
        "sources",
    ]))?)
}
