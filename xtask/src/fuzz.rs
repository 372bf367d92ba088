//! `cargo xtask fuzz`: the fuzz targets of `fuzz/`, compiled with coverage counters and driven by libFuzzer.
//!
//! Neither a nightly compiler nor `cargo fuzz` is needed: a stable compiler also has LLVM's pass that counts coverage,
//! and no sanitizer is used, since the fuzzed code has no `unsafe`.

use std::{
    fmt,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};

use crate::{architecture::Architecture, paths, run, setup};

/// Targets and the time for each.
#[derive(Args)]
pub(crate) struct FuzzArguments {
    /// Targets to run; default: all
    targets: Vec<Target>,
    /// Time for each target, in seconds
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// As `cargo xtask test` does: the targets are built, run briefly, and know only the inputs of the repository
    #[arg(long, hide = true)]
    as_test: bool,
}

/// A fuzz target: a binary of the package in `fuzz/`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Target {
    /// Addresses and ranges of addresses
    Addresses,
    /// Lists and watch events of an API server, as JSON
    ApiObjects,
    /// An API server that sends arbitrary responses
    ApiServer,
    /// Sockets, mounts and records that the kernel lists
    KernelLists,
    /// A table in pinned maps that no agent has written so
    KernelTable,
    /// Manifest files, as YAML or JSON
    Manifests,
    /// Objects of an API server, as protobuf
    Protobuf,
    /// Histories of an API server, relays and their clients
    RelayHistory,
    /// Objects that a relay takes from an API server
    RelayObjects,
    /// Requests of a relay's clients
    RelayRequests,
    /// Requests at the agent's socket, and an agent's answers
    RunDir,
    /// Responses of an API server, cut into objects
    Split,
    /// Objects from protobuf to JSON
    Transcode,
    /// An API server's answers about tokens
    TokenReviews,
    /// Files of views, as YAML or JSON
    Views,
}

/// Flags with which sancov gives libFuzzer counters, their places and the operands of comparisons.
const RUSTFLAGS: [&str; 5] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// Limits on length, time and memory of an input.
const LIMITS: [&str; 3] = ["-max_len=4096", "-timeout=10", "-rss_limit_mb=512"];

/// Time for each target as a test.
const TEST_SECONDS: u32 = 5;
/// Largest number of printed characters of a line or an input.
const CHARACTERS_MAX: usize = 1000;
/// Time for making a finding's input smaller, after the last success.
const MINIMIZE_SECONDS: u32 = 20;

/// The names of all targets.
pub(crate) fn targets() -> impl Iterator<Item = &'static str> {
    Target::value_variants().iter().map(|target| target.name())
}

/// Builds the targets and runs the selected ones. Inputs that they discover are kept in the build directory.
pub(crate) fn run(arguments: &FuzzArguments) -> Result<ExitCode> {
    let fuzzer = if arguments.as_test { Fuzzer::of(&Architecture::of_host()?.triple()) } else { Fuzzer::build()? };
    let targets = if arguments.targets.is_empty() { Target::value_variants() } else { &arguments.targets };
    let mut is_clean = true;
    for &target in targets {
        let report = match arguments.as_test {
            true => fuzzer.test(target)?,
            false => fuzzer.run(target, arguments.seconds, &directory().join("corpus").join(target.name()))?,
        };
        println!("{}: {report}", target.name());
        is_clean &= report.finding.is_none();
    }
    Ok(if is_clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Target {
    /// Its binary.
    fn name(self) -> &'static str {
        match self {
            Self::Addresses => "addresses",
            Self::ApiObjects => "api_objects",
            Self::ApiServer => "api_server",
            Self::KernelLists => "kernel_lists",
            Self::KernelTable => "kernel_table",
            Self::Manifests => "manifests",
            Self::Protobuf => "protobuf",
            Self::RelayHistory => "relay_history",
            Self::RelayObjects => "relay_objects",
            Self::RelayRequests => "relay_requests",
            Self::RunDir => "run_dir",
            Self::Split => "split",
            Self::Transcode => "transcode",
            Self::TokenReviews => "token_reviews",
            Self::Views => "views",
        }
    }

    fn dictionary(self) -> Option<&'static str> {
        match self {
            Self::Addresses
            | Self::ApiServer
            | Self::KernelTable
            | Self::Protobuf
            | Self::RelayHistory
            | Self::RelayObjects
            | Self::RelayRequests
            | Self::Transcode => None,
            Self::KernelLists => Some("kernel.dict"),
            Self::ApiObjects | Self::Manifests | Self::Split => Some("objects.dict"),
            Self::RunDir => Some("run_dir.dict"),
            Self::TokenReviews | Self::Views => Some("access.dict"),
        }
    }
}

