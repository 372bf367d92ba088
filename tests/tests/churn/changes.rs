//! Changes during the storm: the manifests, and the agent that follows them.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use cproxy_tests::{
    faults::{Injection, TracedAgent},
    manifest,
    process::{Agent, RunningAgent, cproxy_binary},
    random::{self, Random},
    sandbox::Sandbox,
    storm::{
        Storm,
        addresses::{self, CROWD_FRONTENDS, CROWD_LARGEST, FRONTENDS, SERVICES},
        kernel,
        sets::{MANY, Sets},
    },
};

/// Limit on the start of the agent.
const PATIENCE: Duration = Duration::from_secs(60);

/// Probability in percent, and limit on the number of backends, of a Service's random sets.
const SIZES: &[(usize, u32)] = &[(60, 5), (25, 100), (15, MANY)];

/// Limit on the number of crowds of other Services.
const CROWDS: usize = 6;
const CROWDS_IN_SOAK: usize = 16;

/// Number of sets of a Service in [`Change::Hurry`], and the longest life of each.
const HURRIED: usize = 30;
const HURRY: Duration = Duration::from_millis(30);

#[derive(Clone, Copy, Debug)]
enum Change {
    /// Some Services get entirely different backends.
    Replace,
    /// Some Services lose some backends, at once or after their termination, and get new or former ones.
    Shift,
    /// A Service goes from one backend to a thousand and back.
    Scale,
    /// Services are deleted and come back at the same address.
    Recreate,
    /// The same without waiting in between.
    RecreateAtOnce,
    /// Another Service takes over the address at once.
    Rename,
    /// Another Service claims the same address, and then the first one goes.
    Inherit,
    /// All Services change faster than clients connect, so that freed sets are reused at once.
    Hurry,
    /// Other Services are added.
    Grow,
    /// Other Services are removed.
    Shrink,
    /// The agent is killed, changes happen, and a new agent starts.
    Kill,
    /// The agent is killed in the middle of a change.
    KillBusy,
    /// The agent ends and a new one starts.
    Restart,
}

/// Each change once, in any order.
const ALL: [Change; 13] = [
    Change::Replace,
    Change::Shift,
    Change::Scale,
    Change::Recreate,
    Change::RecreateAtOnce,
    Change::Rename,
    Change::Inherit,
    Change::Hurry,
    Change::Grow,
    Change::Shrink,
    Change::Kill,
    Change::KillBusy,
    Change::Restart,
];

/// Counts of changes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Made {
    changes: usize,
    frontends_most: usize,
    killed: usize,
    restarted: usize,
}

impl fmt::Display for Made {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { changes, frontends_most, killed, restarted } = self;
        write!(f, "{changes} changes, up to {frontends_most} frontends, agent killed {killed}, restarted {restarted}")
    }
}

pub(crate) struct Changes<'s> {
    sandbox: &'s Sandbox,
    storm: &'s Storm,
    random: Random,
    /// The agent's program.
    binary: PathBuf,
    agent: RunningAgent,
    /// Index of each Service's current name.
    names: [usize; SERVICES],
    crowds: usize,
    made: Made,
}

impl<'s> Changes<'s> {
    /// Starts an agent of this program, with a table that is complete in the kernel.
    pub(crate) fn start(sandbox: &'s Sandbox, storm: &'s Storm, random: Random, binary: &Path) -> Self {
        let binary = binary.to_owned();
        let agent = agent(sandbox, storm, &binary).start();
        let (names, made) = ([0; SERVICES], Made::default());
        let mut changes = Self { sandbox, storm, random, binary, agent, names, crowds: 0, made };
        changes.agent.wait_ready(PATIENCE);
        changes.each(&all_services(), Self::replace);
        changes
    }

    pub(crate) fn made(&self) -> Made {
        self.made
    }

    /// Makes every kind of change, unless a connect fails.
    pub(crate) fn make_each_once(&mut self) {
        for change in self.random.shuffled(&ALL) {
            if self.storm.has_failed() {
                break;
            }
            eprintln!("{change:?} after {} connects", self.storm.connects());
            self.make(change);
            self.made.changes += 1;
        }
    }

    /// Lets the present agent take over from an older one, perhaps after one that has a fault.
    pub(crate) fn upgrade(&mut self, injection: Injection) {
        assert!(self.agent.stop().success(), "SIGTERM is a clean end");
        self.binary = cproxy_binary();
        all_services().into_iter().for_each(|service| self.shift(service));
        let agent = agent(self.sandbox, self.storm, &self.binary);
        let mut agent = TracedAgent::start_agent(self.sandbox, agent, Some(injection));
        agent.settle();
        agent.kill();
        self.start_again();
        self.wait(&all_services());
    }

