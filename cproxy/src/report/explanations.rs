//! Reasons why the endpoints of a Service are used or not.

use cproxy_core::{Explanation, ServiceName, printable};

use super::{columns::align_columns, frontends::FrontendRow};

/// A Service's frontends, and why endpoints are used or not, as a JSON object.
///
/// # Errors
/// Never for these types.
pub fn explanations_json(frontends: &[FrontendRow], explanations: &[Explanation]) -> serde_json::Result<String> {
    let object = |explanation: &Explanation| {
        serde_json::json!({
            "port_name": explanation.protocol.map(|_| &explanation.port_name),
            "protocol": explanation.protocol.map(|protocol| protocol.to_string()),
            "sources": explanation.sources.iter().map(|source| source.as_str()).collect::<Vec<_>>(),
            "endpoint": explanation.endpoint,
            "slice": explanation.slice.as_ref().map(ToString::to_string),
            "used": explanation.usage.as_str(),
            "reason": explanation.reason,
        })
    };
    let endpoints: Vec<_> = explanations.iter().map(object).collect();
    serde_json::to_string_pretty(&serde_json::json!({"frontends": frontends, "endpoints": endpoints}))
}

/// Why endpoints are used or not, as aligned columns.
#[must_use]
pub fn explanations_text(service: &ServiceName, explanations: &[Explanation]) -> String {
    let no_slice = if explanations.iter().any(|explanation| explanation.slice.is_some()) {
        String::new()
    } else {
        let ServiceName { namespace, name } = service;
        format!("No EndpointSlice in namespace {namespace} has the label kubernetes.io/service-name: {name}.\n")
    };
    if explanations.is_empty() {
        return no_slice;
    }
    let header = ["PORT", "FOR", "ENDPOINT", "SLICE", "USED", "WHY"].map(str::to_owned);
    let line = |explanation: &Explanation| {
        let or_dash = |text: String| if text.is_empty() { "-".to_owned() } else { printable(&text) };
        let port = explanation
            .protocol
            .map_or_else(String::new, |protocol| format!("{}/{protocol}", or_dash(explanation.port_name.clone())));
        let sources: Vec<_> = explanation.sources.iter().map(|source| source.as_str()).collect();
        let slice = explanation.slice.as_ref().map_or_else(String::new, |slice| slice.name.to_string());
        let endpoint = explanation.endpoint.clone();
        let usage = explanation.usage.as_str().to_owned();
        [port, sources.join(","), endpoint, slice, usage, explanation.reason.clone()].map(or_dash)
    };
    let table = align_columns(&std::iter::once(header).chain(explanations.iter().map(line)).collect::<Vec<_>>());
    format!(
        "{table}{no_slice}\n\
         USED  yes: gets new connections; keeps: gets none, and serves those that it has; no: neither\n"
    )
}
