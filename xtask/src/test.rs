//! `cargo xtask test`: all suites, one after the other, and one line at the end that counts them. A suite that cannot
//! run here fails; only `--without` leaves it out.
//!
//! Tests are compiled first. The products that later suites need are built while the first suites run.

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
    binary::{AGENT, RELAY},
    debian, dist, kernels, older, paths,
    releases::{HELM, KUBERNETES, OLDEST_KUBERNETES, PROMETHEUS},
    run, setup,
    steps::{Step, Steps},
    sweep,
};

/// Selection of tests, and the form of their output.
#[derive(Args)]
pub(crate) struct TestArguments {
    /// Leaves out a group of suites, which then count as skipped
    #[arg(long, value_name = "GROUP")]
    without: Vec<SuiteGroup>,
    /// Runs the random tests churn, faults, upgrade, chaos and kube_proxy much longer, and tests that take 25 minutes
    #[arg(long)]
    soak: bool,
    /// Also runs tests that take minutes, those against the oldest supported Kubernetes, and those of metrics with the
    /// latest promtool; both take minutes to build
    #[arg(long)]
    long: bool,
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
    /// Tests of images for guests
    Images,
    /// Tests of the socket programs in this machine's kernel
    Live,
    /// Tests of a release and of its packages
    Packages,
    /// Tests with programs in Go, Java, JavaScript and C, with redis and with Prometheus
    Programs,
}

/// Test binaries that are run together.
struct Suite {
    name: &'static str,
    /// Names of integration tests, or other options of `cargo test` that select targets.
    targets: &'static [&'static str],
    /// Arguments of the test binaries.
    harness: &'static [&'static str],
    /// Requirements besides a compiler.
    needs: &'static [Requirement],
    /// The name that leaves it out.
    group: Option<SuiteGroup>,
}

/// Requirement of a suite. Without it, the suite fails.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Requirement {
    Agent,
    Relay,
    Root,
    Cgroup2,
    ControlPlane,
    /// For tests of the chart, beside the control plane.
    Helm,
    /// For tests that only run with `--long`.
    OldestControlPlane,
    /// The latest promtool, for tests that only run with `--long`; others take Debian's.
    LatestPromtool,
    /// Agents of older table layouts.
    OlderAgents,
    Guests,
    /// The files of a fleet. The suite only runs with `--long`.
    Fleet,
    Images,
    /// A release, and a system to install its packages in.
    Packages,
    Programs,
    /// Nothing is built at the same time, which would disturb measurements.
    Silence,
}

/// One test at a time: the tests of these suites share the machine's cgroups, addresses and ports.
const ALONE: &[&str] = &["--test-threads=1"];

/// Leaves out the tests that take minutes.
const WITHOUT_LONG: [&str; 2] = ["--skip", "long::"];

/// Leaves out the tests that take even longer.
const WITHOUT_SOAK: [&str; 2] = ["--skip", "soak::"];

/// The same without the tests that take minutes under emulation or need other kernels; `cargo xtask vm test` has those.
const SHORT: &[&str] = &["--test-threads=1", WITHOUT_LONG[0], WITHOUT_LONG[1]];

/// The figures are printed even if they are within their budgets.
const BUDGETS: &[&str] = &["--test-threads=1", "--no-capture"];

/// Variable with which random tests run longer.
const SOAK_VARIABLE: &str = "CPROXY_SOAK";

/// Variable with the path of this program, for tests of images.
const XTASK_VARIABLE: &str = "CPROXY_XTASK";

/// Variable with an archive of init systems, for tests of their service files.
const INIT_SYSTEMS_VARIABLE: &str = "CPROXY_INIT_SYSTEMS";

/// Part of the names of tests that need a control plane, in suites that mostly do not; left out with the cluster.
const CLUSTER_TESTS: &str = "the_control_plane_is_real";

