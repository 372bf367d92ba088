//! Starts of the agent through a relay, and what it uses then.

use std::{fs, path::Path, thread, time::Duration};

use anyhow::{Context as _, Result};
use cproxy_benches::{bpf::Map, paired::Estimate, pod::enter, report::Figure};
use cproxy_tests::{pinned, sandbox::Sandbox, usage::Memory};
use serde_json::Value;

use crate::{
    cluster::{Cluster, Scene},
    programs::policy_directory,
};

/// Limit on a start, longer than any takes.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time after which an agent that is ready has nothing left to do.
const REST: Duration = Duration::from_millis(500);

/// Generations of a policy's maps.
const GENERATIONS: u32 = 2;

/// One start.
pub(crate) struct Start {
    /// Times of the agent's log.
    times: Value,
    cpu_ms: f64,
    anonymous_kib: f64,
    peak_kib: f64,
    maps_kib: f64,
    policy_maps_kib: f64,
}

/// All starts of a scene.
pub(crate) struct Starts {
    pub(crate) scene: Scene,
    all: Vec<Start>,
}

/// The figures of a scene's starts.
pub(crate) const FIGURES: [Figure<Starts>; 12] = [
    Figure { name: "ready_ms", meaning: "start to ready, ms", of: |starts| starts.logged("ready_ms") },
    Figure {
        name: "prepare_ms",
        meaning: "  input and the machine's state, ms",
        of: |starts| starts.logged("prepare_ms"),
    },
    Figure {
        name: "install_ms",
        meaning: "  programs verified and attached, ms",
        of: |starts| starts.logged("install_ms"),
    },
    Figure { name: "open_ms", meaning: "  maps opened, ms", of: |starts| starts.logged("open_ms") },
    Figure { name: "list_ms", meaning: "  lists complete, ms", of: |starts| starts.logged("list_ms") },
    Figure { name: "write_ms", meaning: "  table written, ms", of: |starts| starts.logged("write_ms") },
    Figure { name: "cpu_ms", meaning: "CPU time until at rest, ms", of: |starts| starts.each(|start| start.cpu_ms) },
    Figure {
        name: "anonymous_kib",
        meaning: "anonymous memory at rest, KiB",
        of: |starts| starts.each(|start| start.anonymous_kib),
    },
    Figure {
        name: "peak_kib",
        meaning: "peak of resident memory, KiB",
        of: |starts| starts.each(|start| start.peak_kib),
    },
    Figure {
        name: "maps_kib",
        meaning: "kernel memory of all maps, KiB",
        of: |starts| starts.each(|start| start.maps_kib),
    },
    Figure {
        name: "policy_maps_kib",
        meaning: "  of the policy's, KiB",
        of: |starts| starts.each(|start| start.policy_maps_kib),
    },
    Figure {
        name: "all_kib",
        meaning: "anonymous memory and that of all maps, KiB",
        of: |starts| starts.each(|start| start.anonymous_kib + start.maps_kib),
    },
];

/// Starts an agent in each scene, in turn.
pub(crate) fn measure(sandbox: &Sandbox, cluster: &Cluster<'_>, scenes: &[Scene], count: u32) -> Result<Vec<Starts>> {
    let mut found: Vec<_> = scenes.iter().map(|&scene| Starts { scene, all: Vec::new() }).collect();
    // The sandbox's cgroup has the agents alone.
    enter(sandbox.cgroup_beside())?;
    for number in 0..=count {
        for starts in &mut found {
            let start = start(sandbox, cluster, starts.scene)?;
            // The first one finds cold files.
            if number > 0 {
                starts.all.push(start);
            }
        }
    }
    Ok(found)
}

fn start(sandbox: &Sandbox, cluster: &Cluster<'_>, scene: Scene) -> Result<Start> {
    let before = cpu_ms(sandbox)?;
    let (mut agent, _) = cluster.agent(scene)?.args(["--log-format", "json"]).start_and_time(TIMEOUT);
    thread::sleep(REST);
    let cpu_ms = cpu_ms(sandbox)? - before;
    let memory = Memory::of(agent.pid());
    agent.stop();
    let log = agent.log();
    let mut lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let times = lines.find(|line| line.get("ready_ms").is_some()).context("no line of the log says `ready`")?;
    let maps = pinned::maps_in(&cluster.pod(scene)?.pin_dir);
    let kib = |bytes: u64| bytes as f64 / 1024.0;
    let policy = maps.iter().filter(|map| map.name.starts_with("POLICY_")).map(|map| map.bytes).sum::<u64>();
    let generations = generations_bytes(&cluster.pod(scene)?.pin_dir.join(policy_directory()));
    cluster.clean_up(scene)?;
    Ok(Start {
        times,
        cpu_ms,
        anonymous_kib: kib(memory.anonymous),
        peak_kib: kib(memory.peak),
        maps_kib: kib(maps.iter().map(|map| map.bytes).sum::<u64>() + generations),
        policy_maps_kib: kib(policy + generations),
    })
}

/// Memory of the maps of both generations of a policy, which have no pins; 0 without a policy.
fn generations_bytes(pins: &Path) -> u64 {
    let outer = ["POLICY_PEERS", "POLICY_RANGES", "POLICY_INTERVALS"].map(|name| Map::open(&pins.join(name)));
    let inner =
        outer.iter().flatten().flat_map(|outer| (0..GENERATIONS).filter_map(|index| outer.inner_at(index).ok()));
    inner.map(|map| map.memory_bytes()).sum()
}

/// CPU time of the sandbox's cgroup so far.
fn cpu_ms(sandbox: &Sandbox) -> Result<f64> {
    let text = fs::read_to_string(sandbox.cgroup().join("cpu.stat")).context("reading a cgroup's CPU time")?;
    let usage = text.lines().find_map(|line| line.strip_prefix("usage_usec ")?.parse::<f64>().ok());
    Ok(usage.context("a cgroup has a CPU time")? / 1e3)
}

impl Starts {
    fn each(&self, field: impl Fn(&Start) -> f64) -> Vec<f64> {
        self.all.iter().map(field).collect()
    }

    fn logged(&self, field: &str) -> Vec<f64> {
        self.all.iter().filter_map(|start| start.times.get(field)?.as_f64()).collect()
    }

    /// Differences of a figure from that of other starts, turn by turn, as a part of a limit.
    pub(crate) fn added(&self, to: &Self, figure: &str, limit: f64) -> Option<Estimate> {
        let figure = Figure::named(&FIGURES, figure)?;
        let (own, other) = ((figure.of)(self), (figure.of)(to));
        Estimate::of(own.iter().zip(&other).map(|(own, other)| (own - other) / limit))
    }
}
