//! State of the canary.

use cproxy_core::Exclusions;
use cproxy_datapath::canary::Route;

/// State of the canary, from the task that owns the table.
#[derive(Debug, Default)]
pub struct CanaryState {
    /// Its routes in the kernel's table; `None` before the first complete sync.
    pub(crate) routes: Option<Vec<Route>>,
    /// Addresses that are configured and have no routes.
    pub(crate) untried: Vec<Untried>,
    /// Exclusions, which may concern the agent.
    pub(crate) exclusions: Exclusions,
}

/// Address of the canary that is configured and cannot be tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Untried {
    /// The family and why.
    pub(crate) reason: String,
    /// Whether the machine does not have that family.
    pub(crate) is_absent: bool,
}
