//! `cargo xtask test`: every suite, one after the other, and one line at the end that counts them all. A suite that
//! cannot run here fails: only `--without` leaves it out.
//!
//! Tests are compiled first. The first suites run while the rest is built that later ones need.

mod products;
pub(crate) mod summary;

use std::{
    env,
    io::{self, BufRead as _, BufReader, IsTerminal as _, Write as _},
    process::{Command, ExitCode, ExitStatus, Stdio},
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::{Args, ValueEnum};

use self::{
    products::{Built, Products, Wanted, into_built},
    summary::{Counts, Outcome},
};
use crate::{
    agent, control_plane, paths, run, setup,
    steps::{Step, Steps},
    sweep,
};

/// Which tests to run, and how to show them.
#[derive(Args)]
pub(crate) struct TestArguments {
    /// Leaves out a suite, which then counts as skipped
    #[arg(long, value_name = "SUITE")]
    without: Vec<SuiteGroup>,
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
enum SuiteGroup {
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
    /// The targets, as arguments of `cargo test`.
    targets: &'static [&'static str],
    /// TestArguments of the test binaries.
    harness: &'static [&'static str],
    /// Requirements besides a compiler.
    needs: &'static [Requirement],
    /// The name that leaves it out.
    part: Option<SuiteGroup>,
}

/// Requirement of a suite, which fails where it is missing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Requirement {
    Agent,
    Root,
    Cgroup2,
    ControlPlane,
    /// Of tests that are only run with `--long`.
    OldestControlPlane,
    Guests,
    Images,
    Programs,
    /// Nothing is built at the same time: what is measured would be disturbed.
    Silence,
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

/// Those that need nothing that is built in the background come first, those that need all of it last.
const SUITES: [Suite; 14] = [
    Suite {
        name: "unit",
        targets: &["--lib", "--bins", "--test", "allocations", "--test", "api_server"],
        harness: &[],
        needs: &[],
        part: None,
    },
    Suite {
        name: "bad input",
        targets: &["--test", "bad_input"],
        harness: ALONE,
        needs: &[Requirement::Agent],
        part: None,
    },
    Suite {
        name: "bad server",
        targets: &["--test", "bad_server"],
        harness: ALONE,
        needs: &[Requirement::Agent],
        part: None,
    },
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
        part: Some(SuiteGroup::Live),
    },
    Suite {
        name: "matrix",
        targets: &["--test", "matrix"],
        harness: ALONE,
        needs: KERNEL,
        part: Some(SuiteGroup::Live),
    },
    Suite { name: "churn", targets: &["--test", "churn"], harness: ALONE, needs: KERNEL, part: Some(SuiteGroup::Live) },
    Suite {
        name: "programs",
        targets: &["--test", "programs"],
        harness: ALONE,
        needs: PROGRAMS,
        part: Some(SuiteGroup::Programs),
    },
    Suite {
        name: "images",
        targets: &["--test", "images"],
        harness: ALONE,
        needs: IMAGES,
        part: Some(SuiteGroup::Images),
    },
    // One of its tests is of the control plane.
    Suite {
        name: "harness",
        targets: &["--test", "harness"],
        harness: ALONE,
        needs: CLUSTER,
        part: Some(SuiteGroup::Live),
    },
    Suite {
        name: "guests",
        targets: &["--test", "guests"],
        harness: SHORT,
        needs: GUESTS,
        part: Some(SuiteGroup::Guests),
    },
    Suite {
        name: "cluster",
        targets: &["--test", "cluster"],
        harness: ALONE,
        needs: OLD_CLUSTER,
        part: Some(SuiteGroup::Cluster),
    },
    Suite {
        name: "kube-proxy",
        targets: &["--test", "kube_proxy"],
        harness: ALONE,
        needs: CLUSTER,
        part: Some(SuiteGroup::Cluster),
    },
    Suite {
        name: "scale",
        targets: &["--test", "scale"],
        harness: BUDGETS,
        needs: MEASURED,
        part: Some(SuiteGroup::Live),
    },
    Suite {
        name: "budgets",
        targets: &["--test", "budgets"],
        harness: BUDGETS,
        needs: MEASURED_CLUSTER,
        part: Some(SuiteGroup::Cluster),
    },
];

/// The suite that is none of cargo's: a short run of each fuzz target, which counts as a test.
const FUZZ: &str = "fuzz";

/// Nor is this one: the agent is as small as it is promised to be.
const SIZE: &str = "size";

const KERNEL: &[Requirement] = &[Requirement::Agent, Requirement::Root, Requirement::Cgroup2];
const MEASURED: &[Requirement] = &[Requirement::Agent, Requirement::Root, Requirement::Cgroup2, Requirement::Silence];
const PROGRAMS: &[Requirement] = &[Requirement::Agent, Requirement::Root, Requirement::Cgroup2, Requirement::Programs];
const IMAGES: &[Requirement] = &[Requirement::Agent, Requirement::Root, Requirement::Cgroup2, Requirement::Images];
const GUESTS: &[Requirement] = &[Requirement::Agent, Requirement::Root, Requirement::Cgroup2, Requirement::Guests];
const CLUSTER: &[Requirement] =
    &[Requirement::Agent, Requirement::Root, Requirement::Cgroup2, Requirement::ControlPlane];
