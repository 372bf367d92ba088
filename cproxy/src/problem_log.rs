//! Record of logged problems: those that hold for a while are logged once.

use std::collections::BTreeSet;

use cproxy_core::{Problem, sorted_set};

/// Problems that were logged and still hold.
#[derive(Debug, Default)]
pub(crate) struct ProblemLog(BTreeSet<Problem>);

/// Problems that have come and gone.
#[derive(Debug, Default)]
pub(crate) struct ProblemChanges {
    pub(crate) new: Vec<Problem>,
    pub(crate) ended: Vec<Problem>,
}

impl ProblemLog {
    /// Records the current problems and returns the new ones, also those that have returned. The caller logs them,
    /// since the log has a limit for each place in the code.
    #[must_use]
    pub(crate) fn update(&mut self, current: impl IntoIterator<Item = Problem>) -> Vec<Problem> {
        self.exchange(current).new
    }

    /// The same, with those that have ended.
    #[must_use]
    pub(crate) fn exchange(&mut self, current: impl IntoIterator<Item = Problem>) -> ProblemChanges {
        let current = sorted_set(current);
        let new = current.difference(&self.0).cloned().collect();
        let ended = self.0.difference(&current).cloned().collect();
        self.0 = current;
        ProblemChanges { new, ended }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_is_new_until_it_is_recorded_and_after_it_was_gone() {
        let mut log = ProblemLog::default();
        let mut new = |current: &[&str]| -> Vec<String> {
            let current = current.iter().map(|object| Problem::new(object, "", "broken"));
            log.update(current).into_iter().map(|problem| problem.object).collect()
        };
        assert_eq!(new(&["a"]), ["a"]);
        assert_eq!(new(&["a", "b"]), ["b"]);
        assert!(new(&["b"]).is_empty());
        assert_eq!(new(&["a", "b"]), ["a"]);
    }
}
