//! State of the agent for `status_http`.

use super::Measures;

/// State of the agent, from the task that owns the table.
#[derive(Debug, Default)]
pub struct Status {
    /// Gauges, as `cproxy get counters` prints them.
    pub(crate) gauges: Vec<(&'static str, u64)>,
    pub(crate) measures: Measures,
    /// Text for each thing without which the agent is not ready.
    pub(crate) pending: Vec<String>,
    /// Whether a background task has ended.
    pub(crate) has_ended_task: bool,
    /// Whether the last check has shown programs without effect.
    pub(crate) has_hook_problem: bool,
    /// Whether the Node exists; `None` without `--node-name`.
    pub(crate) has_node: Option<bool>,
}
