//! `cargo xtask lint`: all checks that do not run the agent. Every check runs even if another fails, so that one run
//! reports everything.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::{fuzz, licences, paths, run, setup, sizes, tidy};

#[derive(Args)]
pub(crate) struct LintArguments {
    /// Checks to run [default: all]
    #[arg(value_name = "CHECK")]
    checks: Vec<Check>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Check {
    /// Rules of the repository
    Rules,
    /// Format of the code
    Format,
    /// Clippy, without a warning
    Clippy,
    /// Documentation of the crates, without a warning
    Documentation,
    /// Licences, sources and duplicates of dependencies
    Licences,
    /// Cost of dependencies in size
    Cost,
}

impl Check {
    fn name(self) -> &'static str {
        match self {
            Self::Rules => "repository rules",
            Self::Format => "format",
            Self::Clippy => "clippy",
            Self::Documentation => "documentation",
            Self::Licences => "licences, sources and duplicates of dependencies",
            Self::Cost => "cost of dependencies",
        }
    }

    /// Whether the check compiles something.
    fn builds(self) -> bool {
        !matches!(self, Self::Rules | Self::Format)
    }

    fn run(self) -> Result<()> {
        match self {
            Self::Rules => tidy::check(),
            Self::Format => format(),
            Self::Clippy => clippy(),
            Self::Documentation => documentation(),
            Self::Licences => licences::check(),
            Self::Cost => sizes::tables(),
        }
    }
}

/// Runs the checks and names those that failed.
pub(crate) fn run(arguments: &LintArguments) -> Result<ExitCode> {
    let checks = if arguments.checks.is_empty() { Check::value_variants() } else { &arguments.checks };
    if checks.iter().any(|check| check.builds()) {
        setup::for_building()?;
    }
    let mut failed = Vec::new();
    for check in checks {
        run::report(format!("lint: {}", check.name()));
        if let Err(error) = check.run() {
            run::report(format!("error: {error:#}"));
            failed.push(check.name());
        }
    }
    if failed.is_empty() {
        run::report(match checks {
            [check] => format!("lint: {} passed", check.name()),
            _ => format!("lint: {} checks passed", checks.len()),
        });
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
