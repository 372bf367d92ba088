//! Services as a running agent sees them, for `cproxy explain`.

use serde::{Deserialize, Serialize};

use super::{explanations::EndpointRow, frontends::FrontendRow, source::SourceReport};

/// An agent's view of the Services that `cproxy explain` asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentReport {
    /// Services that have the address, or the Service of the name.
    pub services: Vec<ServiceReport>,
    /// Reason why the source's Service of that name or ClusterIP is not served; `None` without such a Service, or if
    /// the source could not be asked.
    pub unserved: Option<UnservedReport>,
    /// Source that the agent follows.
    pub source: SourceReport,
    /// Parts of the source that cannot be read, and may have any object. An earlier agent does not say.
    #[serde(default)]
    pub unread: Vec<String>,
    /// Name of this node, if it was given.
    pub node_name: Option<String>,
    /// Whether the Node of that name is known.
    pub has_node: bool,
    /// Seconds since the agent's first complete table; `None` before that.
    pub synced_seconds: Option<u64>,
}

/// One Service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceReport {
    /// namespace/name
    pub service: String,
    /// Frontends that are its own, as the agent wants them.
    pub frontends: Vec<FrontendRow>,
    /// Number of its EndpointSlices.
    pub slices: usize,
    /// Its endpoints, and why they are used or not.
    pub endpoints: Vec<EndpointRow>,
    /// Problems of the Service and its slices.
    pub problems: Vec<String>,
    /// Last change of its backends, if it is one of the last few hundred Services that have changed since the agent's
    /// first complete table.
    pub last_change: Option<ChangeRow>,
}

/// Change of a Service's backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeRow {
    /// Seconds since then.
    pub seconds_ago: u64,
    /// Number of backends for new connections before; `None` if the Service was new.
    pub before: Option<u32>,
    /// Number of backends for new connections since then.
    pub after: u32,
}

/// Service of the source that is not served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnservedReport {
    /// namespace/name
    pub service: String,
    /// Name of the rule, for scripts. An earlier agent does not say.
    #[serde(default)]
    pub code: String,
    /// Reason.
    pub reason: String,
}

/// Code of a Service whose pods are called directly.
pub const HEADLESS: &str = "headless";
/// Code of a Service that is another name in DNS.
pub const EXTERNAL_NAME: &str = "external-name";
