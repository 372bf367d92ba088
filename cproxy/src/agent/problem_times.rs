//! Times since which problems are there.

use std::collections::BTreeMap;

use cproxy_core::{Problem, sorted_map};
use tokio::time::Instant;

use super::table::Table;
use crate::report::ProblemRow;

/// Number of times from which on those of problems that have ended are removed.
const TIMES_MAX: usize = 1_024;

/// When each problem has come.
#[derive(Debug, Default)]
pub(super) struct ProblemTimes(BTreeMap<Problem, Instant>);

impl ProblemTimes {
    /// Takes note of problems that are new, or have come back.
    pub(super) fn record(&mut self, new: &[Problem], table: &Table) {
        if new.is_empty() {
            return;
        }
        let now = Instant::now();
        self.0.extend(new.iter().map(|problem| (problem.clone(), now)));
        if self.0.len() > TIMES_MAX {
            let kept = table.problems().into_iter().filter_map(|problem| self.0.remove_entry(&problem));
            self.0 = sorted_map(kept);
        }
    }

    /// All problems that are there.
    pub(super) fn rows(&self, table: &Table) -> Vec<ProblemRow> {
        let since = |problem: &Problem| self.0.get(problem).map_or(0, |since| since.elapsed().as_secs());
        table.problems().iter().map(|problem| ProblemRow::new(problem, since(problem))).collect()
    }
}
