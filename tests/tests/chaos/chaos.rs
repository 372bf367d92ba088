//! One episode: its steps, and the checks after each.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cproxy_tests::{
    process::{cproxy, eventually},
    random::Random,
    sandbox::Sandbox,
    storm::{Storm, addresses::SERVICES},
    world::counter,
};
use serde_json::Value;

use crate::{
    PATIENCE,
    agents::Agents,
    machine,
    objects::{self, Change, Objects},
    script::{Action, Step, Trouble},
    source::Source,
};

/// Limit on the time until the agent has what the API server has. It takes minutes to notice that etcd was restored.
const RECOVERY_MAX: Duration = Duration::from_secs(240);

/// Connects before an upgrade, and after it in a run of its own.
const CONNECTS_BESIDE_UPGRADE: u64 = 2_000;

/// Time between two ends of the agent's connection. A watch that has lasted less than a second is resumed later, and a
/// server without room refuses only requests that come together.
const CUT_INTERVAL: Duration = Duration::from_secs(3);

/// Everything that a script changes.
pub(crate) struct Chaos<'s> {
    sandbox: &'s Sandbox,
    storm: &'s Storm,
    // Ends before the source does.
    agents: Agents<'s>,
    source: Source<'s>,
    objects: Objects<'s>,
    /// Whether somebody has disturbed a hook.
    is_out: Arc<AtomicBool>,
    faults: BTreeMap<String, u64>,
    /// Most places for TCP sockets that there were at a check.
    places_max: u64,
}

impl<'s> Chaos<'s> {
    /// Starts with the present agent or an older one, by its index, and a table that is complete.
    pub(crate) fn start(
        sandbox: &'s Sandbox,
        source: Source<'s>,
        storm: &'s Storm,
        first: Option<usize>,
        random: &mut Random,
    ) -> Self {
        let objects = Objects::create(sandbox, storm, &source, random);
        let agents = Agents::start(sandbox, storm, &source, first);
        let faults = BTreeMap::new();
        Self { sandbox, storm, agents, source, objects, is_out: Arc::default(), faults, places_max: 0 }
    }

