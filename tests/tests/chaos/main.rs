//! Chaos: a real control plane, a workload that checks every answer, and a random script of faults of the agent, the
//! API server and the machine, some of them at once. Nothing may fail but what a fault itself takes away, and after
//! each step the table must be what the API server's objects give.
//!
//! An episode begins with an agent of an older table layout, which the present one replaces under load. Its script then
//! has every fault of [`script`] at least once. The workload is the storm of the library, connections that live until
//! their backends go ([`long`]), and resolvers ([`resolver`]).
//!
//! An ordinary run is one episode. `CPROXY_SOAK=1` plays episodes for an hour. Each prints its seed; `CPROXY_SEED`
//! repeats its script. Run with `--test-threads=1`: a cgroup is the whole process's.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod agents;
mod chaos;
mod cluster;
mod long;
mod machine;
mod objects;
mod resolver;
mod script;
mod tally;

use std::{
    io::Write as _,
    sync::atomic::AtomicBool,
    thread,
    time::{Duration, Instant},
};

use cproxy_tests::{
    Done,
    random::{self, Random},
    sandbox::Sandbox,
    storm::{Storm, addresses, servers::Servers},
};

use self::{chaos::Chaos, cluster::Cluster, tally::Tally};

/// Limit on every wait for the agent, longer than its pauses between attempts.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Pause of each thread of the storm after each call: the control plane needs time, too.
const PAUSE: Duration = Duration::from_millis(2);

/// Threads with connections that live long.
const LONG_THREADS: u64 = 2;

/// Duration of a long run.
const SOAK: Duration = Duration::from_secs(3600);

#[test]
fn nothing_fails_but_what_a_fault_takes_away() {
    let (started, first) = (Instant::now(), random::seed());
    let mut tally = Tally::default();
    for seed in first.. {
        play(seed, &mut tally);
        if !random::is_soak() || started.elapsed() >= SOAK {
            break;
        }
    }
    let report = format!("chaos: CPROXY_SEED={first}: {tally}; in {:.0?}\n", started.elapsed());
    // Written directly to stderr, as the test harness hides the output of a test that passes.
    std::io::stderr().write_all(report.as_bytes()).unwrap();
}

/// Plays one episode.
fn play(seed: u64, tally: &mut Tally) {
    eprintln!("CPROXY_SEED={seed}");
    let sandbox = Sandbox::for_test();
    addresses::prepare(&sandbox);
    let _servers = Servers::start(&sandbox);
    let storm = Storm::with_pauses(PAUSE);
    let _explained = Explained { storm: &storm, seed };
    let (mut random, is_out) = (Random::new(seed), AtomicBool::new(false));
    storm.run(&sandbox, seed, || {
        let mut chaos = Chaos::start(&sandbox, Cluster::start(&sandbox), &storm, &is_out, &mut random);
        storm.begin();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let (counts, _done) = (tally.counts(), Done(&is_over));
            for thread in 0..LONG_THREADS {
                let (storm, is_over, sandbox) = (&storm, &is_over, &sandbox);
                scope.spawn(move || long::run(storm, sandbox, Random::new(seed ^ thread), is_over, counts));
            }
            scope.spawn(|| resolver::run(&storm, &sandbox, [&is_over, &is_out], counts));
            chaos.play(&mut random);
        });
        tally.add(&storm, chaos.faults());
    });
    assert!(!storm.has_failed(), "CPROXY_SEED={seed}: {}", storm.failure());
    eprintln!("so far: {tally}");
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
