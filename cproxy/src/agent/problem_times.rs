//! Times since which problems are there.

use std::collections::BTreeMap;

use cproxy_core::{Problem, Store, TablePlanner, sorted_map};
use tokio::time::Instant;

use crate::report::ProblemRow;

/// Number of times from which on those of problems that have ended are removed.
const TIMES_MAX: usize = 1_024;

/// When each problem has come.
#[derive(Debug, Default)]
pub(super) struct ProblemTimes(BTreeMap<Problem, Instant>);

impl ProblemTimes {
    /// Takes note of problems that are new, or have come back.
    pub(super) fn record(&mut self, new: &[Problem], store: &Store, planner: &TablePlanner) {
        if new.is_empty() {
            return;
        }
        let now = Instant::now();
        self.0.extend(new.iter().map(|problem| (problem.clone(), now)));
        if self.0.len() > TIMES_MAX {
            let current: Vec<_> = current(store, planner).collect();
            let kept = current.into_iter().filter_map(|problem| self.0.remove_entry(&problem));
            self.0 = sorted_map(kept);
        }
    }

    /// All problems that are there.
    pub(super) fn rows(&self, store: &Store, planner: &TablePlanner) -> Vec<ProblemRow> {
        let since = |problem: &Problem| self.0.get(problem).map_or(0, |since| since.elapsed().as_secs());
        current(store, planner).map(|problem| ProblemRow::new(&problem, since(&problem))).collect()
    }
}

fn current<'a>(store: &'a Store, planner: &TablePlanner) -> impl Iterator<Item = Problem> + use<'a> {
    store.problems().cloned().chain(planner.problems())
}
