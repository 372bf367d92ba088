//! Services as a running agent sees them, for `cproxy explain`.

use serde::Serialize;
use serde_json::Value;

use super::{
    explanations::EndpointRow,
    fields::{bool_of, list_of, number_of, text_of, texts_of},
    frontends::FrontendRow,
    source::SourceReport,
};

/// An agent's view of the Services that `cproxy explain` asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AgentReport {
    /// Services that have the address, or the Service of the name.
    pub services: Vec<ServiceReport>,
    /// Reason why the source's Service of that name or ClusterIP is not served; `None` without such a Service, or if
    /// the source could not be asked.
    pub unserved: Option<UnservedReport>,
    /// Source that the agent follows.
    pub source: SourceReport,
    /// Parts of the source that cannot be read, and may have any object. An earlier agent does not say.
    pub unread: Vec<String>,
    /// Name of this node, if it was given.
    pub node_name: Option<String>,
    /// Whether the Node of that name is known.
    pub has_node: bool,
    /// Seconds since the agent's first complete table; `None` before that.
    pub synced_seconds: Option<u64>,
}

impl AgentReport {
    /// Report as an agent has sent it; `None` if it has another form.
    #[must_use]
    pub fn read(report: &Value) -> Option<Self> {
        Some(Self {
            services: list_of(report, "services", ServiceReport::read)?,
            unserved: report.get("unserved").and_then(UnservedReport::read),
            source: SourceReport::read(report.get("source")?)?,
            unread: texts_of(report, "unread").unwrap_or_default(),
            node_name: text_of(report, "node_name"),
            has_node: bool_of(report, "has_node")?,
            synced_seconds: number_of(report, "synced_seconds"),
        })
    }
}

/// One Service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
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

impl ServiceReport {
    fn read(report: &Value) -> Option<Self> {
        Some(Self {
            service: text_of(report, "service")?,
            frontends: list_of(report, "frontends", FrontendRow::read)?,
            slices: number_of(report, "slices")?,
            endpoints: list_of(report, "endpoints", EndpointRow::read)?,
            problems: texts_of(report, "problems")?,
            last_change: report.get("last_change").and_then(ChangeRow::read),
        })
    }
}

/// Change of a Service's backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ChangeRow {
    /// Seconds since then.
    pub seconds_ago: u64,
    /// Number of backends for new connections before; `None` if the Service was new.
    pub before: Option<u32>,
    /// Number of backends for new connections since then.
    pub after: u32,
}

impl ChangeRow {
    fn read(row: &Value) -> Option<Self> {
        let seconds_ago = number_of(row, "seconds_ago")?;
        Some(Self { seconds_ago, before: number_of(row, "before"), after: number_of(row, "after")? })
    }
}

/// Service of the source that is not served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnservedReport {
    /// namespace/name
    pub service: String,
    /// Name of the rule, for scripts. An earlier agent does not say.
    pub code: String,
    /// Reason.
    pub reason: String,
}

impl UnservedReport {
    fn read(report: &Value) -> Option<Self> {
        let code = text_of(report, "code").unwrap_or_default();
        Some(Self { service: text_of(report, "service")?, code, reason: text_of(report, "reason")? })
    }
}

/// Code of a Service whose pods are called directly.
pub const HEADLESS: &str = "headless";
/// Code of a Service that is another name in DNS.
pub const EXTERNAL_NAME: &str = "external-name";
