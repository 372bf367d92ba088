//! Log of problems that hold for a while: each is logged once.

use std::collections::BTreeSet;

use cproxy_core::Problem;

/// Problems that were logged and still hold.
#[derive(Debug, Default)]
pub(crate) struct ProblemLog(BTreeSet<Problem>);

impl ProblemLog {
    /// Logs those of the current problems that are new. One that returns is logged again.
    pub(crate) fn update(&mut self, current: impl IntoIterator<Item = Problem>) {
        let current = BTreeSet::from_iter(current);
        for problem in current.difference(&self.0) {
            tracing::warn!("{problem}");
        }
        self.0 = current;
    }
}
