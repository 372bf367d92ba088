//! Other programs: plain errors, cargo without this process's own package variables, and progress of long steps.

use std::{
    collections::BTreeMap,
    env,
    ffi::OsString,
    fs::{self, File},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use rustix::process;
use serde_json::Value;

use crate::paths;

const PROGRESS_INTERVAL: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(100);
const LOG_TAIL_LINES: usize = 15;

/// Prints progress to standard error; standard output is kept for results.
pub(crate) fn report(message: impl AsRef<str>) {
    eprintln!("{}", message.as_ref());
}

/// The cargo that runs this program, in the repository's root.
///
/// The variables that cargo sets for this package are removed: build scripts of dependencies watch them, and would run
/// again whenever the same build is started by hand and through this command in turn.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(cargo_program());
    command.current_dir(paths::workspace());
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(is_about_this_package) {
            command.env_remove(name);
        }
    }
    command
}

/// The program file of [`cargo`].
pub(crate) fn cargo_program() -> OsString {
    env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

fn is_about_this_package(variable: &str) -> bool {
    const PREFIXES: [&str; 2] = ["CARGO_PKG_", "CARGO_MANIFEST_"];
    const NAMES: [&str; 3] = ["CARGO_BIN_NAME", "CARGO_CRATE_NAME", "CARGO_PRIMARY_PACKAGE"];
    PREFIXES.iter().any(|prefix| variable.starts_with(prefix)) || NAMES.contains(&variable)
}

/// Sends the command's standard output to standard error, for steps whose output is progress and not a result.
pub(crate) fn to_stderr(command: &mut Command) -> Result<&mut Command> {
    let stderr = std::io::stderr().as_fd().try_clone_to_owned().context("duplicating standard error")?;
    Ok(command.stdout(Stdio::from(stderr)))
}

/// Runs the command to its end and fails unless it succeeded.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| cannot_start(command))?;
    succeeded(command, status)
}

/// Runs the command and returns its standard output.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    let output = command.stderr(Stdio::piped()).output().with_context(|| cannot_start(command))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let first = stderr.lines().find(|line| !line.trim().is_empty()).unwrap_or("no message");
        bail!("`{}` failed ({}): {first}", line_of(command), output.status);
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("`{}` printed something other than text", line_of(command)))
}

/// Runs a long step with its output in a log file, so that the terminal shows only how long it has taken so far and,
/// when it fails, the end of the log.
pub(crate) fn run_logged(command: &mut Command, step: &str) -> Result<()> {
    let running = Logged::spawn(command, step)?;
    let log = running.log.clone();
    let status = running.wait()?;
    if !status.success() {
        print_tail(&log);
    }
    succeeded(command, status).with_context(|| format!("{step} (all of its output is in {})", log.display()))
}

/// A running command whose output goes to a log file; killed when dropped.
pub(crate) struct Logged {
    child: Child,
    step: String,
    log: PathBuf,
}

impl Logged {
    /// Starts the command.
    pub(crate) fn spawn(command: &mut Command, step: &str) -> Result<Self> {
        let log = log_file(step)?;
        let file = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let twin = file.try_clone().with_context(|| format!("opening {} twice", log.display()))?;
        command.stdin(Stdio::null()).stdout(file).stderr(twin);
        let child = command.spawn().with_context(|| cannot_start(command))?;
        Ok(Self { child, step: step.to_owned(), log })
    }

    /// Waits for its end.
    pub(crate) fn wait(mut self) -> Result<ExitStatus> {
        wait_with_progress(&mut self.child, &self.step)
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        // Where it has ended already, there is nothing to kill.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Builds, and returns the paths of the programs by the names of their targets.
pub(crate) fn executables(build: &mut Command) -> Result<BTreeMap<String, PathBuf>> {
    build.arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit());
    let output = build.output().with_context(|| cannot_start(build))?;
    succeeded(build, output.status)?;
    let messages = String::from_utf8_lossy(&output.stdout);
    let paths = messages.lines().filter_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        let name = message.pointer("/target/name")?.as_str()?.to_owned();
        Some((name, PathBuf::from(message.get("executable")?.as_str()?)))
    });
    Ok(paths.collect())
}

fn log_file(step: &str) -> Result<PathBuf> {
    let directory = paths::cache()?.join("logs");
    fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
    let name: String = step.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    Ok(directory.join(format!("{name}.log")))
}

/// Waits for a long step, and reports from time to time how long it has taken.
pub(crate) fn wait_with_progress(child: &mut Child, step: &str) -> Result<ExitStatus> {
    let start = Instant::now();
    let mut next = PROGRESS_INTERVAL;
    loop {
        if let Some(status) = child.try_wait().with_context(|| format!("waiting for {step}"))? {
            return Ok(status);
        }
        if start.elapsed() >= next {
            report(format!("  {step}: {} s so far", start.elapsed().as_secs()));
            next += PROGRESS_INTERVAL;
        }
        thread::sleep(POLL);
    }
}

fn print_tail(log: &Path) {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    for line in lines.iter().skip(lines.len().saturating_sub(LOG_TAIL_LINES)) {
        report(format!("  | {line}"));
    }
}

fn succeeded(command: &Command, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("`{}` failed ({status})", line_of(command));
    }
    Ok(())
}

/// Message about a `command` that could not be started.
pub(crate) fn cannot_start(command: &Command) -> String {
    format!("cannot start `{}`", command.get_program().to_string_lossy())
}

fn line_of(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or_else(|| command.get_program());
    let words: Vec<_> = std::iter::once(program).chain(command.get_args()).map(|word| word.to_string_lossy()).collect();
    words.join(" ")
}

/// Fails unless this process runs as root.
pub(crate) fn require_root(what: &str) -> Result<()> {
    if !is_root() {
        bail!("{what} needs root, to attach BPF programs and create cgroups: run the same command as root");
    }
    Ok(())
}

/// Whether this process's effective user is root.
pub(crate) fn is_root() -> bool {
    process::geteuid().is_root()
}

/// Lowers the priority of this thread and of the processes that it starts.
pub(crate) fn lower_priority() {
    // If it fails, other processes are slower.
    process::nice(10).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_variables_about_this_package_are_dropped() {
        assert!(is_about_this_package("CARGO_PKG_NAME") && is_about_this_package("CARGO_MANIFEST_DIR"));
        assert!(!is_about_this_package("CARGO_TARGET_DIR") && !is_about_this_package("CARGO_HOME"));
    }

    #[test]
    fn a_failed_command_is_named_with_its_arguments() {
        let error = run(Command::new("/bin/sh").args(["-c", "exit 3"])).unwrap_err();
        assert_eq!(format!("{error}"), "`sh -c exit 3` failed (exit status: 3)");
    }
}
