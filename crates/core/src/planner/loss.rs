//! Part of the table that a new list would take away.

use std::collections::BTreeSet;

use super::TablePlanner;
use crate::{Action, Frontend, Store, desired_rows};

/// Frontends that lead to a backend, and those of them that would lead to none any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loss {
    /// Frontends in the kernel that lead to a backend.
    pub serving: usize,
    /// Number of them that would not.
    pub lost: usize,
}

impl Loss {
    /// Whether more than half would be lost.
    #[must_use]
    pub fn is_most(self) -> bool {
        self.lost > self.serving / 2
    }
}

impl TablePlanner {
    /// Loss that the store would bring, but for `own` frontends, which no source has.
    #[must_use]
    pub fn loss(&self, store: &Store, own: &BTreeSet<Frontend>) -> Loss {
        let sets = self.sets.each_in_kernel().filter(|set| set.members.eligible != 0);
        let forwarding: BTreeSet<u32> = sets.map(|set| set.id).collect();
        let written = self.claims.frontends.each_written();
        let is_serving = |(frontend, set): &(Frontend, u32)| forwarding.contains(set) && !own.contains(frontend);
        let mut left: BTreeSet<Frontend> = written.filter(is_serving).map(|(frontend, _)| frontend).collect();
        let serving = left.len();
        for name in store.service_names() {
            if left.is_empty() {
                break;
            }
            for row in desired_rows(store, name) {
                if row.action == Action::Forward {
                    left.remove(&row.frontend);
                }
            }
        }
        Loss { serving, lost: left.len() }
    }
}
