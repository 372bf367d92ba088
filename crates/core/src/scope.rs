//! Scopes of endpoints.

/// Endpoints of a Service port that a frontend leads to. Frontends of the same scope share a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// Endpoints in the whole cluster, as far as hints allow.
    Cluster,
    /// Endpoints on this node: a ClusterIP with internal traffic policy Local.
    Local,
    /// None: `loadBalancerSourceRanges` do not let this VM in.
    Denied,
}
