//! One episode: its steps, and the checks after each.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use cproxy_tests::{
    process::{cproxy, eventually},
    random::Random,
    sandbox::Sandbox,
    storm::{Storm, addresses::SERVICES},
    world::{counter, rows},
};
use serde_json::Value;

use crate::{
    PATIENCE,
    agents::Agents,
    cluster::Cluster,
    machine,
    objects::Objects,
    script::{self, Action, Step, Trouble},
};

/// Limit on the time until the agent has what the API server has. It takes minutes to notice that etcd was restored.
const RECOVERY_MAX: Duration = Duration::from_secs(240);

/// Connects before the upgrade.
const CONNECTS_BEFORE: u64 = 2_000;

/// Pause between two attempts to end the agent's connection.
const CUT_PAUSE: Duration = Duration::from_millis(500);

/// Everything that a script changes.
pub(crate) struct Chaos<'s> {
    sandbox: &'s Sandbox,
    storm: &'s Storm,
    // Ends before the cluster does.
    agents: Agents<'s>,
    cluster: Cluster<'s>,
    objects: Objects<'s>,
    /// Whether somebody has disturbed a hook.
    is_out: &'s AtomicBool,
    faults: BTreeMap<String, u64>,
}

impl<'s> Chaos<'s> {
    /// Starts with an agent of an older layout, and a table that is complete.
    pub(crate) fn start(
        sandbox: &'s Sandbox,
        cluster: Cluster<'s>,
        storm: &'s Storm,
        is_out: &'s AtomicBool,
        random: &mut Random,
    ) -> Self {
        let objects = Objects::create(storm, &cluster.writer, random);
        let agents = Agents::start_older(sandbox, storm, cluster.kubeconfig(), random);
        Self { sandbox, storm, agents, cluster, objects, is_out, faults: BTreeMap::new() }
    }

    pub(crate) fn faults(&self) -> &BTreeMap<String, u64> {
        &self.faults
    }

    /// Plays the script to its end, unless the workload fails.
    pub(crate) fn play(&mut self, random: &mut Random) {
        let started = Instant::now();
        eventually(PATIENCE, "the workload runs", || match self.storm.connects() {
            CONNECTS_BEFORE.. => Ok(()),
            _ if self.storm.has_failed() => Ok(()),
            few => Err(few),
        });
        eprintln!("upgrade");
        self.count("Upgrade");
        self.agents.upgrade(random);
        self.settle(random);
        let steps = script::steps(random);
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
            self.act(*action, random);
        }
        if let Some(trouble) = step.trouble {
            thread::sleep(Duration::from_millis(step.trouble_ms));
            self.cluster.end(trouble);
        }
        if step.has_signal {
            machine::change_network(self.sandbox, random);
        }
        self.settle(random);
    }

    /// Begins a trouble. Where that can be seen at once, the agent has met it.
    fn begin(&mut self, trouble: Trouble, random: &mut Random) {
        if trouble == Trouble::EtcdRestored {
            self.cluster.back_up();
            let snapshot = self.objects.snapshot();
            self.objects.change_often(&self.cluster.writer, random);
            self.objects.wait(&self.cluster);
            self.objects.return_to(&snapshot);
        }
        self.cluster.begin(trouble);
        let failures = |log: &str| log.matches("cannot watch").count() + log.matches("cannot list").count();
        let before = failures(&self.agents.running().log());
        let cluster = &self.cluster;
        if trouble.is_noticed() {
            self.agents.running().wait_until(PATIENCE, "the agent has met the trouble", |agent| {
                if failures(&agent.log()) > before {
                    return Ok(());
                }
                cluster.cut();
                thread::sleep(CUT_PAUSE);
                Err("not yet")
            });
        }
    }

    fn act(&mut self, action: Action, random: &mut Random) {
        let (writer, objects) = (&self.cluster.writer, &mut self.objects);
        let services = services(random);
        match action {
            Action::Replace => services.iter().for_each(|service| objects.replace(writer, *service, random)),
            Action::Shift => services.iter().for_each(|service| objects.shift(writer, *service, random)),
            Action::Scale => objects.scale(writer, services[0]),
            Action::Recreate => {
                services.iter().for_each(|service| objects.delete(writer, *service));
                services.iter().for_each(|service| objects.replace(writer, *service, random));
            }
            Action::Grow => objects.grow(writer, random),
            Action::Shrink => objects.shrink(writer, random),
            Action::Kill => {
                self.agents.kill();
                self.agents.start_next(random);
            }
            Action::Restart => {
                self.agents.stop();
                self.agents.start_next(random);
            }
            Action::KernelFault => {
                let mut own = random.clone();
                self.agents.start_with_fault(random, || {
                    objects.grow(writer, &mut own);
                    objects.shift(writer, services[0], &mut own);
                });
            }
            Action::Older => self.agents.try_older(random),
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
        (0..SERVICES).for_each(|service| self.objects.replace(&self.cluster.writer, service, random));
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
        self.objects.shift(&self.cluster.writer, random.below(SERVICES), random);
        self.settle_without_change();
    }

    fn settle_without_change(&mut self) {
        let wanted = self.cluster.resolved();
        let sandbox = self.sandbox;
        self.agents.running().wait_until(RECOVERY_MAX, "the table is what the objects give", |_| {
            let table = Value::Array(rows(sandbox, "services"));
            if table == wanted { Ok(()) } else { Err(difference(&table, &wanted)) }
        });
        self.agents.wait_ready();
        self.objects.wait(&self.cluster);
        self.objects.confirm();
        self.agents.check();
    }
}

/// Some Services, at least one.
fn services(random: &mut Random) -> Vec<usize> {
    let mut services = random.some(&std::array::from_fn::<_, SERVICES, _>(|service| service), SERVICES / 2);
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
