//! Products that tests need: built in the background, one after the other, while tests that need none of them run.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};

use super::{job::Variables, suites::Need};
use crate::{
    binary::{AGENT, Binary, Program, RELAY},
    debian, dist,
    fleet::FleetFiles,
    fuzz::Fuzzer,
    kernels, older,
    releases::{
        CONTROLLERS, E2E, HELM, KUBERNETES, NETPOL_PROVIDER, OLDEST_KUBERNETES, POLICY_ENGINES, PROMETHEUS, Release,
    },
    run, setup, sweep, vm,
};

/// Variable with the path of this program, for tests of images and releases.
const XTASK_VARIABLE: &str = "CPROXY_XTASK";

/// Variable with an archive of init systems, for tests of their service files.
const INIT_SYSTEMS_VARIABLE: &str = "CPROXY_INIT_SYSTEMS";

/// A product, or why there is none.
type Built<T> = Result<T, String>;

/// The reason as text, which can be given to several tests.
fn into_built<T>(result: Result<T>) -> Built<T> {
    result.map_err(|error| format!("{error:#}"))
}

/// A product that is built, or cannot be.
pub(super) struct Product {
    pub(super) need: Need,
    /// By which tests find it.
    pub(super) variables: Built<Variables>,
    pub(super) elapsed: Duration,
}

/// Products that are built so far.
#[derive(Default)]
pub(super) struct Products {
    built: BTreeMap<Need, Product>,
}

impl Products {
    pub(super) fn add(&mut self, product: Product) {
        self.built.insert(product.need, product);
    }

    /// The variables of a test that needs these; None while one is missing.
    pub(super) fn variables(&self, needs: &[Need]) -> Option<Built<Variables>> {
        let mut variables = Variables::new();
        for need in needs {
            match &self.built.get(need)?.variables {
                Ok(own) => variables.extend(own.iter().cloned()),
                Err(reason) => return Some(Err(reason.clone())),
            }
        }
        Some(Ok(variables))
    }

    /// Whether one of these cannot be built.
    pub(super) fn failure(&self, needs: &[Need]) -> Option<&str> {
        needs.iter().find_map(|need| self.built.get(need)?.variables.as_ref().err()).map(String::as_str)
    }

    /// Each product and the time that it took, in the order of building.
    pub(super) fn times(&self) -> impl Iterator<Item = (Need, Duration)> {
        self.built.values().map(|product| (product.need, product.elapsed))
    }
}

/// A part of the setup, and the need that it is for.
type Part = (Need, fn() -> Result<()>);

/// Installs the packages that tests need. Returns the needs whose packages could not be installed, and why.
pub(super) fn set_up(needs: &BTreeSet<Need>) -> BTreeMap<Need, String> {
    let mut missing = BTreeMap::new();
    let parts: [Part; 5] = [
        (Need::ControlPlane, setup::for_cluster),
        (Need::Guests, setup::for_guests),
        (Need::Images, setup::for_image_tests),
        (Need::Packages, setup::for_dist_tests),
        (Need::Programs, setup::for_programs),
    ];
    for (need, set_up) in parts {
        let is_needed = needs.contains(&need);
        if let Some(Err(reason)) = is_needed.then(|| into_built(set_up())) {
            missing.insert(need, reason);
        }
    }
    missing
}

/// Fails where no test with a sandbox can run.
pub(super) fn check_machine() -> Result<()> {
    run::require_root("these tests")?;
    ensure!(sweep::has_cgroup2(), "no cgroup2 is mounted: mount it at /sys/fs/cgroup");
    Ok(())
}

/// Builds what is needed, each as soon as possible, what most tests wait for first. `missing` are needs whose packages
/// could not be installed. `is_shipped`: the agent and the relay of all tests are those of a release.
///
/// Go's programs are built beside cargo's: optimising a whole program keeps one processor busy for minutes.
pub(super) fn build(
    needs: &BTreeSet<Need>,
    missing: &BTreeMap<Need, String>,
    is_shipped: bool,
    done: impl Fn(Product) + Clone + Send,
) {
    let (of_go, of_cargo): (Vec<Need>, Vec<Need>) =
        order(needs, is_shipped).into_iter().partition(|need| need.is_of_go());
    let build_all = |needs: Vec<Need>, done: &dyn Fn(Product)| {
        let mut builder = Builder::default();
        for need in needs {
            let start = Instant::now();
            let variables = match missing.get(&need) {
                Some(reason) => Err(reason.clone()),
                None => into_built(builder.build(need, is_shipped)),
            };
            done(Product { need, variables, elapsed: start.elapsed() });
        }
    };
    let build_all = &build_all;
    thread::scope(|scope| {
        let go_done = done.clone();
        scope.spawn(move || {
            run::lower_priority();
            build_all(of_go, &go_done);
        });
        run::lower_priority();
        build_all(of_cargo, &done);
    });
}

