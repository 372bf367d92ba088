//! Chaos: a workload that checks every answer, and a random script of changes and faults. Nothing may fail but what a
//! fault itself takes away, and after each step the table must be what the objects give.
//!
//! Two tests follow manifests and have no faults but the ends of agents: one makes every change of [`objects`] without
//! a pause of the workload, the other upgrades from each older agent. The third has a real control plane. An episode of
//! it begins with an older agent, which the present one replaces under load. Its script then has every fault of
//! [`script`] of the agent, the API server and the machine at least once, some of them at once. The workload is the
//! storm of the library, up to 20,000 connections that stay ([`held`]) and, with a control plane, connections that live
//! until their backends go ([`long`]), and resolvers ([`resolver`]).
//!
//! A failure prints its seed; `CPROXY_SEED` repeats the same script. `CPROXY_SOAK=1` makes twenty times as many
//! connects and five times as many changes, 40 upgrades from each older agent, and plays episodes for an hour.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod agents;
mod chaos;
mod cluster;
mod held;
mod long;
mod machine;
mod objects;
mod resolver;
mod script;
mod source;
mod tally;

use std::{
    io::Write as _,
    sync::atomic::AtomicBool,
    thread,
    time::{Duration, Instant},
};

use cproxy_ebpf::TCP_PLACES;
use cproxy_tests::{
    Done,
    older::older_agents,
    random::{self, Random},
    sandbox::Sandbox,
    storm::{Storm, addresses, servers::Servers},
};

use self::{chaos::Chaos, cluster::Cluster, source::Source, tally::Tally};

/// Limit on every wait for the agent, longer than its pauses between attempts.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Pause of each thread of the storm after each call: the control plane needs time, too.
const PAUSE: Duration = Duration::from_millis(2);

/// Threads with connections that live long.
const LONG_THREADS: u64 = 2;

/// Duration of a long run.
const SOAK: Duration = Duration::from_secs(3600);

/// Least number of connects, and of each change, in an ordinary and in a long run without faults.
const LEAST: (u64, usize) = (50_000, 1);
const LEAST_IN_SOAK: (u64, usize) = (1_000_000, 5);

/// Upgrades from each older agent in an ordinary and in a long run.
const UPGRADES: usize = 1;
const UPGRADES_IN_SOAK: usize = 40;

#[test]
fn every_connect_and_flow_reaches_a_backend_in_force() {
    let (started, seed) = (Instant::now(), random::seed());
    let (connects, rounds) = if random::is_soak() { LEAST_IN_SOAK } else { LEAST };
    let storm = Storm::default();
    run(
        seed,
        &storm,
        |sandbox| Source::Manifests(sandbox),
        None,
        |_, chaos, random| {
            (0..rounds).for_each(|_| chaos.play(&script::changes(random), random));
            while !storm.has_failed() && (storm.connects() < connects || !storm.has_seen_everything()) {
                chaos.play(&script::changes(random), random);
            }
        },
    );
    report(&format!("CPROXY_SEED={seed}: {storm}; in {:.1?}", started.elapsed()));
}

#[test]
fn an_upgrade_from_an_older_agent_is_not_felt_in_a_storm() {
    let upgrades = if random::is_soak() { UPGRADES_IN_SOAK } else { UPGRADES };
    for (index, older) in older_agents().iter().enumerate() {
        for seed in (random::seed()..).take(upgrades) {
            eprintln!("the first agent is that of {}", older.name);
            run(
                seed,
                &Storm::default(),
                |sandbox| Source::Manifests(sandbox),
                Some(index),
                |_, chaos, random| {
                    chaos.upgrade(true, random);
                    chaos.wait_for_connects();
                },
            );
        }
    }
}

#[test]
fn nothing_fails_but_what_a_fault_takes_away() {
    let (started, first) = (Instant::now(), random::seed());
    let mut tally = Tally::default();
    for seed in first.. {
        play_episode(seed, &mut tally);
        if !random::is_soak() || started.elapsed() >= SOAK {
            break;
        }
    }
    report(&format!("CPROXY_SEED={first}: {tally}; in {:.0?}", started.elapsed()));
}

/// Writes directly to stderr, as the test harness hides the output of a test that passes.
fn report(text: &str) {
    std::io::stderr().write_all(format!("chaos: {text}\n").as_bytes()).unwrap();
}

fn play_episode(seed: u64, tally: &mut Tally) {
    let (storm, is_over) = (Storm::with_pauses(PAUSE), AtomicBool::new(false));
    let first = Random::new(seed).below(older_agents().len());
    run(
        seed,
        &storm,
        |sandbox| Source::Cluster(Cluster::start(sandbox).into()),
        Some(first),
        |sandbox, chaos, random| {
            let (counts, is_out) = (tally.counts(), chaos.is_out());
            thread::scope(|scope| {
                let _done = Done(&is_over);
                for thread in 0..LONG_THREADS {
                    let (storm, is_over) = (&storm, &is_over);
                    scope.spawn(move || long::run(storm, sandbox, Random::new(seed ^ thread), is_over, counts));
                }
                scope.spawn(|| resolver::run(&storm, sandbox, [&is_over, &is_out], counts));
                let is_killed = random.percent(50);
                chaos.upgrade(is_killed, random);
                chaos.play(&script::steps(random), random);
            });
            let places_max = chaos.places_max();
            assert!(storm.has_failed() || places_max > u64::from(TCP_PLACES), "further levels: {places_max} places");
            tally.add(&storm, chaos.faults());
        },
    );
    eprintln!("so far: {tally}");
}

/// Runs a storm while `work` makes changes and faults. It begins with the present agent or an older one, by its index.
fn run(
    seed: u64,
    storm: &Storm,
    source: fn(&Sandbox) -> Source<'_>,
    first: Option<usize>,
    work: impl FnOnce(&Sandbox, &mut Chaos<'_>, &mut Random),
) {
    eprintln!("CPROXY_SEED={seed}");
    let sandbox = Sandbox::for_test();
    addresses::prepare(&sandbox);
    let _servers = Servers::start(&sandbox);
    let _explained = Explained { storm, seed };
    let mut random = Random::new(seed);
    storm.run(&sandbox, seed, || {
        let source = source(&sandbox);
        source.write("held", held::objects(), false);
        let mut chaos = Chaos::start(&sandbox, source, storm, first, &mut random);
        storm.begin();
        let (is_over, is_out) = (AtomicBool::new(false), chaos.is_out());
        thread::scope(|scope| {
            let _done = Done(&is_over);
            for thread in 0..held::THREADS {
                let (sandbox, is_over, is_out) = (&sandbox, &is_over, &is_out);
                let random = Random::new(seed ^ thread as u64);
                scope.spawn(move || held::run(storm, sandbox, (thread, random), is_over, is_out));
            }
            work(&sandbox, &mut chaos, &mut random);
        });
    });
    assert!(!storm.has_failed(), "CPROXY_SEED={seed}: {}", storm.failure());
}

/// Prints at the end of a test that panics what its workload has seen.
struct Explained<'s> {
    storm: &'s Storm,
    seed: u64,
}

impl Drop for Explained<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let seen = if self.storm.has_failed() { self.storm.failure() } else { "no failure".to_owned() };
            eprintln!("CPROXY_SEED={}: the workload has seen: {seen}; {}", self.seed, self.storm);
        }
    }
}
