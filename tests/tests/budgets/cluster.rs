//! A control plane full of Services, and an agent that follows it.

use std::{
    ops::Range,
    thread,
    time::{Duration, Instant},
};

use cproxy_tests::{
    control_plane::{ControlPlane, NODE},
    manifest, pinned,
    population::Shape,
    process::{Agent, RunningAgent, eventually},
    sandbox::Sandbox,
    usage::{Memory, cpu_time},
    writer::Writer,
};

/// Limit on every wait, longer than any takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time without CPU use after which the agent counts as at rest.
const REST: Duration = Duration::from_millis(500);

/// Limit on shrinking: the agent frees memory once most of it has been unused for 10 seconds.
const SHRINKING_MAX: Duration = Duration::from_secs(30);

pub(crate) struct Cluster<'s> {
    sandbox: &'s Sandbox,
    writer: Writer,
    control_plane: ControlPlane<'s>,
}

impl<'s> Cluster<'s> {
    pub(crate) fn start(sandbox: &'s Sandbox) -> Self {
        let control_plane = ControlPlane::start(sandbox);
        control_plane.apply([manifest::node(NODE, "zone-a")]);
        Self { sandbox, writer: Writer::new(&control_plane), control_plane }
    }

    pub(crate) fn create(&self, shape: Shape, services: Range<u32>) {
        let started = Instant::now();
        self.writer.create(shape.objects(services));
        eprintln!("{shape}: created within {:.1} s", started.elapsed().as_secs_f64());
    }

    pub(crate) fn delete(&self, shape: Shape, services: Range<u32>) {
        self.writer.delete(shape.objects(services));
    }

    pub(crate) fn start_agent(&self) -> (RunningAgent, Duration) {
        let agent = Agent::new(self.sandbox).kubeconfig(self.control_plane.agent_kubeconfig());
        agent.args(["--node-name", NODE]).start_and_time(PATIENCE)
    }

    /// Waits until the maps take at most `budget` bytes, up to the limit on shrinking.
    pub(crate) fn wait_until_maps_shrink(&self, budget: u64) {
        let deadline = Instant::now() + SHRINKING_MAX;
        let total = || pinned::maps(self.sandbox).iter().map(|map| map.bytes).sum::<u64>();
        while total() > budget && Instant::now() < deadline {
            thread::sleep(REST);
        }
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        self.control_plane.discard();
    }
}

/// The agent's anonymous memory once it has nothing left to do.
pub(crate) fn anonymous_at_rest(agent: &RunningAgent) -> u64 {
    eventually(PATIENCE, "the agent is at rest", || {
        let before = cpu_time(agent.pid());
        thread::sleep(REST);
        if cpu_time(agent.pid()) - before < Duration::from_millis(2) { Ok(()) } else { Err("it is busy") }
    });
    Memory::of(agent.pid()).anonymous
}