/// Suites that need no product of the background come first, those that need all products last.
const SUITES: [Suite; 22] = [
    suite("unit", UNIT, &[], &[], None),
    suite("bad input", &["bad_input"], ALONE, &[Requirement::Agent], None),
    suite("bad server", &["bad_server"], ALONE, &[Requirement::Agent], None),
    suite("live", LIVE, ALONE, KERNEL, Some(SuiteGroup::Live)),
    suite("matrix", &["matrix"], ALONE, KERNEL, Some(SuiteGroup::Live)),
    suite("churn", &["churn"], ALONE, UPGRADES, Some(SuiteGroup::Live)),
    suite("upgrade", &["upgrade", "faults"], ALONE, UPGRADES, Some(SuiteGroup::Live)),
    suite("programs", &["programs"], ALONE, PROGRAMS, Some(SuiteGroup::Programs)),
    suite("metrics", &["metrics"], ALONE, MONITORED, Some(SuiteGroup::Programs)),
    suite("images", &["images"], ALONE, IMAGES, Some(SuiteGroup::Images)),
    // One of its tests is of the control plane.
    suite("harness", &["harness"], ALONE, CLUSTER, Some(SuiteGroup::Live)),
    suite("diagnosis", &["diagnosis"], ALONE, CLUSTER, Some(SuiteGroup::Cluster)),
    suite("guests", &["guests"], SHORT, GUESTS, Some(SuiteGroup::Guests)),
    suite("packages", &["packages"], ALONE, PACKAGES, Some(SuiteGroup::Packages)),
    suite("fleet", &["fleet"], ALONE, FLEET, Some(SuiteGroup::Guests)),
    suite("cluster", &["cluster"], ALONE, OLD_CLUSTER, Some(SuiteGroup::Cluster)),
    suite("chaos", &["chaos"], ALONE, CHAOS, Some(SuiteGroup::Cluster)),
    suite("transcode", &["transcode"], ALONE, CLUSTER, Some(SuiteGroup::Cluster)),
    suite("kube-proxy", &["kube_proxy"], ALONE, RELAYED, Some(SuiteGroup::Cluster)),
    suite("relay", &["relay"], ALONE, RELAYED, Some(SuiteGroup::Cluster)),
    suite("scale", &["scale"], BUDGETS, MEASURED, Some(SuiteGroup::Live)),
    suite("budgets", &["budgets"], BUDGETS, MEASURED_CLUSTER, Some(SuiteGroup::Cluster)),
];

const UNIT: &[&str] =
    &["--lib", "--bins", "allocations", "api_server", "documents", "http2", "histories", "manual", "memory", "watches"];
const LIVE: &[&str] = &[
    "live",
    "health",
    "trace",
    "settings",
    "check",
    "cgroups",
    "stale",
    "places",
    "frontends",
    "room",
    "start",
    "get",
    "manifests",
    "other_users",
    "privileges",
];

const fn suite(
    name: &'static str,
    targets: &'static [&'static str],
    harness: &'static [&'static str],
    needs: &'static [Requirement],
    group: Option<SuiteGroup>,
) -> Suite {
    Suite { name, targets, harness, needs, group }
}

/// A suite without test binaries: a short run of each fuzz target, which counts as a test.
const FUZZ: &str = "fuzz";

/// Another one: the sizes of the agent and the relay.
const SIZE: &str = "size";

const KERNEL: &[Requirement] = &[Requirement::Agent, Requirement::Root, Requirement::Cgroup2];
const UPGRADES: &[Requirement] =
    &[Requirement::Agent, Requirement::Root, Requirement::Cgroup2, Requirement::OlderAgents];
const MEASURED: &[Requirement] = &[Requirement::Agent, Requirement::Root, Requirement::Cgroup2, Requirement::Silence];
const PROGRAMS: &[Requirement] = &[Requirement::Agent, Requirement::Root, Requirement::Cgroup2, Requirement::Programs];
const MONITORED: &[Requirement] = &[
    Requirement::Agent,
    Requirement::Root,
    Requirement::Cgroup2,
    Requirement::ControlPlane,
    Requirement::Programs,
    Requirement::LatestPromtool,
];
const IMAGES: &[Requirement] =
    &[Requirement::Agent, Requirement::Relay, Requirement::Root, Requirement::Cgroup2, Requirement::Images];
const PACKAGES: &[Requirement] = &[
    Requirement::Agent,
    Requirement::Relay,
    Requirement::Root,
    Requirement::Cgroup2,
    Requirement::OlderAgents,
    Requirement::Packages,
];
const GUESTS: &[Requirement] =
    &[Requirement::Agent, Requirement::Relay, Requirement::Root, Requirement::Cgroup2, Requirement::Guests];
const FLEET: &[Requirement] = &[
    Requirement::Agent,
    Requirement::Relay,
    Requirement::Root,
    Requirement::Cgroup2,
    Requirement::ControlPlane,
    Requirement::Guests,
    Requirement::Fleet,
];
const CLUSTER: &[Requirement] =
    &[Requirement::Agent, Requirement::Root, Requirement::Cgroup2, Requirement::ControlPlane];