/// The targets, built.
pub(crate) struct Fuzzer {
    binaries: PathBuf,
}

impl Fuzzer {
    /// Sets up the machine, then builds the targets; fast when nothing has changed.
    pub(crate) fn build() -> Result<Self> {
        setup::for_building()?;
        let triple = Architecture::of_host()?.triple();
        run::run(run::to_stderr(&mut compile(&triple))?)?;
        Ok(Self::of(&triple))
    }

    /// Builds the targets on a machine that is set up, with cargo's output in a log file.
    pub(crate) fn build_logged() -> Result<Self> {
        let triple = Architecture::of_host()?.triple();
        run::run_logged(&mut compile(&triple), "building fuzz targets")?;
        Ok(Self::of(&triple))
    }

    fn of(triple: &str) -> Self {
        Self { binaries: directory().join(triple).join("release") }
    }

    /// Runs a target for a short while.
    fn test(&self, target: Target) -> Result<Report> {
        let directory = directory().join("test");
        fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
        // Runs of one target take turns: they have a directory and a log in common.
        let turn = directory.join(format!("{}.lock", target.name()));
        let lock = File::create(&turn).with_context(|| format!("creating {}", turn.display()))?;
        lock.lock().with_context(|| format!("locking {}", turn.display()))?;
        // Inputs of earlier runs would make this one longer.
        let learned = directory.join(target.name());
        if learned.exists() {
            fs::remove_dir_all(&learned).with_context(|| format!("removing {}", learned.display()))?;
        }
        self.run(target, TEST_SECONDS, &learned)
    }

    /// Runs a target, first on the corpus of the repository. Inputs that reach something new are added to `learned`.
    fn run(&self, target: Target, seconds: u32, learned: &Path) -> Result<Report> {
        let corpus = source().join("corpus").join(target.name());
        let artifacts = source().join("artifacts").join(target.name());
        for directory in [learned, &artifacts] {
            fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
        }
        let mut command = self.command(target);
        command.arg(learned).arg(corpus).args(LIMITS).arg(format!("-max_total_time={seconds}"));
        // Slow inputs get few turns, or files of aliases would take nearly all of the time.
        command.args(["-entropic_scale_per_exec_time=1", "-print_final_stats=1"]);
        command.arg(format!("-artifact_prefix={}/", artifacts.display()));
        command.args(target.dictionary().map(|name| format!("-dict={}", source().join(name).display())));
        let step = format!("fuzz {}", target.name());
        let start = Instant::now();
        let (is_clean, log) = logged(&mut command, &step)?;
        let mut report = Report::read(&log, start.elapsed().as_secs());
        if !is_clean {
            let input = artifact(&log).with_context(|| format!("no input in {}", log_file(&step).display()))?;
            let input = self.minimized(target, input)?;
            let bytes = fs::read(&input).with_context(|| format!("reading {}", input.display()))?;
            report.finding = Some(Finding {
                why: reason(&log),
                again: format!("{} {}", self.binaries.join(target.name()).display(), input.display()),
                input: shortened(&bytes.escape_ascii().to_string()),
            });
        }
        Ok(report)
    }

    fn command(&self, target: Target) -> Command {
        let mut command = Command::new(self.binaries.join(target.name()));
        command.current_dir(paths::workspace());
        command
    }

    /// Makes the input of a finding smaller. Returns the smallest one.
    fn minimized(&self, target: Target, input: PathBuf) -> Result<PathBuf> {
        let smallest = input.with_extension("minimized");
        // An input that takes too much time or memory would do so again and again.
        if input.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"crash-")) {
            let mut command = self.command(target);
            command.args(["-minimize_crash=1".to_owned(), format!("-max_total_time={MINIMIZE_SECONDS}")]);
            command.arg(format!("-exact_artifact_path={}", smallest.display())).arg(&input);
            // It fails once the input cannot become smaller, as intended.
            logged(&mut command, &format!("minimizing {}", target.name()))?;
        }
        Ok(if smallest.exists() { smallest } else { input })
    }
}

/// Naming the target keeps the flags from build scripts and procedural macros.
fn compile(triple: &str) -> Command {
    let mut command = run::cargo();
    command.args(["build", "--release", "--bins", "--target", triple, "--manifest-path"]).arg(manifest());
    command.arg("--target-dir").arg(directory()).env("CARGO_ENCODED_RUSTFLAGS", RUSTFLAGS.join("\u{1f}"));
    command
}

/// Result of a run of a target.
struct Report {
    executions: u64,
    seconds: u64,
    coverage: u64,
    finding: Option<Finding>,
}

