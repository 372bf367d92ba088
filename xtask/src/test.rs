//! `cargo xtask test`: every suite, one after the other, and one line at the end that counts them all. A suite that
//! cannot run here fails: only who names it with `--without` leaves it out.

pub(crate) mod summary;

use std::env;
use std::io::{self, BufRead as _, BufReader, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};

use self::summary::{Counts, Outcome};
use crate::fuzz::Fuzzer;
use crate::{agent, control_plane, run, setup, sizes, sweep, vm};

/// Which tests to run, and how to show them.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Leaves out a suite, which then counts as skipped
    #[arg(long, value_name = "SUITE")]
    without: Vec<Part>,
    /// Ten times as long where tests are random
    #[arg(long)]
    soak: bool,
    /// Besides, what takes long to build: tests against the oldest Kubernetes that is supported
    #[arg(long)]
    long: bool,
    /// Whether to colour the output
    #[arg(long, default_value = "auto")]
    color: Color,
    /// Runs only the tests whose names contain this
    filter: Option<String>,
}

/// A suite that needs more of the machine than a compiler.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Tests against a real Kubernetes control plane, and beside the real kube-proxy
    Cluster,
    /// A short run of each fuzz target
    Fuzz,
    /// Tests in virtual machines
    Guests,
    /// Tests of what is baked into guests
    Images,
    /// Tests of the socket programs in this machine's kernel
    Live,
    /// Tests with programs in Go, Java, JavaScript and C, and with redis
    Programs,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Color {
    /// Where a terminal shows it
    Auto,
    /// In any case
    Always,
    /// In no case
    Never,
}

/// Test binaries that are run together.
struct Suite {
    name: &'static str,
    /// The targets, as arguments of `cargo test --workspace`: with the same packages each time, dependencies are
    /// compiled with the same features and so only once for all suites.
    targets: &'static [&'static str],
    /// Arguments of the test binaries.
    harness: &'static [&'static str],
    /// What it needs of the machine besides a compiler.
    needs: &'static [Need],
    /// The name that leaves it out.
    part: Option<Part>,
}

/// What a machine can lack; a suite that needs it then fails.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Need {
    Root,
    Cgroup2,
    ControlPlane,
    /// Of tests that are only run with `--long`.
    OldestControlPlane,
    Guests,
    Images,
    Programs,
}

/// One test at a time: the tests of these suites share the machine's cgroups, addresses and ports.
const ALONE: &[&str] = &["--test-threads=1"];

/// Leaves out the tests that take minutes.
const WITHOUT_LONG: [&str; 2] = ["--skip", "long::"];

/// The same without what takes minutes under emulation or other kernels: that is for `cargo xtask vm test`.
const SHORT: &[&str] = &["--test-threads=1", WITHOUT_LONG[0], WITHOUT_LONG[1]];

/// The figures are of interest also when they are within their budgets.
const BUDGETS: &[&str] = &["--test-threads=1", "--no-capture"];

/// The variable that tells random tests to take their time.
const SOAK_VARIABLE: &str = "CPROXY_SOAK";

/// The variable that tells tests of images where this program is.
const XTASK_VARIABLE: &str = "CPROXY_XTASK";

/// Tests, in suites that mostly do without one, that need a control plane; left out together with the cluster.
const CLUSTER_TESTS: &str = "the_control_plane_is_real";

