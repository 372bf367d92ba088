//! `cargo xtask lint`: all checks that do not run the agent. Every check runs even if another fails, so that one run
//! reports everything.

use std::process::ExitCode;

use anyhow::Result;

use crate::{fuzz, licences, paths, run, setup, sizes, tidy};

type Check = (&'static str, fn() -> Result<()>);

const CHECKS: [Check; 6] = [
    ("repository rules", tidy::check),
    ("format", format),
    ("clippy", clippy),
    ("documentation", documentation),
    ("licences, sources and duplicates of dependencies", licences::check),
    ("cost of dependencies", cost),
];

/// Runs the checks and names those that failed.
pub(crate) fn run() -> Result<ExitCode> {
    setup::for_building()?;
    let mut failed = Vec::new();
    for (name, check) in CHECKS {
        run::report(format!("lint: {name}"));
        if let Err(error) = check() {
            run::report(format!("error: {error:#}"));
            failed.push(name);
        }
    }
    if failed.is_empty() {
        run::report(format!("lint: all {} checks passed", CHECKS.len()));
        return Ok(ExitCode::SUCCESS);
    }
    run::report(format!("lint: failed: {}", failed.join(", ")));
    Ok(ExitCode::FAILURE)
}

fn format() -> Result<()> {
    run::run(run::to_stderr(run::cargo().args(["fmt", "--all", "--check"]))?)?;
    let mut fuzz_targets = run::cargo();
    fuzz_targets.args(["fmt", "--check", "--manifest-path"]).arg(fuzz::manifest());
    run::run(run::to_stderr(&mut fuzz_targets)?)
}

fn clippy() -> Result<()> {
    let arguments = ["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"];
    run::run(run::to_stderr(run::cargo().args(arguments))?)?;
    let mut fuzz_targets = run::cargo();
    // In the same directory, where most of the dependencies have been checked a moment before.
    fuzz_targets.args(["clippy", "--quiet", "--target-dir"]).arg(paths::target());
    fuzz_targets.arg("--manifest-path").arg(fuzz::manifest()).args(["--", "-D", "warnings"]);
    run::run(run::to_stderr(&mut fuzz_targets)?)
}

fn documentation() -> Result<()> {
    let mut command = run::cargo();
    command.args(["doc", "--workspace", "--no-deps", "--quiet"]).env("RUSTDOCFLAGS", "-D warnings");
    run::run(run::to_stderr(&mut command)?)
}

fn cost() -> Result<()> {
    sizes::tables()
}
