//! Compiling test binaries, and listing their tests.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::{
    selection::{self, Targets},
    suites::{self, Suite, SuiteKind, UNIT, UNIT_BINARIES},
};
use crate::run;

/// The package whose test binaries are the suites.
const SUITES_PACKAGE: &str = "cproxy-tests";

/// A compiled test binary.
#[derive(Clone)]
pub(super) struct TestBinary {
    pub(super) suite: &'static Suite,
    /// The package or the target, before the paths of unit tests.
    pub(super) prefix: Option<String>,
    pub(super) file: PathBuf,
    /// Directory of its package, where its tests run.
    pub(super) directory: PathBuf,
}

/// Compiles as much for all tests as possible before the toolchain is set up.
pub(super) fn compile_ahead() -> Command {
    let mut command = run::cargo();
    command.args(["build", "--workspace", "--tests", "--keep-going"]).env("CPROXY_PROGRAMS_REQUIRED", "1");
    command
}

/// Compiles the binaries of these targets.
pub(super) fn compile(targets: &Targets) -> Result<Vec<TestBinary>> {
    let mut binaries = Vec::new();
    for mut command in commands(targets) {
        command.arg("--message-format=json-render-diagnostics").stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = command.output().with_context(|| run::cannot_start(&command))?;
        ensure!(output.status.success(), "the tests do not compile");
        for message in String::from_utf8_lossy(&output.stdout).lines() {
            let Ok(message) = serde_json::from_str::<Value>(message) else { continue };
            binaries.extend(binary_of(&message)?);
        }
    }
    Ok(binaries)
}

/// Commands that compile them. Suites are compiled with the whole workspace, also a single one: the features of
/// dependencies are the same then, and they are compiled once. A package of unit tests alone needs less.
fn commands(targets: &Targets) -> Vec<Command> {
    let mut commands = Vec::new();
    let is_live = |name: &&String| suites::find(name).is_some_and(|suite| suite.kind == SuiteKind::Live);
    let suites = || targets.suites.iter().filter(is_live);
    let test = |command: &mut Command, name: &str| {
        command.args(["--test", name]);
    };
    let cargo = || {
        let mut command = run::cargo();
        command.args(["test", "--no-run"]);
        command
    };
    let is_whole = targets.packages.len() > 1;
    if is_whole || suites().next().is_some() {
        let mut command = cargo();
        command.arg("--workspace");
        if is_whole {
            command.args(["--lib", "--bins"]);
            UNIT_BINARIES.iter().for_each(|name| test(&mut command, name));
        }
        suites().for_each(|name| test(&mut command, name));
        commands.push(command);
    }
    if let (false, Some(package)) = (is_whole, targets.packages.first()) {
        let mut command = cargo();
        command.args(["--package", package]);
        // Its test binaries are the suites.
        command.args(if package == SUITES_PACKAGE { ["--lib", "--bins"].as_slice() } else { &["--tests"] });
        commands.push(command);
    }
    commands
}

/// The test binary of one of cargo's messages.
fn binary_of(message: &Value) -> Result<Option<TestBinary>> {
    let text = |pointer: &str| message.pointer(pointer).and_then(Value::as_str);
    let is_test = message.pointer("/profile/test").and_then(Value::as_bool).unwrap_or_default();
    let (true, Some(file), Some(manifest)) = (is_test, text("/executable"), text("/manifest_path")) else {
        return Ok(None);
    };
    let name = text("/target/name").context("cargo names no target")?;
    let directory = Path::new(manifest).parent().context("a package without a directory")?.to_owned();
    let (suite, prefix) = match text("/target/kind/0") {
        Some("test") if !UNIT_BINARIES.contains(&name) => (name, None),
        Some("test") => (UNIT, Some(name.to_owned())),
        _ => (UNIT, Some(selection::name_of_package(&directory)?)),
    };
    let suite = suites::find(suite).with_context(|| format!("the test binary {suite} is in no suite"))?;
    Ok(Some(TestBinary { suite, prefix, file: file.into(), directory }))
}

impl TestBinary {
    /// The paths of its tests.
    pub(super) fn tests(&self) -> Result<Vec<String>> {
        let mut command = Command::new(&self.file);
        command.current_dir(&self.directory).args(["--list", "--format", "terse"]);
        let list = run::capture(&mut command)?;
        Ok(list.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }

    /// The path by which a test is named and shown.
    pub(super) fn path_of(&self, test: &str) -> String {
        self.prefix.as_ref().map_or_else(|| test.to_owned(), |prefix| format!("{prefix}::{test}"))
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    fn lines(suites: &[&str], packages: &[&str]) -> Vec<String> {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let targets = Targets { suites: owned(suites), packages: owned(packages) };
        let line = |command: &Command| command.get_args().filter_map(OsStr::to_str).collect::<Vec<_>>().join(" ");
        commands(&targets).iter().map(line).collect()
    }

    #[test]
    fn only_what_is_named_is_compiled() {
        assert_eq!(lines(&["fuzz", "live"], &[]), ["test --no-run --workspace --test live"]);
        assert_eq!(lines(&[], &["xtask"]), ["test --no-run --package xtask --tests"]);
        assert_eq!(lines(&[], &[SUITES_PACKAGE]), ["test --no-run --package cproxy-tests --lib --bins"]);
        assert_eq!(lines(&["live"], &["xtask"]).len(), 2);
        let [all] = lines(&["live"], &["xtask", "cproxy"]).try_into().unwrap();
        assert!(all.starts_with("test --no-run --workspace --lib --bins --test allocations "), "{all}");
    }

    #[test]
    fn cargo_names_the_files_of_tests_alone() {
        let message = |kind: &str, name: &str, test: bool| {
            let manifest = crate::paths::workspace().join("xtask/Cargo.toml");
            serde_json::json!({"target": {"kind": [kind], "name": name}, "profile": {"test": test},
                "executable": "/t/x", "manifest_path": manifest})
        };
        let live = binary_of(&message("test", "cluster", true)).unwrap().unwrap();
        assert_eq!((live.suite.name, live.path_of("a::b").as_str()), ("cluster", "a::b"));
        let unit = binary_of(&message("bin", "xtask", true)).unwrap().unwrap();
        assert_eq!((unit.suite.name, unit.path_of("a::b").as_str()), ("unit", "xtask::a::b"));
        let of_crate = binary_of(&message("test", "servers", true)).unwrap().unwrap();
        assert_eq!((of_crate.suite.name, of_crate.path_of("a").as_str()), ("unit", "servers::a"));
        assert!(binary_of(&message("bin", "xtask", false)).unwrap().is_none());
        assert!(binary_of(&message("test", "in_no_suite", true)).is_err());
    }
}