/// Needs in the order of building: the agent, what is there already, and then in the order of the type, which is that
/// of the number of tests that wait.
fn order(needs: &BTreeSet<Need>, is_shipped: bool) -> Vec<Need> {
    let mut order: Vec<Need> = needs.iter().copied().collect();
    order.sort_by_key(|need| match need {
        Need::Agent => 0,
        // They are the same program then.
        Need::ShippedAgent if is_shipped => 0,
        Need::Programs | Need::Images => 1,
        Need::OlderAgents if older::is_built() => 1,
        _ => 2,
    });
    order
}

/// Programs that several products are made of.
#[derive(Default)]
struct Builder {
    agent: Option<Built<Binary>>,
    relay: Option<Built<Binary>>,
}

impl Builder {
    fn build(&mut self, need: Need, is_shipped: bool) -> Result<Variables> {
        match need {
            Need::Agent if !is_shipped => fast(&AGENT),
            Need::Relay if !is_shipped => fast(&RELAY),
            Need::Agent | Need::ShippedAgent => Ok(one(AGENT.variable, self.agent()?.shipped)),
            Need::Relay | Need::ShippedRelay => Ok(one(RELAY.variable, self.relay()?.shipped)),
            Need::OlderAgents => Ok(one(older::VARIABLE, older::ensure()?)),
            Need::ControlPlane => release(&KUBERNETES),
            Need::Helm => release(&HELM),
            Need::OldestControlPlane => release(&OLDEST_KUBERNETES),
            Need::LatestPromtool => release(&PROMETHEUS),
            Need::PolicyEngines => release(&POLICY_ENGINES),
            Need::Netpol => {
                let releases = [release(&CONTROLLERS)?, release(&E2E)?, release(&NETPOL_PROVIDER)?];
                Ok(releases.into_iter().flatten().collect())
            }
            Need::Images => {
                let mut variables = one(INIT_SYSTEMS_VARIABLE, kernels::init_systems().context("no init systems")?);
                variables.extend(this_program()?);
                Ok(variables)
            }
            Need::Packages => {
                let release = dist::for_tests(&self.agent()?, &self.relay()?)?;
                let mut variables = one(dist::VARIABLE, release);
                variables.extend(one(debian::VARIABLE, debian::root()?));
                variables.extend(one(INIT_SYSTEMS_VARIABLE, kernels::init_systems().context("no init systems")?));
                variables.extend(this_program()?);
                Ok(variables)
            }
            Need::Guests => {
                let guests = vm::GuestFiles::for_tests(&self.agent()?.shipped)?;
                let kernel = vm::GuestFiles::kernel()?;
                Ok(set_by(|command| guests.set_variables(command, &kernel)))
            }
            Need::Fleet => {
                let files = FleetFiles::new(&self.agent()?.shipped, &self.relay()?.shipped)?;
                let kernel = vm::GuestFiles::kernel()?;
                Ok(set_by(|command| files.set_variables(command, &kernel)))
            }
            Need::Fuzzer => Fuzzer::build_logged().map(|_| Variables::new()),
            // The programs are packages.
            Need::Programs => Ok(Variables::new()),
        }
    }

    fn agent(&mut self) -> Result<Binary> {
        program(&AGENT, &mut self.agent)
    }

    fn relay(&mut self) -> Result<Binary> {
        program(&RELAY, &mut self.relay)
    }
}

/// A shipped program, built once.
fn program(program: &Program, built: &mut Option<Built<Binary>>) -> Result<Binary> {
    let built = built.get_or_insert_with(|| into_built(program.build_logged()));
    built.clone().map_err(|reason| anyhow!("{reason}"))
}

/// A program for tests in which its size and speed do not matter, which cargo builds again in seconds.
fn fast(program: &Program) -> Result<Variables> {
    let mut command = run::cargo();
    command.args(["build", "--workspace", "--bin", program.name]);
    let file = run::executables(&mut command)?.remove(program.name);
    Ok(one(program.variable, file.with_context(|| format!("cargo names no file of {}", program.name))?))
}

fn release(release: &Release) -> Result<Variables> {
    Ok(one(release.variable, release.ensure()?))
}

fn one(name: &str, value: impl Into<PathBuf>) -> Variables {
    vec![(name.into(), value.into().into_os_string())]
}

/// The variables that a function sets for a command.
fn set_by(set: impl FnOnce(&mut Command)) -> Variables {
    let mut command = Command::new("true");
    set(&mut command);
    command.get_envs().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned()))).collect()
}

fn this_program() -> Result<Variables> {
    let this: PathBuf = env::current_exe().context("the path of this program")?;
    Ok(one(XTASK_VARIABLE, Path::new(&this)))
}
