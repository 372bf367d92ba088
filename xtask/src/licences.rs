//! Licences, sources and duplicates of the dependencies, checked by cargo-deny against `deny.toml`.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use crate::{paths, run};

const VERSION: &str = "0.20.2";

/// Fails when a dependency breaks a rule of `deny.toml`.
pub(crate) fn check() -> Result<()> {
    // cargo-deny looks at the manifests of all dependencies, also of those that no build has needed so far.
    run::run(run::to_stderr(run::cargo().args(["fetch", "--quiet"]))?)?;
    let mut command = Command::new(cargo_deny()?);
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

fn cargo_deny() -> Result<PathBuf> {
    let root = paths::cache()?.join("cargo-deny");
    let ours = root.join("bin/cargo-deny");
    let candidates = [Some(ours.clone()), paths::program("cargo-deny")];
    if let Some(found) = candidates.into_iter().flatten().find(|program| is_good(program)) {
        return Ok(found);
    }
    run::report(format!("cargo-deny: building {VERSION}, about two minutes on two cores (done once)"));
    let mut command = run::cargo();
    command.args(["install", "cargo-deny", "--version", VERSION, "--locked", "--force", "--no-default-features"]);
    command.arg("--root").arg(root).env_remove("CARGO_TARGET_DIR");
    run::run_logged(&mut command, "building cargo-deny")?;
    Ok(ours)
}

fn is_good(program: &Path) -> bool {
    run::capture(Command::new(program).arg("--version")).is_ok_and(|text| text.trim().ends_with(VERSION))
}
