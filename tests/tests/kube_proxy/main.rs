//! The real kube-proxy in nftables mode and cproxy, side by side on one API server: Services, EndpointSlices and the
//! Node change at random, and after every few changes each frontend must lead to the same backends in kube-proxy's
//! rules and in cproxy's table. Permitted differences are in [`declared`], with reasons.
//!
//! A failure prints its seed; `CPROXY_SEED` repeats it. `CPROXY_SOAK=1` makes ten times as many changes.
//!
//! [`datagrams`] compares calls instead: those on datagram sockets that are refused.
//!
//! Nothing here depends on timing: after the changes, a marker is sent through the same watches
//! ([`cluster::Cluster::view`]), and both sides are read once that has arrived.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod api;
mod cluster;
mod compare;
mod datagrams;
mod declared;
mod frontends;
mod marker;
mod ruleset;
mod services;
mod slices;
mod universe;
mod walk;

use cproxy_tests::{random, sandbox::Sandbox};

use self::{
    cluster::Cluster,
    compare::Tally,
    universe::{Change, Universe},
};

/// Number of changes, in an ordinary and in a long run, and behind a relay.
const CHANGES: usize = 300;
const CHANGES_IN_SOAK: usize = 3_000;
const CHANGES_BEHIND_RELAY: usize = 60;

#[test]
fn kube_proxy_and_cproxy_agree_on_random_objects() {
    let wanted = if random::is_soak() { CHANGES_IN_SOAK } else { CHANGES };
    let sandbox = Sandbox::for_test();
    compare_during_changes(Cluster::start(&sandbox), wanted).check();
}

#[test]
fn they_agree_with_a_relay_between_cproxy_and_the_api_server() {
    let sandbox = Sandbox::for_test();
    compare_during_changes(Cluster::start_behind_relay(&sandbox), CHANGES_BEHIND_RELAY);
}

fn compare_during_changes(mut cluster: Cluster<'_>, wanted: usize) -> Tally {
    let seed = random::seed();
    eprintln!("CPROXY_SEED={seed}");
    let mut universe = Universe::new(seed);
    let mut tally = Tally::default();
    let mut made = 0;
    let mut play = |universe: &Universe, changes: &[Change], what: &str| {
        changes.iter().for_each(|change| change.apply(&cluster.objects));
        if changes.iter().any(declared::is_half_seen) {
            cluster.restart_kube_proxy(universe.zone());
        }
        let differences = compare::differences(&cluster.view(universe.zone()), &mut tally);
        assert!(differences.is_empty(), "CPROXY_SEED={seed}: {what}, the proxies differ:\n{differences}");
    };
    let population = universe.population();
    play(&universe, &population, "at first");
    while made < wanted {
        let changes = universe.next_changes();
        let last = changes.iter().map(Change::to_string).collect::<Vec<_>>().join("\n");
        made += changes.len();
        play(&universe, &changes, &format!("after {made} changes, the last of which were\n{last}\n"));
    }
    eprintln!("CPROXY_SEED={seed}: {made} changes");
    tally
}
