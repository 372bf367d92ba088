//! Reasons why the endpoints of a Service are used or not.

use cproxy_core::{Explanation, ServiceName, printable};
use serde::Serialize;
use serde_json::Value;

use super::{
    columns::align_columns,
    fields::{text_of, texts_of},
    frontends::FrontendRow,
};

/// Use of one endpoint in the output of commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EndpointRow {
    /// Name of the Service port; `None` if the row is about a whole slice.
    pub port_name: Option<String>,
    /// TCP or UDP; `None` as `port_name`.
    pub protocol: Option<String>,
    /// Sources of the frontends that the row is about, such as ClusterIP.
    pub sources: Vec<String>,
    /// address:port, or a text in its place.
    pub endpoint: String,
    /// namespace/name of the slice; `None` if the row is about all slices.
    pub slice: Option<String>,
    /// yes, keeps or no.
    pub used: String,
    /// Name of the rule that decided, for scripts. An earlier agent does not say.
    pub code: String,
    /// Rule that decided.
    pub reason: String,
}

impl From<&Explanation> for EndpointRow {
    fn from(explanation: &Explanation) -> Self {
        let Explanation { port_name, protocol, sources, endpoint, slice, usage, code, reason } = explanation;
        Self {
            port_name: protocol.map(|_| port_name.clone()),
            protocol: protocol.map(|protocol| protocol.to_string()),
            sources: sources.iter().map(|source| source.as_str().to_owned()).collect(),
            endpoint: endpoint.clone(),
            slice: slice.as_ref().map(ToString::to_string),
            used: usage.as_str().to_owned(),
            code: (*code).to_owned(),
            reason: reason.clone(),
        }
    }
}

impl EndpointRow {
    pub(super) fn read(row: &Value) -> Option<Self> {
        Some(Self {
            port_name: text_of(row, "port_name"),
            protocol: text_of(row, "protocol"),
            sources: texts_of(row, "sources")?,
            endpoint: text_of(row, "endpoint")?,
            slice: text_of(row, "slice"),
            used: text_of(row, "used")?,
            code: text_of(row, "code").unwrap_or_default(),
            reason: text_of(row, "reason")?,
        })
    }
}

/// A Service's frontends, and why endpoints are used or not.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Explained<'a> {
    /// As `cproxy resolve` prints them.
    pub frontends: &'a [FrontendRow],
    /// Use of each endpoint.
    pub endpoints: &'a [EndpointRow],
}

/// Use of each endpoint of a Service, with the reason, as aligned columns. `slices` is the number of its slices.
#[must_use]
pub fn explanations_text(service: &ServiceName, slices: usize, endpoints: &[EndpointRow]) -> String {
    let nothing = match slices {
        0 => format!("{}.\n", missing_slice(service)),
        _ if endpoints.is_empty() => "Its EndpointSlices have no endpoint.\n".to_owned(),
        _ => String::new(),
    };
    if endpoints.is_empty() {
        return nothing;
    }
    format!(
        "{}{nothing}\n\
         USED  yes: gets new connections; keeps: gets none, and serves those that it has; no: neither\n",
        endpoints_text(endpoints)
    )
}

/// Reason of a Service that has no slice.
pub(crate) fn missing_slice(ServiceName { namespace, name }: &ServiceName) -> String {
    format!("No EndpointSlice in namespace {namespace} has the label kubernetes.io/service-name: {name}")
}

/// Endpoints as aligned columns.
pub(crate) fn endpoints_text(endpoints: &[EndpointRow]) -> String {
    let header = ["PORT", "FOR", "ENDPOINT", "SLICE", "USED", "WHY"].map(str::to_owned);
    let line = |row: &EndpointRow| {
        let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { printable(text) };
        let port = row.protocol.as_ref().map_or_else(String::new, |protocol| {
            format!("{}/{protocol}", or_dash(row.port_name.as_deref().unwrap_or_default()))
        });
        let slice = row.slice.as_deref().unwrap_or_default();
        [&*port, &row.sources.join(","), &row.endpoint, slice, &row.used, &row.reason].map(or_dash)
    };
    align_columns(&std::iter::once(header).chain(endpoints.iter().map(line)).collect::<Vec<_>>())
}