/// An input that breaks something.
struct Finding {
    /// The target's own words.
    why: String,
    /// Command that runs its input again.
    again: String,
    /// The input, escaped for a test: its file may not outlive the machine.
    input: String,
}

impl Report {
    /// From libFuzzer's output.
    fn read(log: &str, seconds: u64) -> Self {
        let executions = number_after(log, "stat::number_of_executed_units:");
        Self { executions, seconds, coverage: number_after(log, " cov:"), finding: None }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { executions, seconds, coverage, finding } = self;
        write!(f, "{executions} executions in {seconds} s, {coverage} edges, ")?;
        match finding {
            None => write!(f, "no finding"),
            Some(Finding { why, again, input }) => {
                write!(f, "1 finding: {why}\n  run it again: {again}\n  its input: b\"{input}\"")
            }
        }
    }
}

/// The number behind the last occurrence of a word.
fn number_after(log: &str, word: &str) -> u64 {
    let after = log.rsplit_once(word).and_then(|(_, after)| after.split_whitespace().next());
    after.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// The file that libFuzzer has written an input to.
fn artifact(log: &str) -> Option<PathBuf> {
    log.lines().find_map(|line| line.split_once("Test unit written to ")).map(|(_, path)| path.into())
}

/// The target's words when it broke: a panic's place and message with the values that differ, or libFuzzer's verdict.
fn reason(log: &str) -> String {
    let start = log.find("panicked at ").or_else(|| log.find("ERROR: libFuzzer")).unwrap_or(log.len());
    let is_more =
        |(index, line): &(usize, &str)| *index < 2 || ["left:", "right:"].iter().any(|&word| line.starts_with(word));
    let lines = log.get(start..).unwrap_or_default().lines().map(str::trim).enumerate().take_while(is_more);
    lines.map(|(_, line)| shortened(line)).collect::<Vec<_>>().join(" ")
}

/// The start of a long text.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(CHARACTERS_MAX) {
        Some((end, _)) => format!("{} ...", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

/// Runs a target with its output in a file. Returns whether it succeeded, and the output.
fn logged(command: &mut Command, step: &str) -> Result<(bool, String)> {
    let path = log_file(step);
    let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
    let mut child = command.spawn().with_context(|| run::cannot_start(command))?;
    let status = run::wait_with_progress(&mut child, step)?;
    let log = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
    Ok((status.success(), String::from_utf8_lossy(&log).into_owned()))
}

fn log_file(step: &str) -> PathBuf {
    directory().join(format!("{}.log", step.replace(' ', "-")))
}

/// The package of the targets.
fn source() -> PathBuf {
    paths::workspace().join("fuzz")
}

/// The manifest of the package.
pub(crate) fn manifest() -> PathBuf {
    source().join("Cargo.toml")
}

/// Directory of the built targets and of the inputs that they discover.
fn directory() -> PathBuf {
    paths::target().join("fuzz")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "#2\tINITED cov: 12 ft: 13 corp: 1/2b\n#9\tNEW    cov: 15 ft: 20 corp: 2/9b\n\
        thread '<unnamed>' (7) panicked at fuzz_targets/addresses.rs:15:5:\nleft is not right\nstack backtrace:\n\
        ==7== ERROR: libFuzzer: deadly signal\nartifact_prefix='/a/'; Test unit written to /a/crash-1f\n\
        stat::number_of_executed_units: 345\nstat::average_exec_per_sec:     3\n";

    #[test]
    fn figures_are_read_from_the_output() {
        let report = Report::read(LOG, 8);
        assert_eq!(report.to_string(), "345 executions in 8 s, 15 edges, no finding");
        assert_eq!(Report::read("", 0).to_string(), "0 executions in 0 s, 0 edges, no finding");
    }

    #[test]
    fn a_finding_has_a_reason_and_an_input() {
        assert_eq!(artifact(LOG).as_deref(), Some(Path::new("/a/crash-1f")));
        assert_eq!(reason(LOG), "panicked at fuzz_targets/addresses.rs:15:5: left is not right");
        assert_eq!(reason("==7== ERROR: libFuzzer: timeout\n"), "ERROR: libFuzzer: timeout");
        let differs =
            "panicked at a.rs:1:2:\nleft is not right\n  left: [1]\n right: []\nstack backtrace:\n  left: 3\n";
        assert_eq!(reason(differs), "panicked at a.rs:1:2: left is not right left: [1] right: []");
        assert_eq!(shortened(&"ä".repeat(CHARACTERS_MAX + 1)), format!("{} ...", "ä".repeat(CHARACTERS_MAX)));
        assert_eq!(reason(""), "");
        assert_eq!(artifact("Done 3 runs in 0 second(s)\n"), None);
    }
}
