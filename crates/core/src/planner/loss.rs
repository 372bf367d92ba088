//! Part of a table that the first lists of a new agent would take away.

use std::collections::BTreeSet;

use super::TablePlanner;
use crate::{Action, Address, Store, desired_rows, sorted_set, store::is_most};

/// Addresses with a frontend that leads to a backend, and those of them that would have none any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loss {
    /// Addresses that serve in the kernel.
    pub serving: usize,
    /// Number of them that would not.
    pub lost: usize,
}

impl Loss {
    /// Loss that a store would bring to these addresses.
    #[must_use]
    pub fn of(serving: &BTreeSet<Address>, store: &Store) -> Self {
        let mut left = serving.clone();
        for name in store.service_names() {
            if left.is_empty() {
                break;
            }
            for row in desired_rows(store, name) {
                if row.action == Action::Forward {
                    left.remove(&row.frontend.address);
                }
            }
        }
        Self { serving: serving.len(), lost: left.len() }
    }

    /// Whether more than half would be lost.
    #[must_use]
    pub fn is_most(self) -> bool {
        is_most(self.lost, self.serving)
    }
}

impl TablePlanner {
    /// Addresses in the kernel with a frontend that leads to a backend.
    #[must_use]
    pub fn serving_addresses(&self) -> BTreeSet<Address> {
        let sets = self.sets.each_in_kernel().filter(|set| set.members.eligible() != 0);
        let forwarding = sorted_set(sets.map(|set| set.id));
        let written = self.claims.frontends.each_written();
        sorted_set(written.filter(|(_, set)| forwarding.contains(set)).map(|(frontend, _)| frontend.address))
    }
}
