//! Budgets of the agent: its own memory, the memory of its maps, and the instructions that the verifier processes. All
//! apply to the shipped binary with a real control plane.
//!
//! Times depend on the machine, so only the start has a limit here, ten times its expected duration; `cargo xtask bench
//! agent` measures times, beside those of kube-proxy.

#![expect(clippy::unwrap_used, reason = "a test that finds something else than it expects has failed")]

mod budget;
mod cluster;

use std::{fs, time::Duration};

use cproxy_tests::{
    population::Shape,
    process::{cproxy, cproxy_binary},
    sandbox::Sandbox,
    usage::Memory,
};

use self::{budget::Figures, cluster::Cluster};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Limit on the size of a shipped binary. A debug binary is several times as large, and its memory is not
/// representative.
const SHIPPED_BYTES_MAX: u64 = 10 * MIB;

/// A small cluster, and a large one.
const SMALL: Shape = Shape::new(100, 10);
const LARGE: Shape = Shape::new(5_000, 10);

const SMALL_MAPS_BYTES: u64 = 384 * KIB;
const LARGE_MAPS_BYTES: u64 = 4 * MIB;
/// Limit after shrinking. A map shrinks only to a quarter of its size or less, so it may stay up to four times as large
/// as needed.
const SHRUNK_MAPS_BYTES: u64 = 512 * KIB;
const LARGE_PEAK_BYTES: u64 = 13 * MIB;
const LARGE_ANONYMOUS_BYTES: u64 = 4_500 * KIB;
const VERIFIED_INSTRUCTIONS: u64 = 2_300;

/// Limit on the start, ten times its expected duration on two shared CPUs.
const SMALL_START: Duration = Duration::from_secs(1);
const LARGE_START: Duration = Duration::from_secs(6);

#[test]
fn a_small_cluster_takes_little_kernel_memory() {
    require_shipped();
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::start(&sandbox);
    cluster.create(SMALL, 0..SMALL.services);
    let (agent, start) = cluster.start_agent();
    let memory = Memory::of(agent.pid());
    let mut figures = Figures::new(SMALL);
    figures.time("start to ready", start, SMALL_START);
    figures.memory("peak of resident memory", memory.peak, LARGE_PEAK_BYTES);
    figures.memory("anonymous memory", memory.anonymous, LARGE_ANONYMOUS_BYTES);
    figures.maps(&sandbox, SMALL_MAPS_BYTES);
    figures.check();
}

#[test]
fn a_large_cluster_stays_within_its_budget_and_frees_its_memory() {
    require_shipped();
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::start(&sandbox);
    cluster.create(LARGE, 0..LARGE.services);
    let (agent, start) = cluster.start_agent();
    let mut figures = Figures::new(LARGE);
    figures.time("start to ready", start, LARGE_START);
    figures.memory("anonymous memory", cluster::anonymous_at_rest(&agent), LARGE_ANONYMOUS_BYTES);
    figures.memory("peak of resident memory", Memory::of(agent.pid()).peak, LARGE_PEAK_BYTES);
    figures.maps(&sandbox, LARGE_MAPS_BYTES);
    cluster.delete(LARGE, SMALL.services..LARGE.services);
    cluster.wait_until_maps_shrink(SHRUNK_MAPS_BYTES);
    figures.heading("after all but 100 Services were deleted");
    figures.maps(&sandbox, SHRUNK_MAPS_BYTES);
    figures.check();
}

#[test]
fn every_program_stays_within_the_budget_of_the_verifier() {
    let sandbox = Sandbox::for_test();
    let requirements = cproxy(&sandbox, &["check", "-o", "json"]).json();
    let details = requirements.as_array().unwrap().iter().filter_map(|requirement| {
        let name = requirement["name"].as_str()?.strip_prefix("program_")?.to_owned();
        let words = requirement["detail"].as_str().unwrap_or_default();
        let count = words.split(' ').find_map(|word| word.parse::<u64>().ok());
        Some((name, count.unwrap_or_else(|| panic!("no count of instructions: {requirement}"))))
    });
    let programs = details.collect::<Vec<_>>();
    assert_eq!(programs.len(), 9, "{programs:?}");
    eprintln!("verified instructions: {programs:?}");
    let too_large = programs.iter().filter(|(_, count)| *count > VERIFIED_INSTRUCTIONS).collect::<Vec<_>>();
    assert!(too_large.is_empty(), "more than {VERIFIED_INSTRUCTIONS} instructions are verified: {too_large:?}");
}

fn require_shipped() {
    let binary = cproxy_binary();
    let bytes = fs::metadata(&binary).unwrap().len();
    assert!(
        bytes <= SHIPPED_BYTES_MAX,
        "{} has {bytes} bytes, so it is not what is shipped: set CPROXY_BIN to what `cargo xtask build` prints",
        binary.display()
    );
}