const SUITES: [Suite; 14] = [
    Suite {
        name: "unit",
        targets: &["--lib", "--bins", "--test", "allocations", "--test", "api_server"],
        harness: &[],
        needs: &[],
        part: None,
    },
    Suite { name: "bad input", targets: &["--test", "bad_input"], harness: ALONE, needs: &[], part: None },
    Suite { name: "bad server", targets: &["--test", "bad_server"], harness: ALONE, needs: &[], part: None },
    Suite { name: "harness", targets: &["--test", "harness"], harness: ALONE, needs: KERNEL, part: Some(Part::Live) },
    Suite {
        name: "live",
        targets: &[
            "--test",
            "live",
            "--test",
            "settings",
            "--test",
            "check",
            "--test",
            "stale",
            "--test",
            "frontends",
            "--test",
            "room",
            "--test",
            "start",
            "--test",
            "get",
            "--test",
            "manifests",
            "--test",
            "other_users",
        ],
        harness: ALONE,
        needs: KERNEL,
        part: Some(Part::Live),
    },
    Suite { name: "matrix", targets: &["--test", "matrix"], harness: ALONE, needs: KERNEL, part: Some(Part::Live) },
    Suite { name: "churn", targets: &["--test", "churn"], harness: ALONE, needs: KERNEL, part: Some(Part::Live) },
    Suite { name: "scale", targets: &["--test", "scale"], harness: BUDGETS, needs: KERNEL, part: Some(Part::Live) },
    Suite {
        name: "programs",
        targets: &["--test", "programs"],
        harness: ALONE,
        needs: PROGRAMS,
        part: Some(Part::Programs),
    },
    Suite { name: "images", targets: &["--test", "images"], harness: ALONE, needs: IMAGES, part: Some(Part::Images) },
    Suite { name: "guests", targets: &["--test", "guests"], harness: SHORT, needs: GUESTS, part: Some(Part::Guests) },
    Suite {
        name: "cluster",
        targets: &["--test", "cluster"],
        harness: ALONE,
        needs: OLD_CLUSTER,
        part: Some(Part::Cluster),
    },
    Suite {
        name: "budgets",
        targets: &["--test", "budgets"],
        harness: BUDGETS,
        needs: CLUSTER,
        part: Some(Part::Cluster),
    },
    Suite {
        name: "kube-proxy",
        targets: &["--test", "kube_proxy"],
        harness: ALONE,
        needs: CLUSTER,
        part: Some(Part::Cluster),
    },
];

/// The suite that is none of cargo's: a short run of each fuzz target, which counts as a test.
const FUZZ: &str = "fuzz";

/// Nor is this one: the agent is as small as it is promised to be.
const SIZE: &str = "size";

const KERNEL: &[Need] = &[Need::Root, Need::Cgroup2];
const PROGRAMS: &[Need] = &[Need::Root, Need::Cgroup2, Need::Programs];
const IMAGES: &[Need] = &[Need::Root, Need::Cgroup2, Need::Images];
const GUESTS: &[Need] = &[Need::Root, Need::Cgroup2, Need::Guests];
const CLUSTER: &[Need] = &[Need::Root, Need::Cgroup2, Need::ControlPlane];
const OLD_CLUSTER: &[Need] = &[Need::Root, Need::Cgroup2, Need::ControlPlane, Need::OldestControlPlane];

/// What suites are given.
struct Fixture {
    agent: PathBuf,
    /// Why the agent is too large, if it is.
    size: Result<(), String>,
    /// Where the control plane is, or why it is not there.
    control_plane: Result<PathBuf, String>,
    /// Where the oldest one's binaries are, or why they are not there; nothing: long tests are left out.
    oldest: Option<Result<PathBuf, String>>,
    /// Whether the programs are installed, or why not.
    programs: Result<(), String>,
    /// Whether what images are held against is installed, or why not.
    images: Result<(), String>,
    /// What guests are started with, or why they are not.
    guests: Result<(vm::Fixture, PathBuf), String>,
    is_without_cluster: bool,
    is_soak: bool,
    filter: Option<String>,
    color: bool,
}

