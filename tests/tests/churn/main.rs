//! No connect fails or reaches a wrong backend, whatever changes: endpoints are replaced, scaled to a thousand and
//! back, Services go and come back at the same address, thousands of others come and go, the agent is killed and
//! restarted. Meanwhile threads connect without a pause, by every kind of socket and address. Each connect must reach a
//! backend of a set that was in force at some moment of that connect, or within the [`history::GRACE`] before it.
//!
//! Nothing depends on how fast the machine is: a set is in force from just before it is written to the source until the
//! next one has been seen in the kernel, however long that takes.
//!
//! [`flows`] does the same with lasting state: terminating pods keep their flows, one socket has flows to many
//! Services, and the agent closes the sockets of pods that have left.
//!
//! A failure prints its seed; `CPROXY_SEED` repeats the same changes. `CPROXY_SOAK=1` makes twenty times as many
//! connects, and five times as many changes. Run with `--test-threads=1`: a cgroup is the whole process's.

#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod calls;
mod changes;
mod client;
mod flows;
mod history;
mod kernel;
mod servers;
mod storm;
mod world;

use std::{io::Write as _, time::Instant};

use cproxy_tests::{
    random::{self, Random},
    sandbox::Sandbox,
};

use self::{changes::Changes, servers::Servers, storm::Storm};

/// Least number of connects, and of each change, in an ordinary and in a long run.
const LEAST: (u64, usize) = (50_000, 1);
const LEAST_IN_SOAK: (u64, usize) = (1_000_000, 5);

#[test]
fn no_connect_fails_or_goes_astray_in_the_churn() {
    let seed = random::seed();
    let (connects, rounds) = if random::is_soak() { LEAST_IN_SOAK } else { LEAST };
    eprintln!("CPROXY_SEED={seed}");
    let started = Instant::now();
    let sandbox = Sandbox::for_test();
    world::prepare(&sandbox);
    let _servers = Servers::start(&sandbox);
    let storm = Storm::default();
    let made = storm.rage(&sandbox, seed, || {
        let mut changes = Changes::start(&sandbox, &storm, Random::new(seed));
        storm.begin();
        (0..rounds).for_each(|_| changes.make_each_once());
        while storm.connects() < connects && !storm.has_failed() {
            changes.make_each_once();
        }
        changes.made()
    });
    assert!(!storm.has_failed(), "CPROXY_SEED={seed}: {}", storm.failure());
    let report = format!("churn: CPROXY_SEED={seed}: {storm}; {made}; in {:.1?}\n", started.elapsed());
    // Written directly to stderr, as the test harness hides the output of a test that passes.
    std::io::stderr().write_all(report.as_bytes()).unwrap();
}
