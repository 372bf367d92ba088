//! `cargo xtask test`: each test as a process of its own, several at once, and one line at the end that counts them. A
//! test that cannot run here fails; only `--without` leaves it out.
//!
//! Tests are compiled first. The products that they need are built while tests that need none of them run
//! (docs/decisions/040).

mod binaries;
mod job;
mod products;
mod queue;
mod selection;
mod shared;
pub(crate) mod suites;
pub(crate) mod summary;
mod times;

use std::{
    collections::BTreeSet,
    env,
    io::{self, IsTerminal as _},
    process::{Command, ExitCode},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::Args;

use self::{
    binaries::TestBinary,
    job::{Ended, Variables, Work},
    products::{Product, Products},
    queue::{Entry, Queue, Readiness},
    selection::{Selection, Targets},
    shared::SharedControlPlanes,
    suites::{Class, Need, Suite, SuiteKind},
    summary::Outcomes,
    times::Times,
};
use crate::{
    fuzz, paths, setup,
    steps::{Step, Steps},
    sweep,
};

/// Selection of tests, and how they run.
#[derive(Args)]
pub(crate) struct TestArguments {
    /// Runs these alone: SUITE, SUITE::TEST or TEST, of which a part is enough; also a module or a package
    #[arg(value_name = "TESTS")]
    words: Vec<String>,
    /// Leaves out a suite, which then counts as skipped
    #[arg(long, value_name = "SUITE", value_parser = suites::parser())]
    without: Vec<String>,
    /// Runs the random tests faults, upgrade, chaos and kube_proxy much longer, and tests that take 25 minutes
    #[arg(long)]
    soak: bool,
    /// Also runs tests that take minutes, those against the oldest supported Kubernetes, and those of metrics with the
    /// latest promtool; both take minutes to build
    #[arg(long)]
    long: bool,
    /// Places for tests that run at the same time; default: twice the number of processors
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    jobs: Option<u32>,
    /// Runs each test so many times, and says how often each has failed
    #[arg(long, value_name = "TIMES", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Also shows the output of tests that pass
    #[arg(long)]
    no_capture: bool,
    /// Keeps each processor busy meanwhile, to find tests that depend on chance
    #[arg(long)]
    busy: bool,
}

/// Limit on a test, far beyond the time of each; a soak has none.
const TIME_LIMIT: Duration = Duration::from_secs(900);

/// Variable with which random tests run longer.
const SOAK_VARIABLE: &str = "CPROXY_SOAK";

/// Seed of the property tests of an ordinary run, so that a change passes or fails by itself and not by what the day's
/// numbers find. Runs that look for rare failures have random ones.
const PROPERTY_SEED: (&str, &str) = ("PROPTEST_RNG_SEED", "20261127");

/// Places for each processor: tests wait for most of their time.
const PLACES_PER_PROCESSOR: u32 = 2;

/// Runs the tests and prints a summary.
pub(crate) fn run(arguments: &TestArguments) -> Result<ExitCode> {
    let start = Instant::now();
    let (selection, targets) = Selection::new(&arguments.words, &arguments.without, arguments.long, arguments.soak)?;
    let mut steps = steps(arguments);
    steps.next();
    let mut ahead = binaries::compile_ahead();
    if selection.is_all() {
        setup::beside(&mut ahead, || ())?;
    } else if needs_toolchain(&targets) {
        setup::for_building()?;
    }
    steps.next();
    let set_up = start.elapsed();
    let binaries = binaries::compile(&targets)?;
    let compiled = start.elapsed().saturating_sub(set_up);
    let times = Times::read();
    let tests = find(&binaries, &targets, &selection)?;
    let others = sweep::clear()?;
    steps.next();
    let begun = Instant::now();
    let mut runner = Runner::new(arguments, tests, times);
    runner.run(selection.is_all())?;
    let ran = begun.elapsed();
    for left in sweep::left_since(&others)? {
        println!("FAILED {left}");
        runner.outcomes.fail_test("leftovers", "leftovers", left);
    }
    arguments.without.iter().for_each(|suite| runner.outcomes.leave_out(suite));
    runner.times.write()?;
    let parts = [("setting up", set_up), ("compiling tests", compiled), ("running tests", ran)];
    let products = runner.products.times().map(|(need, time)| (need.title(), time));
    summary::print_times(&parts, products);
    let total = runner.outcomes.print(ran, is_coloured());
    Ok(if total.failed == 0 && total.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn steps(arguments: &TestArguments) -> Steps {
    let is_compiled = paths::target().join("debug/demo").exists();
    let tests_seconds = if arguments.words.is_empty() { 20 * 60 } else { 0 };
    Steps::new(
        "test",
        [
            Step::once("setting up this machine and compiling tests meanwhile", setup::is_ready_to_build(), 90),
            Step::once("compiling tests", is_compiled, 60),
            Step::new("running tests, and building the products of later ones meanwhile", tests_seconds),
        ],
    )
}

/// Whether anything embeds the programs; the pure crates and xtask do not.
fn needs_toolchain(targets: &Targets) -> bool {
    let needs =
        |package: &String| ["cproxy", "cproxy-datapath", "cproxy-manual", "cproxy-tests"].contains(&package.as_str());
    !targets.suites.is_empty() || targets.packages.iter().any(needs)
}

/// Whether the output is coloured: on a terminal, unless `NO_COLOR` is set.
fn is_coloured() -> bool {
    io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// A test, or the unit tests of a binary, which run as one process.
#[derive(Clone)]
struct Test {
    suite: &'static Suite,
    /// Its name, with the suite's.
    name: String,
    needs: Vec<Need>,
    class: Class,
    program: Program,
}

/// The program of a test.
#[derive(Clone)]
enum Program {
    One(TestBinary, String),
    /// All tests of a binary, or some.
    Several(TestBinary, Vec<String>),
    /// This program, with other arguments.
    Xtask(Vec<&'static str>),
}

/// The tests that are named in compiled binaries, and those that are no test binaries.
fn find(binaries: &[TestBinary], targets: &Targets, selection: &Selection) -> Result<Vec<Test>> {
    let mut listed = Vec::new();
    for binary in binaries {
        for test in binary.tests()? {
            listed.push((binary, binary.path_of(&test), test));
        }
    }
    let commands = commands(targets);
    let mut known: Vec<(&str, &str)> =
        listed.iter().map(|(binary, path, _)| (binary.suite.name, path.as_str())).collect();
    known.extend(commands.iter().map(|(suite, name, _)| (suite.name, *name)));
    let unknown = selection.unknown(&known);
    ensure!(
        unknown.is_empty(),
        "no test has the name {}; suites: {}",
        unknown.join(", "),
        suites::names().collect::<Vec<_>>().join(", ")
    );
    listed.retain(|(binary, path, _)| selection.names(binary.suite.name, path));
    let is_some_long = listed.iter().any(|(binary, path, _)| !selection.allows(binary.suite.name, path));
    listed.retain(|(binary, path, _)| selection.allows(binary.suite.name, path));
    let mut tests = Vec::new();
    for binary in binaries {
        let own: Vec<_> = listed.iter().filter(|(other, ..)| std::ptr::eq(*other, binary)).collect();
        match binary.suite.kind {
            _ if own.is_empty() => {}
            SuiteKind::Unit => tests.push(unit_tests(binary, &own, selection.is_all())),
            _ => tests.extend(own.iter().map(|(_, path, test)| Test {
                suite: binary.suite,
                name: format!("{}::{path}", binary.suite.name),
                needs: binary.suite.needs_of(path),
                class: binary.suite.class_of(path),
                program: Program::One(binary.clone(), test.clone()),
            })),
        }
    }
    let commands = commands.into_iter().filter(|(suite, name, _)| selection.names(suite.name, name));
    tests.extend(commands.map(|(suite, name, arguments)| Test {
        suite,
        name: format!("{}::{name}", suite.name),
        needs: suite.needs_of(name),
        class: suite.class_of(name),
        program: Program::Xtask(arguments),
    }));
    if !selection.is_long() {
        // The others take Debian's.
        tests.iter_mut().for_each(|test| test.needs.retain(|need| *need != Need::LatestPromtool));
    }
    let hint = if is_some_long { ": they take long, and run only with --long or --soak" } else { "" };
    ensure!(!tests.is_empty(), "none of these tests can run{hint}");
    Ok(tests)
}

fn unit_tests(binary: &TestBinary, own: &[&(&TestBinary, String, String)], is_all: bool) -> Test {
    let prefix = binary.prefix.as_deref().unwrap_or_default();
    let file = binary.file.file_name().unwrap_or_default().to_string_lossy();
    // A package may have a library and a program of one name; cargo's hash tells their files apart.
    let kind = if file.starts_with(&prefix.replace('-', "_")) { "" } else { "::bin" };
    let tests = if is_all { Vec::new() } else { own.iter().map(|(_, _, test)| test.clone()).collect() };
    let name = format!("{}::{prefix}{kind}", binary.suite.name);
    let (needs, class) = (binary.suite.needs_of(prefix), binary.suite.class_of(prefix));
    let program = Program::Several(binary.clone(), tests);
    Test { suite: binary.suite, name, needs, class, program }
}

/// Tests that this program itself runs: suite, name and arguments.
fn commands(targets: &Targets) -> Vec<(&'static Suite, &'static str, Vec<&'static str>)> {
    let mut commands = Vec::new();
    for suite in targets.suites.iter().filter_map(|name| suites::find(name)) {
        match suite.kind {
            SuiteKind::Fuzz => {
                let command = |target| (suite, target, vec!["fuzz", target, "--as-test"]);
                commands.extend(fuzz::targets().map(command));
            }
            SuiteKind::Size => commands.push((suite, "limits", vec!["size", "--as-test"])),
            SuiteKind::Unit | SuiteKind::Live => {}
        }
    }
    commands
}

/// An event that the runner waits for.
enum Event {
    Built(Product),
    AllBuilt,
    Ended(Box<Test>, Class, Result<Ended>),
}

/// Starts tests as their needs are built and places become free, and counts them.
struct Runner<'a> {
    arguments: &'a TestArguments,
    queue: Queue<Test>,
    products: Products,
    is_all_built: bool,
    running: u32,
    left: u32,
    times: Times,
    outcomes: Outcomes,
    shared: Option<SharedControlPlanes>,
}

impl<'a> Runner<'a> {
    fn new(arguments: &'a TestArguments, tests: Vec<Test>, times: Times) -> Self {
        let places = arguments.jobs.unwrap_or_else(|| processors() * PLACES_PER_PROCESSOR);
        let entry = |test: Test| {
            let seconds = times.of(&test.name).unwrap_or_else(|| f64::from(test.suite.seconds));
            Entry { class: test.class, seconds, test }
        };
        let repeated = tests.into_iter().flat_map(|test| (0..arguments.repeat).map(move |_| test.clone()));
        let entries: Vec<_> = repeated.map(entry).collect();
        let left = entries.len() as u32;
        let queue = Queue::new(entries, places);
        let (products, outcomes) = (Products::default(), Outcomes::default());
        Self { arguments, queue, products, is_all_built: false, running: 0, left, times, outcomes, shared: None }
    }

    /// Builds what is needed on a thread of its own, and runs all tests.
    fn run(&mut self, is_shipped: bool) -> Result<()> {
        let (sender, receiver) = mpsc::channel();
        let needs: BTreeSet<Need> = self.queue.waiting().flat_map(|test| test.needs.iter().copied()).collect();
        let missing = products::set_up(&needs);
        let built = sender.clone();
        thread::spawn(move || {
            // The receiver is gone when the tests have ended early.
            products::build(&needs, &missing, is_shipped, |product| drop(built.send(Event::Built(product))));
            drop(built.send(Event::AllBuilt));
        });
        let load = self.arguments.busy.then(BusyLoops::start);
        self.shared =
            SharedControlPlanes::wanted(&self.queue.waiting().map(|test| test.needs.as_slice()).collect::<Vec<_>>());
        while self.left > 0 {
            self.fail_what_cannot_run();
            while self.start_next(&sender)? {}
            if self.left > 0 {
                self.handle(receiver.recv().context("waiting for tests")?);
            }
        }
        drop(load);
        self.shared = None;
        Ok(())
    }

    /// Fails the tests whose products could not be built.
    fn fail_what_cannot_run(&mut self) {
        let products = &self.products;
        for test in self.queue.remove(|test| products.failure(&test.needs).is_some()) {
            self.left -= 1;
            let reason = self.products.failure(&test.needs).unwrap_or_default().to_owned();
            println!("FAILED {} cannot run: {reason}", test.name);
            self.outcomes.fail_test(test.suite.name, &test.name, reason);
        }
    }

    /// Starts the next test on a thread of its own. False if none can start now.
    fn start_next(&mut self, sender: &mpsc::Sender<Event>) -> Result<bool> {
        let products = &self.products;
        let readiness = |test: &Test| match products.variables(&test.needs) {
            Some(_) => Readiness::Ready,
            None => Readiness::Pending,
        };
        let Some((test, class)) = self.queue.next(readiness, self.is_all_built) else { return Ok(false) };
        if class == Class::Exclusive {
            // Their servers have work to do, even if no test uses them.
            self.shared = None;
        }
        let variables = self.products.variables(&test.needs).context("a test that is not ready")?;
        let mut command = test.command(&variables.map_err(|reason| anyhow!("{reason}"))?)?;
        if self.arguments.soak {
            command.env(SOAK_VARIABLE, "1");
        }
        let searches = self.arguments.soak || self.arguments.long || self.arguments.repeat > 1;
        if !searches && env::var_os(PROPERTY_SEED.0).is_none() {
            command.env(PROPERTY_SEED.0, PROPERTY_SEED.1);
        }
        command.envs(self.shared.iter().filter_map(|shared| shared.variable(&test.needs)));
        let limit = (!self.arguments.soak && !self.arguments.long).then_some(TIME_LIMIT);
        self.running += 1;
        // Each repetition has a log of its own.
        let log = if self.arguments.repeat > 1 { format!("{}-{}", test.name, self.left) } else { test.name.clone() };
        let sender = sender.clone();
        thread::spawn(move || {
            let ended = test.check_machine().and_then(|()| job::run(&mut command, &test.program.work(), &log, limit));
            drop(sender.send(Event::Ended(Box::new(test), class, ended)));
        });
        Ok(true)
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Built(product) => {
                let start = self.shared.as_mut().map_or(Ok(()), |shared| shared.start_after(&product));
                if let Err(error) = start {
                    println!("tests start their own control planes: {error:#}");
                    self.shared = None;
                }
                self.products.add(product);
            }
            Event::AllBuilt => self.is_all_built = true,
            Event::Ended(test, class, ended) => {
                self.queue.end(class);
                (self.running, self.left) = (self.running - 1, self.left - 1);
                match ended {
                    Ok(ended) => self.end(&test, &ended),
                    Err(error) => {
                        println!("FAILED {}: {error:#}", test.name);
                        self.outcomes.fail_test(test.suite.name, &test.name, format!("{error:#}"));
                    }
                }
            }
        }
    }

    fn end(&mut self, test: &Test, ended: &Ended) {
        let is_passed = ended.counts.failed == 0;
        let verdict = if is_passed { "ok    " } else { "FAILED" };
        let left = format!("{} left, {} running", self.left, self.running);
        println!("{verdict} {:>6.1} s  {}  ({left})", ended.elapsed.as_secs_f64(), test.name);
        if !is_passed || self.arguments.no_capture || test.suite.shows_output() {
            println!("---- output of {}, whole in {} ----", test.name, ended.log.display());
            print!("{}", job::tail(&ended.log));
            println!("---- {} ----", ended.note.as_deref().unwrap_or("end of the output"));
        }
        if is_passed {
            self.times.record(&test.name, ended.elapsed);
        }
        self.outcomes.add(test.suite.name, &test.name, ended);
    }
}

/// Threads that keep each processor busy until this is dropped.
struct BusyLoops(Arc<AtomicBool>);

impl BusyLoops {
    fn start() -> Self {
        let is_done = Arc::new(AtomicBool::new(false));
        for _ in 0..processors() {
            let is_done = Arc::clone(&is_done);
            thread::spawn(move || while !is_done.load(Ordering::Relaxed) {});
        }
        Self(is_done)
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn processors() -> u32 {
    thread::available_parallelism().map_or(1, |number| number.get() as u32)
}

impl Test {
    fn check_machine(&self) -> Result<()> {
        if self.suite.kind == SuiteKind::Live { products::check_machine() } else { Ok(()) }
    }

    fn command(&self, variables: &Variables) -> Result<Command> {
        let mut command = match &self.program {
            Program::One(binary, _) | Program::Several(binary, _) => {
                let mut command = Command::new(&binary.file);
                command.current_dir(&binary.directory).env("CARGO_MANIFEST_DIR", &binary.directory);
                command
            }
            Program::Xtask(arguments) => {
                let mut command = Command::new(env::current_exe().context("the path of this program")?);
                command.args(arguments);
                command
            }
        };
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        Ok(command)
    }
}

impl Program {
    fn work(&self) -> Work {
        match self {
            Self::One(_, test) => Work::Test(test.clone()),
            Self::Several(_, tests) => Work::Tests(tests.clone()),
            Self::Xtask(_) => Work::Command,
        }
    }
}