    /// Whether somebody has disturbed a hook.
    pub(crate) fn is_out(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_out)
    }

    pub(crate) fn faults(&self) -> &BTreeMap<String, u64> {
        &self.faults
    }

    pub(crate) fn places_max(&self) -> u64 {
        self.places_max
    }

    /// Waits for connects before or after an upgrade, unless the workload fails.
    pub(crate) fn wait_for_connects(&self) {
        let least = self.storm.connects() + CONNECTS_BESIDE_UPGRADE;
        eventually(PATIENCE, "the workload runs", || match self.storm.connects() {
            few if few < least && !self.storm.has_failed() => Err(few),
            _ => Ok(()),
        });
    }

    /// Replaces an older agent by the present one under load, while objects change. One may be killed on the way.
    pub(crate) fn upgrade(&mut self, is_killed: bool, random: &mut Random) {
        self.wait_for_connects();
        eprintln!("upgrade");
        self.count("Upgrade");
        self.agents.end(random);
        self.objects.make(Change::Shift, &objects::ALL, &self.source, false, random);
        self.agents.upgrade(is_killed, random);
        self.settle(random);
    }

    /// Plays steps to their end, unless the workload fails.
    pub(crate) fn play(&mut self, steps: &[Step], random: &mut Random) {
        let started = Instant::now();
        for (number, step) in steps.iter().enumerate() {
            if self.storm.has_failed() {
                return;
            }
            let (number, time) = (number + 1, started.elapsed());
            eprintln!(
                "{time:.0?}, step {number} of {}, after {} connects: {step:?}",
                steps.len(),
                self.storm.connects()
            );
            self.step(step, random);
        }
    }

    fn count(&mut self, fault: impl std::fmt::Debug) {
        *self.faults.entry(format!("{fault:?}").replace('"', "")).or_default() += 1;
    }

    fn step(&mut self, step: &Step, random: &mut Random) {
        if let Some(trouble) = step.trouble {
            self.count(trouble);
            self.begin(trouble, random);
        }
        for action in &step.actions {
            self.count(action);
            self.act(*action, step.trouble, random);
        }
        if let Some(trouble) = step.trouble {
            thread::sleep(Duration::from_millis(step.trouble_ms));
            self.source.cluster().end(trouble);
        }
        if step.has_signal {
            machine::change_network(self.sandbox, random);
        }
        self.settle(random);
    }

    /// Begins a trouble. Where that can be seen at once, the agent has met it.
    fn begin(&mut self, trouble: Trouble, random: &mut Random) {
        if trouble == Trouble::EtcdRestored {
            self.source.cluster().back_up();
            let snapshot = self.objects.snapshot();
            self.objects.change_often(&self.source, random);
            self.objects.wait();
            self.objects.return_to(&snapshot);
        }
        let cluster = self.source.cluster();
        cluster.begin(trouble);
        let failures = |log: &str| log.matches("cannot watch").count() + log.matches("cannot list").count();
        let before = failures(&self.agents.running().log());
        if trouble.is_noticed() {
            let mut next_cut = Instant::now();
            self.agents.running().wait_until(PATIENCE, "the agent has met the trouble", |agent| {
                if failures(&agent.log()) > before {
                    return Ok(());
                }
                if Instant::now() >= next_cut {
                    cluster.cut();
                    next_cut = Instant::now() + CUT_INTERVAL;
                }
                Err("not yet")
            });
        }
    }

    fn act(&mut self, action: Action, trouble: Option<Trouble>, random: &mut Random) {
        let (services, can_change) = (services(random), trouble.is_none_or(Trouble::leaves_server));
        let mut make = |change, can_follow, random: &mut Random| {
            self.objects.make(change, &services, &self.source, can_follow, random);
        };
        match action {
            Action::Change(change) => make(change, trouble.is_none(), random),
            Action::Kill | Action::KillBusy => {
                if action == Action::KillBusy {
                    make(Change::Shift, false, random);
                    objects::pause(random);
                }
                self.agents.kill();
                if can_change {
                    make(Change::Shift, false, random);
                }
                self.agents.start_next();
            }
            Action::Restart => {
                self.agents.stop();
                self.agents.start_next();
            }
            Action::KernelFault => {
                let mut own = random.clone();
                self.agents.start_with_fault(random, || {
                    [Change::Grow, Change::Shift].into_iter().for_each(|change| make(change, false, &mut own));
                });
            }
            Action::Older => self.agents.try_older(),
            Action::Reseed => {
                let is_ready = self.agents.running().is_ready();
                let output = cproxy(self.sandbox, &["reseed"]);
                // An agent that starts may not listen yet.
                assert!(!is_ready || output.code == 0, "{output:?}");
            }
            Action::Hangup => self.agents.hang_up(random),
            Action::Mptcp => machine::take_places(),
            Action::Cgroups => machine::use_cgroups(self.sandbox),
            Action::Network => machine::change_network(self.sandbox, random),
            Action::Detach => self.disturb_hook(random),
        }
    }

    /// Disturbs a hook, and waits until the agent has put it back.
    fn disturb_hook(&mut self, random: &mut Random) {
        // A flow from before the outage may go on with a backend that terminates, as no new one may: none does.
        self.objects.make(Change::Replace, &objects::ALL, &self.source, false, random);
        self.settle_without_change();
        self.objects.begin_outage();
        self.is_out.store(true, Ordering::SeqCst);
        let (sandbox, repairs) = (self.sandbox, || counter(self.sandbox, "hook_repairs"));
        let before = repairs();
        machine::disturb_hook(sandbox, random);
        machine::change_network(sandbox, random);
        self.agents.running().wait_until(PATIENCE, "the hook is put back", |_| match repairs() {
            now if now > before => Ok(()),
            now => Err(now),
        });
        self.objects.end_outage();
        self.objects.confirm();
        self.is_out.store(false, Ordering::SeqCst);
    }

    /// Waits until the table is what the API server's objects give, a last change included.
    fn settle(&mut self, random: &mut Random) {
        let service = random.below(SERVICES);
        self.objects.make(Change::Shift, &[service], &self.source, false, random);
        self.settle_without_change();
    }

    fn settle_without_change(&mut self) {
        let wanted = self.source.resolved();
        let sandbox = self.sandbox;
        self.agents.running().wait_until(RECOVERY_MAX, "the table is what the objects give", |_| {
            let output = cproxy(sandbox, &["get", "services", "-o", "json"]);
            if output.code != 0 {
                // An older agent was killed, and its table is not taken over yet.
                return Err(output.stderr);
            }
            let table = output.json();
            if table == wanted { Ok(()) } else { Err(difference(&table, &wanted)) }
        });
        self.agents.wait_ready();
        self.objects.wait();
        self.objects.confirm();
        self.agents.check();
        self.places_max = self.places_max.max(counter(sandbox, "tcp_places_room"));
    }
}

/// Some Services, at least one.
fn services(random: &mut Random) -> Vec<usize> {
    let mut services = random.some(&objects::ALL, SERVICES / 2);
    if services.is_empty() {
        services.push(random.below(SERVICES));
    }
    services
}

/// The first row that only one of two tables has.
fn difference(table: &Value, wanted: &Value) -> String {
    let rows = |table: &Value| table.as_array().cloned().unwrap_or_default();
    let (table, wanted) = (rows(table), rows(wanted));
    let only = |one: &[Value], other: &[Value]| one.iter().find(|row| !other.contains(row)).map(Value::to_string);
    format!(
        "{} rows instead of {}; only in the table: {:?}; only in the objects: {:?}",
        table.len(),
        wanted.len(),
        only(&table, &wanted),
        only(&wanted, &table)
    )
}