const CHAOS: &[Requirement] =
    &[Requirement::Agent, Requirement::Root, Requirement::Cgroup2, Requirement::ControlPlane, Requirement::OlderAgents];
const OLD_CLUSTER: &[Requirement] = &[
    Requirement::Agent,
    Requirement::Root,
    Requirement::Cgroup2,
    Requirement::ControlPlane,
    Requirement::Helm,
    Requirement::OldestControlPlane,
];
const RELAYED: &[Requirement] = &[
    Requirement::Agent,
    Requirement::Relay,
    Requirement::Root,
    Requirement::Cgroup2,
    Requirement::ControlPlane,
    Requirement::Programs,
];
const MEASURED_CLUSTER: &[Requirement] =
    &[Requirement::Agent, Requirement::Root, Requirement::Cgroup2, Requirement::ControlPlane, Requirement::Silence];

/// Builds the products that the suites need, runs the suites and prints a summary.
pub(crate) fn run(arguments: &TestArguments) -> Result<ExitCode> {
    let suites: Vec<&Suite> = SUITES.iter().filter(|suite| !arguments.leave_out_suite(suite)).collect();
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
        SuiteRunner { arguments, machine: &machine, products, color: is_coloured(), suites }.outcomes(&compiled)
    });
    outcomes.extend(sweep::left_since(&others)?.into_iter().map(|left| Outcome::failed("leftovers", left)));
    let total = summary::print(&outcomes, is_coloured());
    Ok(if total.failed == 0 && total.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn steps(arguments: &TestArguments) -> Steps {
    let is_compiled = paths::target().join("debug/demo").exists();
    let tests_seconds = if arguments.filter.is_none() { 20 * 60 } else { 0 };
    Steps::new(
        "test",
        [
            Step::once("setting up this machine and compiling tests meanwhile", setup::is_ready_to_build(), 90),
            Step::once("compiling tests", is_compiled, 60),
            Step::new("running tests, and building the products of later ones meanwhile", tests_seconds),
        ],
    )
}

impl TestArguments {
    /// Whether a suite is left out, with its group or because all its tests are long.
    fn leave_out_suite(&self, suite: &Suite) -> bool {
        self.leave_out(suite.group) || (!self.long && suite.needs.contains(&Requirement::Fleet))
    }

    fn leave_out(&self, group: Option<SuiteGroup>) -> bool {
        group.is_some_and(|group| self.without.contains(&group))
    }
}

/// Whether the output is coloured: on a terminal, unless `NO_COLOR` is set.
fn is_coloured() -> bool {
    io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Result of installing the packages of each group of suites; `None` for a group that is left out.
struct Machine {
    cluster: Option<Built<()>>,
    guests: Option<Built<()>>,
    images: Option<Built<()>>,
    packages: Option<Built<()>>,
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
            packages: set_up(SuiteGroup::Packages, setup::for_dist_tests),
            programs: set_up(SuiteGroup::Programs, setup::for_programs),
        }
    }
}

fn wanted(arguments: &TestArguments, machine: &Machine) -> Wanted {
    Wanted {
        control_plane: machine.cluster.clone(),
        is_with_oldest: arguments.long && machine.cluster.is_some(),
        is_with_promtool: arguments.long && machine.programs.is_some(),
        guests: machine.guests.clone(),
        packages: machine.packages.clone(),
        is_with_older: [SuiteGroup::Live, SuiteGroup::Cluster, SuiteGroup::Packages]
            .iter()
            .any(|group| !arguments.leave_out(Some(*group))),
        is_with_fleet: arguments.long && machine.guests.is_some(),
        is_with_fuzzer: !arguments.leave_out(Some(SuiteGroup::Fuzz)),
    }
}

/// Compiles as much for [`compile`] as possible before the toolchain is set up.
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
    for target in suites.iter().flat_map(|suite| suite.targets) {
        command.args((!target.starts_with("--")).then_some("--test")).arg(target);
    }
    command
}

/// Everything that suites need while they run.
struct SuiteRunner<'a> {
    arguments: &'a TestArguments,
    machine: &'a Machine,
    products: Products,
    color: bool,
    /// Number of suites that have begun, and of all suites.
    suites: (usize, usize),
}

