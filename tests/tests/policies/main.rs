//! The rules of NetworkPolicies in cproxy and in two independent engines, which a Go program in `tests/policies` asks:
//! kube-network-policies and the matcher of cyclonus. Clusters are random, and the verdicts about each traffic must be
//! equal. Permitted differences are in [`declared`], with reasons.
//!
//! A failure prints its seed; `CPROXY_SEED` repeats it. `CPROXY_SOAK=1` compares for longer.

#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod cluster;
mod compare;
mod declared;
mod engines;
mod verdicts;

use cproxy_tests::random::{self, Random};

use self::{compare::Tally, engines::Engines};

/// Number of clusters, in an ordinary and in a long run.
const CLUSTERS: usize = 3_000;
const CLUSTERS_IN_SOAK: usize = 30_000;

#[test]
fn the_engines_and_cproxy_agree_on_random_clusters() {
    let seed = random::seed();
    eprintln!("CPROXY_SEED={seed}");
    let mut random = Random::new(seed);
    let mut engines = Engines::start();
    let mut tally = Tally::default();
    for _ in 0..if random::is_soak() { CLUSTERS_IN_SOAK } else { CLUSTERS } {
        let cluster = cluster::cluster(&mut random);
        if let Some(difference) = compare::difference(&cluster, &mut engines, &mut tally) {
            let least = compare::reduce(cluster, &mut engines);
            let difference = compare::difference(&least, &mut engines, &mut Tally::default()).unwrap_or(difference);
            panic!("CPROXY_SEED={seed}: {difference}\nin {}", least.json());
        }
    }
    eprintln!("{tally:?}");
    tally.check();
}