const OLD_CLUSTER: &[Requirement] = &[
    Requirement::Agent,
    Requirement::Root,
    Requirement::Cgroup2,
    Requirement::ControlPlane,
    Requirement::OldestControlPlane,
];
const MEASURED_CLUSTER: &[Requirement] =
    &[Requirement::Agent, Requirement::Root, Requirement::Cgroup2, Requirement::ControlPlane, Requirement::Silence];

/// Builds what the suites need, runs them and sums up.
pub(crate) fn run(arguments: &TestArguments) -> Result<ExitCode> {
    let suites: Vec<&Suite> = SUITES.iter().filter(|suite| !arguments.leave_out(suite.part)).collect();
    let mut steps = steps(arguments);
    steps.next();
    let machine = setup::beside(&mut compile_ahead(), || Machine::set_up(arguments))?;
    steps.next();
    let compiled = compile(&suites);
    let others = sweep::clear()?;
    steps.next();
    let mut outcomes = thread::scope(|scope| {
        let products = Products::build(scope, wanted(arguments, &machine));
        let suites = (0, compiled.len() + usize::from(!arguments.leave_out(Some(SuiteGroup::Fuzz))));
        SuiteRunner { arguments, machine: &machine, products, color: arguments.is_coloured(), suites }
            .outcomes(&compiled)
    });
    outcomes.extend(sweep::left_since(&others)?.into_iter().map(|left| Outcome::failed("leftovers", left)));
    let total = summary::print(&outcomes, arguments.is_coloured());
    Ok(if total.failed == 0 && total.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn steps(arguments: &TestArguments) -> Steps {
    let is_compiled = paths::target().join("debug/demo").exists();
    let tests_seconds = if arguments.filter.is_none() { 20 * 60 } else { 0 };
    Steps::new(
        "test",
        [
            Step::once("setting up this machine, and compiling tests beside", setup::is_ready_to_build(), 90),
            Step::once("compiling tests", is_compiled, 60),
            Step::new("running tests, and building beside the first ones what later ones need", tests_seconds),
        ],
    )
}

impl TestArguments {
    fn leave_out(&self, part: Option<SuiteGroup>) -> bool {
        part.is_some_and(|part| self.without.contains(&part))
    }

    fn is_coloured(&self) -> bool {
        self.color.is_wanted(io::stdout().is_terminal(), |name| env::var(name).ok())
    }
}

/// Whether the packages of each part of the tests are installed, or why not; nothing for what is left out.
struct Machine {
    cluster: Option<Built<()>>,
    guests: Option<Built<()>>,
    images: Option<Built<()>>,
    programs: Option<Built<()>>,
}

impl Machine {
    fn set_up(arguments: &TestArguments) -> Self {
        let set_up =
            |part, set_up: fn() -> Result<()>| (!arguments.leave_out(Some(part))).then(|| into_built(set_up()));
        Self {
            cluster: set_up(SuiteGroup::Cluster, setup::for_cluster),
            guests: set_up(SuiteGroup::Guests, setup::for_guests),
            images: set_up(SuiteGroup::Images, setup::for_image_tests),
            programs: set_up(SuiteGroup::Programs, setup::for_programs),
        }
    }
}

fn wanted(arguments: &TestArguments, machine: &Machine) -> Wanted {
    Wanted {
        control_plane: machine.cluster.clone(),
        is_with_oldest: arguments.long && machine.cluster.is_some(),
        guests: machine.guests.clone(),
        is_with_fuzzer: !arguments.leave_out(Some(SuiteGroup::Fuzz)),
    }
}

/// Compiles for [`compile`] as much as the toolchain allows yet.
fn compile_ahead() -> Command {
    let mut command = run::cargo();
    command.args(["build", "--workspace", "--tests", "--keep-going"]);
    command
}

/// Compiles suites, all at once. Where that fails, each by itself: those that compile are run.
fn compile<'s>(suites: &[&'s Suite]) -> Vec<(&'s Suite, Result<()>)> {
    let compile = |suites: &[&Suite]| run::run(run::to_stderr(tests(suites).arg("--no-run"))?);
    let all = compile(suites);
    suites.iter().map(|suite| (*suite, if all.is_ok() { Ok(()) } else { compile(&[suite]) })).collect()
}

/// Tests of these suites, with the same packages each time: dependencies are compiled with the same features then, and
/// so only once for all suites.
fn tests(suites: &[&Suite]) -> Command {
    let mut command = run::cargo();
    command.args(["test", "--workspace", "--no-fail-fast"]).stdin(Stdio::null());
    command.args(suites.iter().flat_map(|suite| suite.targets));
    command
}

