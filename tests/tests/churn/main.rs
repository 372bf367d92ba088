//! Storms: everything changes while many threads connect and send without a pause. Endpoints are replaced, scaled to
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

use std::{
    io::Write as _,
    thread,
    time::{Duration, Instant},
};

use cproxy_tests::{
    faults::{Fault, Injection},
    older::older_agents,
    process::cproxy_binary,
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
        let mut changes = Changes::start(&sandbox, &storm, Random::new(seed), &cproxy_binary());
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

/// Largest number of a call at which an agent is killed that takes over from an older one.
const UPGRADE_CALL_MAX: usize = 500;

/// Upgrades from each layout in an ordinary and in a long run.
const UPGRADES: usize = 1;
const UPGRADES_IN_SOAK: usize = 40;

/// Least number of connects before and after an upgrade.
const CONNECTS_OF_UPGRADE: u64 = 1_000;

#[test]
fn an_upgrade_from_an_older_layout_is_not_felt_in_a_storm() {
    let seed = random::seed();
    eprintln!("CPROXY_SEED={seed}");
    let mut random = Random::new(seed);
    let upgrades = if random::is_soak() { UPGRADES_IN_SOAK } else { UPGRADES };
    for older in older_agents() {
        for _ in 0..upgrades {
            let fault = random.pick(&[Fault::KillBefore, Fault::KillAfter]);
            let injection = Injection { site: None, number: 1 + random.below(UPGRADE_CALL_MAX), fault };
            let what = format!("CPROXY_SEED={seed}: layout {}, {injection}", older.layout);
            let sandbox = Sandbox::for_test();
            addresses::prepare(&sandbox);
            let _servers = Servers::start(&sandbox);
            let storm = Storm::default();
            let wait_for_connects = |least: u64| {
                while !storm.has_failed() && storm.connects() < least {
                    thread::sleep(Duration::from_millis(10));
                }
            };
            storm.run(&sandbox, seed, || {
                let mut changes = Changes::start(&sandbox, &storm, random.clone(), &older.binary);
                storm.begin();
                wait_for_connects(CONNECTS_OF_UPGRADE);
                changes.upgrade(injection);
                wait_for_connects(storm.connects() + CONNECTS_OF_UPGRADE);
            });
            assert!(!storm.has_failed(), "{what}: {}", storm.failure());
        }
    }
}
