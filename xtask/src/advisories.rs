//! Known vulnerabilities of the dependencies, which cargo-deny looks up in the database of RustSec. `cargo xtask lint`
//! does without a network, so it does not look for them.

use std::{
    fmt, fs,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::{licences::CARGO_DENY, paths, run};

/// Name of the check in cargo-deny.
const CHECK: &str = "advisories";

/// Directory of databases in cargo's directory, and the start of a database's name.
const DATABASES: (&str, &str) = ("advisory-dbs", "advisory-db-");

/// Result of looking for advisories about the dependencies.
pub(crate) enum State {
    /// By a database whose last change is of this date; with the number of advisories that hold.
    Checked { found: u64, date: String },
    /// Not at all, for this reason.
    Unchecked(String),
}

/// Downloads the database, and fails if an advisory is about a dependency.
pub(crate) fn run() -> Result<()> {
    run::run(run::to_stderr(run::cargo().args(["fetch", "--quiet"]))?)?;
    let mut command = deny(CARGO_DENY.ensure()?);
    run::run(run::to_stderr(command.args(["check", "--hide-inclusion-graph", CHECK]))?)?;
    run::report(state().to_string());
    Ok(())
}

/// The same by the database that was downloaded last, without a network.
pub(crate) fn state() -> State {
    let checked = || {
        let program = CARGO_DENY.find()?.context("cargo-deny is not there")?;
        let date = database_date()?;
        let mut command = deny(program);
        command.args(["--offline", "--format", "json", "check", CHECK]).stdin(Stdio::null());
        let output = command.output().context("cargo-deny cannot be run")?;
        Ok::<_, anyhow::Error>(read(&String::from_utf8_lossy(&output.stderr), date))
    };
    checked().unwrap_or_else(|error| State::Unchecked(format!("{error:#}")))
}

fn deny(program: PathBuf) -> Command {
    let mut command = Command::new(program);
    command.current_dir(paths::workspace()).env("CARGO", run::cargo_program());
    command
}

/// Reads the lines of cargo-deny. Only a check that has ended has a summary.
fn read(lines: &str, date: String) -> State {
    let lines: Vec<Value> = lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let found = lines.iter().find_map(|line| line.pointer("/fields/advisories/errors").and_then(Value::as_u64));
    let said = |line: &Value| line.pointer("/fields/message").and_then(Value::as_str).map(str::to_owned);
    match found {
        Some(found) => State::Checked { found, date },
        None => {
            let reason = lines.iter().find_map(said).unwrap_or_else(|| "cargo-deny says nothing".to_owned());
            State::Unchecked(reason.lines().next().unwrap_or_default().to_owned())
        }
    }
}

/// Date of the last change of the database.
fn database_date() -> Result<String> {
    let missing = "the database was not downloaded";
    let (directory, start) = DATABASES;
    let entries = fs::read_dir(paths::cargo_home().context(missing)?.join(directory)).ok().context(missing)?;
    let is_database = |path: &PathBuf| {
        path.is_dir() && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start))
    };
    let database = entries.flatten().map(|entry| entry.path()).find(is_database).context(missing)?;
    let mut show = Command::new("git");
    show.arg("-C").arg(database).args(["show", "--no-patch", "--format=%cs", "HEAD"]);
    Ok(run::capture(&mut show)?.trim().to_owned())
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Checked { found: 0, date } => write!(f, "advisories: checked, none found; database of {date}"),
            Self::Checked { found, date } => {
                write!(f, "advisories: {found} found, which `cargo xtask advisories` names; database of {date}")
            }
            Self::Unchecked(reason) => write!(f, "advisories: not checked: {reason}; `cargo xtask advisories` does it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_that_has_not_ended_is_none() {
        let found = r#"{"fields":{"code":"vulnerability","message":"A hole","severity":"error"},"type":"diagnostic"}
{"fields":{"advisories":{"errors":1,"helps":0,"notes":0,"warnings":2}},"type":"summary"}"#;
        let clean = r#"{"fields":{"advisories":{"errors":0,"helps":0,"notes":0,"warnings":2}},"type":"summary"}"#;
        let stale = r#"{"fields":{"level":"ERROR","message":"repository is stale\nsince long"},"type":"log"}"#;
        for (lines, expected) in [
            (clean, "checked, none found; database of 2026-01-02"),
            (found, "1 found, which `cargo xtask advisories` names; database of 2026-01-02"),
            (stale, "not checked: repository is stale; `cargo xtask advisories` does it"),
            ("killed", "not checked: cargo-deny says nothing; `cargo xtask advisories` does it"),
        ] {
            assert_eq!(read(lines, "2026-01-02".to_owned()).to_string(), format!("advisories: {expected}"));
        }
    }
}