/// Builds what the suites need, runs them and sums up.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let fixture = Fixture::new(arguments)?;
    let others = sweep::clear()?;
    let is_left_out = |suite: &Suite| suite.part.is_some_and(|part| arguments.without.contains(&part));
    let compiled = SUITES.map(|suite| if is_left_out(&suite) { Ok(()) } else { fixture.compile(&suite) });
    let fuzzer = (!arguments.without.contains(&Part::Fuzz)).then(compile_fuzz_targets);
    let mut outcomes = Vec::new();
    for (suite, compiled) in SUITES.iter().zip(compiled) {
        outcomes.push(match compiled {
            _ if is_left_out(suite) => Outcome::left_out(suite.name),
            Ok(()) => fixture.outcome(suite),
            Err(error) => Outcome::failed(suite.name, format!("{error:#}")),
        });
    }
    outcomes.push(match fuzzer {
        None => Outcome::left_out(FUZZ),
        Some(fuzzer) => fixture.fuzz(fuzzer),
    });
    outcomes.push(match &fixture.size {
        Ok(()) => Outcome::new(SIZE, Counts { passed: 1, ..Counts::default() }),
        Err(why) => Outcome::failed(SIZE, why.clone()),
    });
    outcomes.extend(sweep::left_since(&others)?.into_iter().map(|left| Outcome::failed("leftovers", left)));
    let total = summary::print(&outcomes, fixture.color);
    Ok(if total.failed == 0 && total.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Fixture {
    fn new(arguments: &Arguments) -> Result<Self> {
        let agent = agent::build()?;
        let size = sizes::check(&agent).map_err(|error| format!("{error:#}"));
        let is_without_cluster = arguments.without.contains(&Part::Cluster);
        let control_plane = if is_without_cluster {
            Err("left out".to_owned())
        } else {
            setup::for_cluster().and_then(|()| control_plane::ensure()).map_err(|error| format!("{error:#}"))
        };
        let is_with_oldest = arguments.long && !is_without_cluster;
        let oldest = is_with_oldest.then(|| control_plane::OLDEST.ensure().map_err(|error| format!("{error:#}")));
        let programs = if arguments.without.contains(&Part::Programs) {
            Err("left out".to_owned())
        } else {
            setup::for_programs().map_err(|error| format!("{error:#}"))
        };
        let images = if arguments.without.contains(&Part::Images) {
            Err("left out".to_owned())
        } else {
            setup::for_image_tests().map_err(|error| format!("{error:#}"))
        };
        let guests = if arguments.without.contains(&Part::Guests) {
            Err("left out".to_owned())
        } else {
            guests(&agent.shipped).map_err(|error| format!("{error:#}"))
        };
        let color = arguments.color.is_wanted(io::stdout().is_terminal(), |name| env::var(name).ok());
        let (is_soak, filter) = (arguments.soak, arguments.filter.clone());
        Ok(Self {
            agent: agent.shipped,
            size,
            control_plane,
            oldest,
            programs,
            images,
            guests,
            is_without_cluster,
            is_soak,
            filter,
            color,
        })
    }

    fn compile(&self, suite: &Suite) -> Result<()> {
        run::say(format!("test: compiling suite {}", suite.name));
        run::run(run::to_stderr(self.command(suite).arg("--no-run"))?)
    }

    fn command(&self, suite: &Suite) -> Command {
        let mut command = run::cargo();
        command.args(["test", "--workspace", "--no-fail-fast"]).args(suite.targets);
        command.env(agent::VARIABLE, &self.agent).stdin(Stdio::null());
        if let Ok(directory) = &self.control_plane {
            command.env(control_plane::VARIABLE, directory);
        }
        if let Some(Ok(directory)) = &self.oldest {
            command.env(control_plane::OLDEST_VARIABLE, directory);
        }
        if let Ok((guests, kernel)) = &self.guests {
            guests.tell(&mut command, kernel);
        }
        if let Ok(this) = env::current_exe() {
            command.env(XTASK_VARIABLE, this);
        }
        if self.is_soak {
            command.env(SOAK_VARIABLE, "1");
        }
        command
    }

    fn outcome(&self, suite: &Suite) -> Outcome {
        run::say(format!("test: running suite {}", suite.name));
        let start = Instant::now();
        let outcome = match self.run(suite) {
            Ok((counts, status)) => judge(suite.name, counts, status, self.filter.is_some()),
            Err(error) => Outcome::failed(suite.name, format!("{error:#}")),
        };
        outcome.took(start.elapsed())
    }

    fn run(&self, suite: &Suite) -> Result<(Counts, ExitStatus)> {
        self.require(suite)?;
        let mut command = self.command(suite);
        command.arg("--").args(suite.harness);
        command.args(["--color", if self.color { "always" } else { "never" }]).args(&self.filter);
        if self.is_without_cluster {
            command.args(["--skip", CLUSTER_TESTS]);
        }
        if suite.needs.contains(&Need::OldestControlPlane) && self.oldest.is_none() {
            command.args(WITHOUT_LONG);
        }
        stream(&mut command)
    }

    fn fuzz(&self, fuzzer: Result<Fuzzer>) -> Outcome {
        run::say(format!("test: running suite {FUZZ}"));
        let start = Instant::now();
        let outcome = match fuzzer.and_then(|fuzzer| fuzzer.test(self.filter.as_deref())) {
            Ok((passed, failed)) => Outcome::new(FUZZ, Counts { passed, failed, skipped: 0 }),
            Err(error) => Outcome::failed(FUZZ, format!("{error:#}")),
        };
        outcome.took(start.elapsed())
    }

    /// Fails where this machine lacks what the suite needs.
    fn require(&self, suite: &Suite) -> Result<()> {
        for need in suite.needs {
            match need {
                Need::Root => run::require_root("this suite")?,
                Need::Cgroup2 => {
                    ensure!(sweep::has_cgroup2(), "no cgroup2 is mounted: mount it at /sys/fs/cgroup");
                }
                Need::ControlPlane => {
                    if let Err(reason) = &self.control_plane {
                        bail!("no control plane: {reason}");
                    }
                }
                Need::OldestControlPlane => {
                    if let Some(Err(reason)) = &self.oldest {
                        bail!("no control plane of the oldest release: {reason}");
                    }
                }
                Need::Guests => {
                    if let Err(reason) = &self.guests {
                        bail!("no guests: {reason}");
                    }
                }
                Need::Images => {
                    if let Err(reason) = &self.images {
                        bail!("programs are missing: {reason}");
                    }
                }
                Need::Programs => {
                    if let Err(reason) = &self.programs {
                        bail!("programs are missing: {reason}");
                    }
                }
            }
        }
        Ok(())
    }
}

/// What a run of test binaries amounts to.
pub(crate) fn judge(name: &str, counts: Counts, status: ExitStatus, is_filtered: bool) -> Outcome {
    let outcome = Outcome::new(name, counts);
    if !status.success() && counts.failed == 0 {
        return outcome.with_failure(format!("a test binary ended before its tests did ({status})"));
    }
    if counts.passed + counts.failed == 0 && !is_filtered {
        return outcome.with_failure("ran no test".to_owned());
    }
    outcome
}

fn guests(agent: &Path) -> Result<(vm::Fixture, PathBuf)> {
    Ok((vm::Fixture::new(agent)?, vm::Fixture::kernel()?))
}

fn compile_fuzz_targets() -> Result<Fuzzer> {
    run::say(format!("test: compiling suite {FUZZ}"));
    Fuzzer::build()
}

/// Runs tests with their output passed on line by line, and counts them on the way. Both output streams share a pipe,
/// so that what cargo says stays in order with what the tests say.
pub(crate) fn stream(command: &mut Command) -> Result<(Counts, ExitStatus)> {
    let (output, input) = io::pipe().context("making a pipe")?;
    let twin = input.try_clone().context("sharing a pipe")?;
    let mut child = command.stdout(input).stderr(twin).spawn().with_context(|| run::cannot_start(command))?;
    command.stdout(Stdio::null()).stderr(Stdio::null()); // closes this side's ends, or the output would never end
    let mut counts = Counts::default();
    for line in BufReader::new(output).split(b'\n') {
        let line = line.context("reading the tests' output")?;
        counts += Counts::parse(&String::from_utf8_lossy(&line));
        let mut stdout = io::stdout().lock();
        stdout.write_all(&line).and_then(|()| stdout.write_all(b"\n")).context("writing the tests' output")?;
    }
    Ok((counts, child.wait().context("waiting for the tests")?))
}

impl Color {
    /// Follows the conventions of the variables `NO_COLOR` and `CLICOLOR_FORCE`.
    fn is_wanted(self, is_terminal: bool, variable: impl Fn(&str) -> Option<String>) -> bool {
        let is_set = |name| variable(name).is_some_and(|value| !value.is_empty());
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Auto if is_set("NO_COLOR") => false,
            Self::Auto => is_terminal || variable("CLICOLOR_FORCE").is_some_and(|value| value != "0"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_follows_the_option_then_the_variables_then_the_terminal() {
        let none = |_: &str| None;
        let only = |wanted: &'static str| move |name: &str| (name == wanted).then(|| "1".to_owned());
        assert!(Color::Always.is_wanted(false, only("NO_COLOR")));
        assert!(!Color::Never.is_wanted(true, only("CLICOLOR_FORCE")));
        assert!(Color::Auto.is_wanted(true, none) && !Color::Auto.is_wanted(false, none));
        assert!(!Color::Auto.is_wanted(true, only("NO_COLOR")));
        assert!(Color::Auto.is_wanted(false, only("CLICOLOR_FORCE")));
    }
}
