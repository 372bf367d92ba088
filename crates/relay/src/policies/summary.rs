//! Numbers about policies, for metrics.

/// Numbers about policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicySummary {
    /// All changes up to this version are published.
    pub version: u64,
    /// Number of pods.
    pub pods: usize,
    /// Number of sets that policies name.
    pub sets: usize,
    /// Rules that name sets beyond the bounds of one pod.
    pub oversized: usize,
    /// Number of clients that watch policies, or wait for other sets.
    pub watchers: usize,
}