    fn make(&mut self, change: Change) {
        let services = self.some_services();
        match change {
            Change::Replace => self.each(&services, Self::replace),
            Change::Shift => self.each(&services, Self::shift),
            Change::Scale => {
                self.each(&services, |changes, service| changes.resize(service, 1));
                self.each(&services, |changes, service| changes.resize(service, MANY));
                self.each(&services, |changes, service| changes.resize(service, 1));
            }
            Change::Recreate => {
                self.each(&services, Self::delete);
                self.each(&services, Self::replace);
            }
            Change::RecreateAtOnce => {
                services.iter().for_each(|service| self.delete(*service));
                self.each(&services, Self::replace);
            }
            Change::Rename => self.each(&services, |changes, service| {
                changes.names[service] ^= 1;
                changes.shift(service);
            }),
            Change::Inherit => self.inherit(&services),
            Change::Hurry => {
                for _ in 1..HURRIED {
                    (0..SERVICES).for_each(|service| self.replace(service));
                    self.pause(HURRY);
                }
                self.each(&all_services(), Self::replace);
            }
            Change::Grow => self.crowd(if random::is_soak() { CROWDS_IN_SOAK } else { CROWDS }),
            Change::Shrink => {
                let fewer = self.random.below(self.crowds.max(1));
                self.crowd(fewer);
            }
            Change::Kill => self.kill_and_shift(&services),
            Change::KillBusy => {
                services.iter().for_each(|service| self.shift(*service));
                self.pause(HURRY);
                self.kill_and_shift(&services);
            }
            Change::Restart => {
                assert!(self.agent.stop().success(), "SIGTERM is a clean end");
                self.start_again();
                self.made.restarted += 1;
                self.wait(&[]);
            }
        }
    }

    fn some_services(&mut self) -> Vec<usize> {
        let mut services = self.random.some(&all_services(), SERVICES / 2);
        if services.is_empty() {
            services.push(self.random.below(SERVICES));
        }
        services
    }

    /// Changes Services and waits for all of them in the kernel.
    fn each(&mut self, services: &[usize], change: impl Fn(&mut Self, usize)) {
        services.iter().for_each(|service| change(self, *service));
        self.wait(services);
    }

    fn replace(&mut self, service: usize) {
        let sets = self.sets();
        sets.replace(service, &mut self.random);
        self.write(service, &file(service));
    }

    fn shift(&mut self, service: usize) {
        let sets = self.sets();
        sets.shift(service, &mut self.random);
        self.write(service, &file(service));
    }

    fn resize(&mut self, service: usize, count: u32) {
        self.sets().resize(service, count);
        self.write(service, &file(service));
    }

    fn sets(&self) -> Sets<'s> {
        Sets { history: &self.storm.history, sizes: SIZES }
    }

    fn write(&self, service: usize, file: &str) {
        let objects = addresses::objects(service, self.names[service], self.sets().latest(service));
        manifest::write(&self.sandbox.manifest_dir(), file, objects);
    }

    /// Lets another Service claim the address. The name decides which claim comes first, so the heir is in force either
    /// at once or when the other Service goes.
    fn inherit(&mut self, services: &[usize]) {
        let heir = |service: &usize| format!("heir-{service}.json");
        for &service in services {
            self.names[service] ^= 1;
            self.sets().follow(service);
            self.write(service, &heir(&service));
        }
        kernel::wait_until_contested(self.sandbox, &self.binary);
        for service in services {
            self.write(*service, &file(*service));
            fs::remove_file(self.sandbox.manifest_dir().join(heir(service))).unwrap();
        }
        self.wait(services);
    }

    fn delete(&mut self, service: usize) {
        self.storm.history.announce(service, None);
        fs::remove_file(self.sandbox.manifest_dir().join(file(service))).unwrap();
    }

    fn crowd(&mut self, crowds: usize) {
        let directory = self.sandbox.manifest_dir();
        let file = |crowd: usize| format!("crowd-{crowd}.json");
        for crowd in crowds..self.crowds {
            fs::remove_file(directory.join(file(crowd))).unwrap();
        }
        for crowd in self.crowds..crowds {
            manifest::write(&directory, &file(crowd), addresses::crowd(crowd, CROWD_LARGEST));
        }
        self.crowds = crowds;
        self.wait(&[]);
    }

    fn pause(&mut self, most: Duration) {
        thread::sleep(most * self.random.below(1_000) as u32 / 1_000);
    }

    fn kill_and_shift(&mut self, services: &[usize]) {
        self.agent.kill();
        self.made.killed += 1;
        services.iter().for_each(|service| self.shift(*service));
        self.start_again();
        self.wait(services);
    }

    fn start_again(&mut self) {
        self.agent = agent(self.sandbox, self.storm, &self.binary).start();
        self.agent.wait_ready(PATIENCE);
    }

    /// Waits until the kernel has the last written state.
    fn wait(&mut self, services: &[usize]) {
        let history = &self.storm.history;
        let wanted: Vec<_> = services.iter().map(|&service| (service, history.latest(service))).collect();
        let present = (0..SERVICES).filter(|service| history.latest(*service).is_some()).count();
        let frontends = present * FRONTENDS + self.crowds * CROWD_FRONTENDS;
        kernel::wait(self.sandbox, &self.binary, &wanted, frontends);
        services.iter().for_each(|service| history.confirm(*service));
        self.made.frontends_most = self.made.frontends_most.max(frontends);
    }
}

fn all_services() -> [usize; SERVICES] {
    std::array::from_fn(|service| service)
}

fn file(service: usize) -> String {
    format!("web-{service}.json")
}

/// The next agent. Every other one closes no sockets: backends that have left their Service still answer.
fn agent<'s>(sandbox: &'s Sandbox, storm: &Storm, binary: &Path) -> Agent<'s> {
    let agent = Agent::new(sandbox).binary(binary).manifests(sandbox.manifest_dir());
    if storm.next_agent_closes() { agent } else { agent.args(["--terminate-sockets", "none"]) }
}
