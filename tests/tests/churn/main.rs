//! One storm: everything changes while many threads connect and send without a pause. Endpoints are replaced, scaled to
//! a thousand and back, terminate, leave and return; Services go and come back at the same address, thousands of others
//! come and go, the agent is killed and restarted. [`changes`] makes all changes; the storm itself, which checks each
//! answer, is in the library.
//!
//! A failure prints its seed; `CPROXY_SEED` repeats the same changes. `CPROXY_SOAK=1` makes twenty times as many
//! connects, and five times as many changes. Run with `--test-threads=1`: a cgroup is the whole process's.

#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod changes;

use std::{io::Write as _, time::Instant};

use cproxy_tests::{
    random::{self, Random},
    sandbox::Sandbox,
    storm::{Storm, addresses, servers::Servers},
};

use self::changes::Changes;

/// Least number of connects, and of each change, in an ordinary and in a long run.
const LEAST: (u64, usize) = (50_000, 1);
const LEAST_IN_SOAK: (u64, usize) = (1_000_000, 5);

#[test]
fn every_connect_and_flow_reaches_a_backend_in_force() {
    let seed = random::seed();
    let (connects, rounds) = if random::is_soak() { LEAST_IN_SOAK } else { LEAST };
    eprintln!("CPROXY_SEED={seed}");
    let started = Instant::now();
    let sandbox = Sandbox::for_test();
    addresses::prepare(&sandbox);
    let _servers = Servers::start(&sandbox);
    let storm = Storm::default();
    let made = storm.run(&sandbox, seed, || {
        let mut changes = Changes::start(&sandbox, &storm, Random::new(seed));
        storm.begin();
        (0..rounds).for_each(|_| changes.make_each_once());
        while !storm.has_failed() && (storm.connects() < connects || !storm.has_seen_everything()) {
            changes.make_each_once();
        }
        changes.made()
    });
    assert!(!storm.has_failed(), "CPROXY_SEED={seed}: {}", storm.failure());
    let report = format!("churn: CPROXY_SEED={seed}: {storm}; {made}; in {:.1?}\n", started.elapsed());
    // Written directly to stderr, as the test harness hides the output of a test that passes.
    std::io::stderr().write_all(report.as_bytes()).unwrap();
}
