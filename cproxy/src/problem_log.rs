//! Record of logged problems: those that hold for a while are logged once.

use std::collections::BTreeSet;

use cproxy_core::Problem;

/// Problems that were logged and still hold.
#[derive(Debug, Default)]
pub(crate) struct ProblemLog(BTreeSet<Problem>);

impl ProblemLog {
    /// Records the current problems and returns the new ones, also those that have returned. The caller logs them,
    /// since the log has a limit for each place in the code.
    #[must_use]
    pub(crate) fn update(&mut self, current: impl IntoIterator<Item = Problem>) -> Vec<Problem> {
        let current = BTreeSet::from_iter(current);
        let new = current.difference(&self.0).cloned().collect();
        self.0 = current;
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_is_new_until_it_is_recorded_and_after_it_was_gone() {
        let [a, b] = ["a", "b"].map(|name| Problem::new(name, "", "broken"));
        let mut log = ProblemLog::default();
        assert_eq!(log.update([a.clone()]), [a.clone()]);
        assert_eq!(log.update([a.clone(), b.clone()]), [b.clone()]);
        assert_eq!(log.update([b.clone()]), []);
        assert_eq!(log.update([a.clone(), b]), [a]);
    }
}