impl SuiteRunner<'_> {
    /// Runs the suites that were compiled.
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
        outcomes.push(match self.products.check_sizes() {
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
        if !self.arguments.long {
            command.args(WITHOUT_LONG);
        }
        if !self.arguments.soak {
            command.args(WITHOUT_SOAK);
        }
        let (counts, status) = stream(&mut command)?;
        Ok(outcome_of(suite.name, counts, status, self.arguments.filter.is_some()))
    }

    fn fuzz(&mut self) -> Result<Outcome> {
        let (passed, failed) = self.products.fuzzer()?.test(self.arguments.filter.as_deref())?;
        Ok(Outcome::new(FUZZ, Counts { passed, failed, skipped: 0 }))
    }

    /// Waits for a requirement of a suite and passes its path to the command.
    fn supply(&mut self, need: Requirement, command: &mut Command) -> Result<()> {
        let is_installed = |packages: &Option<Built<()>>| match packages {
            Some(Err(reason)) => Err(anyhow!("programs are missing: {reason}")),
            Some(Ok(())) | None => Ok(()),
        };
        match need {
            Requirement::Agent => {
                let agent = self.products.agent().context("no agent")?;
                command.env(AGENT.variable, &agent.shipped);
            }
            Requirement::Relay => {
                let relay = self.products.relay().context("no relay")?;
                command.env(RELAY.variable, &relay.shipped);
            }
            Requirement::Root => run::require_root("this suite")?,
            Requirement::Cgroup2 => ensure!(sweep::has_cgroup2(), "no cgroup2 is mounted: mount it at /sys/fs/cgroup"),
            Requirement::ControlPlane if self.machine.cluster.is_none() => {}
            Requirement::ControlPlane => {
                command.env(KUBERNETES.variable, self.products.control_plane().context("no control plane")?);
            }
            Requirement::Helm => {
                command.env(HELM.variable, self.products.helm().context("no Helm")?);
            }
            Requirement::OldestControlPlane if !self.arguments.long => {}
            Requirement::OldestControlPlane => {
                let oldest = self.products.oldest().context("no control plane of the oldest release")?;
                command.env(OLDEST_KUBERNETES.variable, oldest);
            }
            Requirement::LatestPromtool if !self.arguments.long => {}
            Requirement::LatestPromtool => {
                command.env(PROMETHEUS.variable, self.products.promtool().context("no promtool")?);
            }
            Requirement::OlderAgents => {
                command.env(older::VARIABLE, self.products.older().context("no older agents")?);
            }
            Requirement::Guests => {
                let (guests, kernel) = self.products.guests().context("no guests")?;
                guests.set_variables(command, kernel);
            }
            Requirement::Packages => {
                let packages = self.products.packages().context("no release")?;
                command.env(dist::VARIABLE, &packages.release).env(debian::VARIABLE, &packages.debian);
                command.env(INIT_SYSTEMS_VARIABLE, kernels::init_systems().context("no init systems")?);
            }
            Requirement::Fleet => {
                let kernel = self.products.guests().context("no guests")?.1.clone();
                self.products.fleet().context("no fleet")?.set_variables(command, &kernel);
            }
            Requirement::Images => {
                is_installed(&self.machine.images)?;
                command.env(INIT_SYSTEMS_VARIABLE, kernels::init_systems().context("no init systems")?);
            }
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
/// so that messages of cargo and of the tests stay in order.
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

#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, fs};

    use super::*;

    #[test]
    fn every_integration_test_is_in_a_suite() {
        let targets: Vec<&str> = SUITES.iter().flat_map(|suite| suite.targets).copied().collect();
        let directories = ["tests/tests", "cproxy/tests", "crates/wire/tests", "crates/relay/tests"];
        let read = |directory| fs::read_dir(paths::workspace().join(directory)).unwrap();
        for entry in directories.into_iter().flat_map(read) {
            let path = entry.unwrap().path();
            let name = path.file_stem().and_then(OsStr::to_str).unwrap();
            assert_eq!(targets.iter().filter(|target| **target == name).count(), 1, "{name}");
        }
    }

    #[test]
    fn targets_become_options_of_cargo() {
        let suite = SUITES.iter().find(|suite| suite.targets.starts_with(&["--lib", "--bins", "allocations"])).unwrap();
        let command = tests(&[suite]);
        let args: Vec<_> = command.get_args().filter_map(OsStr::to_str).skip(3).take(4).collect();
        assert_eq!(args, ["--lib", "--bins", "--test", "allocations"]);
    }
}
