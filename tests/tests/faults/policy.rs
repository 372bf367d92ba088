//! Faults of an agent that enforces a network policy: nothing passes that neither the state before nor the one after
//! allows, nothing is denied that both allow, and in the end the policy is in force.

use cproxy_tests::isolation::{Isolation, State};

use crate::{PODS, World, first_starts, restarts};

/// Maps of which each generation has one, by the names that the kernel has for them. The programs keep another one.
pub(crate) const GENERATIONS: [&str; 3] = ["POLICY_PEERS", "POLICY_RANGES", "POLICY_INTERVAL"];

/// Faults in an ordinary run of a test.
const SAMPLE: usize = 3;

impl World {
    fn with_policy() -> Self {
        let world = Self { sample: SAMPLE, ..Self::new() };
        let policy = Some(Isolation::new(&world.sandbox, PODS));
        Self { policy, ..world }
    }

    fn set(&self, state: State) {
        self.isolation().set(state);
    }

    fn isolation(&self) -> &Isolation {
        self.policy.as_ref().unwrap()
    }
}

#[test]
fn a_first_start_with_a_policy_and_a_fault_can_be_repeated() {
    first_starts(&World::with_policy());
}

#[test]
fn a_restart_with_a_fault_opens_and_closes_nothing() {
    restarts(&World::with_policy());
}

/// Changes the policy from one state to another, with faults.
fn changes(name: &str, from: State, to: State) {
    let world = World::with_policy();
    world.with_faults(name, || world.set(from), || world.set(to), || world.isolation().check());
}

#[test]
fn a_change_of_the_policy_with_a_fault_is_made_good() {
    changes("change of the policy", State::Before, State::After);
}

#[test]
fn a_pod_that_becomes_isolated_with_a_fault_is_so_later() {
    changes("isolation", State::Open, State::Before);
}

#[test]
fn a_pod_that_is_no_longer_isolated_with_a_fault_opens_later() {
    changes("end of isolation", State::Before, State::Open);
}

#[test]
fn a_policy_that_outgrows_its_maps_with_a_fault_is_made_good() {
    let world = World::with_policy();
    world.with_faults(
        "growth of the policy",
        || {
            world.clean_up("growth of the policy");
            world.set(State::Before);
        },
        || world.set(State::Grown),
        || world.isolation().check(),
    );
}