/// Supplies of the suites.
struct SuiteRunner<'a> {
    arguments: &'a TestArguments,
    machine: &'a Machine,
    products: Products,
    color: bool,
    /// How many have begun, and how many there are.
    suites: (usize, usize),
}

impl SuiteRunner<'_> {
    /// Runs those suites that are compiled.
    fn outcomes(&mut self, compiled: &[(&Suite, Result<()>)]) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for suite in &SUITES {
            let compiled = compiled.iter().find(|(other, _)| other.name == suite.name);
            outcomes.push(match compiled {
                None => Outcome::left_out(suite.name),
                Some((_, Err(error))) => Outcome::failed(suite.name, format!("{error:#}")),
                Some((_, Ok(()))) => self.timed(suite.name, |runner| runner.run(suite)),
            });
        }
        outcomes.push(match self.arguments.leave_out(Some(SuiteGroup::Fuzz)) {
            true => Outcome::left_out(FUZZ),
            false => self.timed(FUZZ, Self::fuzz),
        });
        outcomes.push(match self.products.check_size() {
            Ok(()) => Outcome::new(SIZE, Counts { passed: 1, ..Counts::default() }),
            Err(error) => Outcome::failed(SIZE, format!("{error:#}")),
        });
        outcomes
    }

    fn timed(&mut self, name: &'static str, run: impl FnOnce(&mut Self) -> Result<Outcome>) -> Outcome {
        self.suites.0 += 1;
        run::report(format!("test: suite {} of {}: {name}", self.suites.0, self.suites.1));
        let start = Instant::now();
        let outcome = run(self).unwrap_or_else(|error| Outcome::failed(name, format!("{error:#}")));
        outcome.took(start.elapsed())
    }

    fn run(&mut self, suite: &Suite) -> Result<Outcome> {
        let mut command = tests(&[suite]);
        for need in suite.needs {
            self.supply(*need, &mut command)?;
        }
        if let Ok(this) = env::current_exe() {
            command.env(XTASK_VARIABLE, this);
        }
        if self.arguments.soak {
            command.env(SOAK_VARIABLE, "1");
        }
        command.arg("--").args(suite.harness);
        command.args(["--color", if self.color { "always" } else { "never" }]).args(&self.arguments.filter);
        if self.machine.cluster.is_none() {
            command.args(["--skip", CLUSTER_TESTS]);
        }
        if suite.needs.contains(&Requirement::OldestControlPlane) && !self.arguments.long {
            command.args(WITHOUT_LONG);
        }
        let (counts, status) = stream(&mut command)?;
        Ok(outcome_of(suite.name, counts, status, self.arguments.filter.is_some()))
    }

    fn fuzz(&mut self) -> Result<Outcome> {
        let (passed, failed) = self.products.fuzzer()?.test(self.arguments.filter.as_deref())?;
        Ok(Outcome::new(FUZZ, Counts { passed, failed, skipped: 0 }))
    }

    /// Waits for what a suite needs and tells the command where it is. Fails where it is missing.
    fn supply(&mut self, need: Requirement, command: &mut Command) -> Result<()> {
        let is_installed = |packages: &Option<Built<()>>| match packages {
            Some(Err(reason)) => Err(anyhow!("programs are missing: {reason}")),
            Some(Ok(())) | None => Ok(()),
        };
        match need {
            Requirement::Agent => {
                let agent = self.products.agent().context("no agent")?;
                command.env(agent::VARIABLE, &agent.shipped);
            }
            Requirement::Root => run::require_root("this suite")?,
            Requirement::Cgroup2 => ensure!(sweep::has_cgroup2(), "no cgroup2 is mounted: mount it at /sys/fs/cgroup"),
            Requirement::ControlPlane if self.machine.cluster.is_none() => {}
            Requirement::ControlPlane => {
                command.env(control_plane::VARIABLE, self.products.control_plane().context("no control plane")?);
            }
            Requirement::OldestControlPlane if !self.arguments.long => {}
            Requirement::OldestControlPlane => {
                let oldest = self.products.oldest().context("no control plane of the oldest release")?;
                command.env(control_plane::OLDEST_VARIABLE, oldest);
            }
            Requirement::Guests => {
                let (guests, kernel) = self.products.guests().context("no guests")?;
                guests.set_variables(command, kernel);
            }
            Requirement::Images => is_installed(&self.machine.images)?,
            Requirement::Programs => is_installed(&self.machine.programs)?,
            Requirement::Silence => self.products.wait_for_all(),
        }
        Ok(())
    }
}

/// Outcome of a run of test binaries.
pub(crate) fn outcome_of(name: &str, counts: Counts, status: ExitStatus, is_filtered: bool) -> Outcome {
    let outcome = Outcome::new(name, counts);
    if !status.success() && counts.failed == 0 {
        return outcome.with_failure(format!("a test binary ended before its tests did ({status})"));
    }
    if counts.passed + counts.failed == 0 && !is_filtered {
        return outcome.with_failure("ran no test".to_owned());
    }
    outcome
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
