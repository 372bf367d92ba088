//! The table in the form of the JSON contract, and as text.

mod backends;
mod sockets;

use std::{collections::HashMap, io::Write, net::IpAddr};

pub use backends::{BackendFrontend, BackendRow, backend_rows, backends_json, backends_text};
use cproxy_core::{Action, Backend, Explanation, Frontend, FrontendName, KernelSet, Protocol, Row, printable};
use serde::{Deserialize, Serialize, Serializer as _};
pub use sockets::{SocketRow, sockets_json, sockets_text};

/// Rows of a running agent, by frontend; empty without one.
pub type Names = HashMap<Frontend, ReportRow>;

/// Maximum number of backends or Services that a line of text names; it only counts the others.
const NAMED_MAX: usize = 6;

/// Frontend in the output of commands.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct ReportRow {
    /// namespace/name; `None` without an agent.
    pub service: Option<String>,
    /// Name of the Service's port; `None` without an agent.
    pub port_name: Option<String>,
    /// TCP or UDP.
    pub protocol: String,
    /// Address that clients connect to.
    pub address: IpAddr,
    /// Port that clients connect to.
    pub port: u16,
    /// Source, such as ClusterIP; `None` without an agent.
    pub source: Option<String>,
    /// forward, refuse or drop.
    pub action: String,
    /// Time for which a client keeps its backend; `None` without session affinity.
    pub session_affinity_seconds: Option<u32>,
    /// Sorted by address and port; empty unless `action` is forward.
    pub backends: Vec<ReportBackend>,
}

/// Backend in the output of commands.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct ReportBackend {
    /// Address of the endpoint.
    pub address: IpAddr,
    /// Port on which the endpoint listens.
    pub port: u16,
}

impl From<&Backend> for ReportBackend {
    fn from(backend: &Backend) -> Self {
        Self { address: backend.address.into(), port: backend.port }
    }
}

impl From<&Row> for ReportRow {
    fn from(row: &Row) -> Self {
        Self {
            service: Some(row.service.to_string()),
            port_name: Some(row.port_name.to_string()),
            source: Some(row.source.as_str().to_owned()),
            ..Self::new(row.frontend, row.action, row.session_affinity_seconds, row.backends())
        }
    }
}

impl ReportRow {
    /// Row with only the kernel's part.
    #[must_use]
    pub fn unnamed(frontend: Frontend, set: &KernelSet) -> Self {
        let backends = set.members.eligible();
        let action = Action::of(!backends.is_empty(), set.members.drops);
        Self::new(frontend, action, set.affinity.seconds(), backends)
    }

    fn new(frontend: Frontend, action: Action, affinity_seconds: Option<u32>, backends: &[Backend]) -> Self {
        Self {
            service: None,
            port_name: None,
            protocol: frontend.protocol.to_string(),
            address: frontend.address.into(),
            port: frontend.port,
            source: None,
            action: action.as_str().to_owned(),
            session_affinity_seconds: affinity_seconds,
            backends: backends.iter().map(ReportBackend::from).collect(),
        }
    }

    /// Frontend of the row, if its protocol is known.
    #[must_use]
    pub fn frontend(&self) -> Option<Frontend> {
        let protocol = match self.protocol.as_str() {
            "TCP" => Protocol::Tcp,
            "UDP" => Protocol::Udp,
            _ => return None,
        };
        Some(Frontend { address: self.address.into(), port: self.port, protocol })
    }
}

/// Writes the rows as the JSON array of the contract, one at a time: each may have very many backends.
///
/// # Errors
/// The output cannot be written to.
pub fn write_frontends_json(rows: impl Iterator<Item = ReportRow>, output: impl Write) -> serde_json::Result<()> {
    serde_json::Serializer::pretty(output).collect_seq(rows)
}

/// The JSON array of the contract, without backends: one row at a time, since there may be very many.
#[must_use]
pub fn frontend_names_json<'a>(names: impl Iterator<Item = FrontendName<'a>>) -> Vec<u8> {
    let mut json = Vec::from(b"[");
    for FrontendName { frontend, service, port_name, source, action } in names {
        let row = ReportRow {
            service: Some(service.to_string()),
            port_name: Some(port_name.to_owned()),
            source: Some(source.as_str().to_owned()),
            ..ReportRow::new(frontend, action, None, &[])
        };
        if json.len() > 1 {
            json.push(b',');
        }
        // Writing to memory does not fail.
        serde_json::to_writer(&mut json, &row).ok();
    }
    json.push(b']');
    json
}

/// The rows as aligned columns.
#[must_use]
pub fn frontends_text(rows: impl Iterator<Item = ReportRow>) -> String {
    let header = ["SERVICE", "PORT", "FRONTEND", "SOURCE", "ACTION", "AFFINITY", "BACKENDS"].map(str::to_owned);
    align_columns(&std::iter::once(header).chain(rows.map(|row| cells(&row))).collect::<Vec<_>>())
}

/// Counters as the JSON object of the contract.
///
/// # Errors
/// Never for these types.
pub fn counters_json(counters: &[(String, u64)]) -> serde_json::Result<String> {
    let object: serde_json::Map<_, _> = counters.iter().map(|(name, count)| (name.clone(), (*count).into())).collect();
    serde_json::to_string_pretty(&object)
}

/// Counters as aligned columns.
#[must_use]
pub fn counters_text(counters: &[(String, u64)]) -> String {
    let header = ["COUNTER", "VALUE"].map(str::to_owned);
    let line = |(name, count): &(String, u64)| [name.clone(), count.to_string()];
    align_columns(&std::iter::once(header).chain(counters.iter().map(line)).collect::<Vec<_>>())
}

/// A Service's frontends, and why endpoints are used or not, as a JSON object.
///
/// # Errors
/// Never for these types.
pub fn explanations_json(frontends: &[ReportRow], explanations: &[Explanation]) -> serde_json::Result<String> {
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
pub fn explanations_text(explanations: &[Explanation]) -> String {
    let no_slice = if explanations.iter().any(|explanation| explanation.slice.is_some()) {
        ""
    } else {
        "No EndpointSlice says that it is this Service's (namespace, and label kubernetes.io/service-name).\n"
    };
    if explanations.is_empty() {
        return no_slice.to_owned();
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
        "{table}{no_slice}\nUSED  yes: gets new connections; keeps: gets none, and serves those that it has; no: neither\n"
    )
}

fn align_columns<const COLUMNS: usize>(lines: &[[String; COLUMNS]]) -> String {
    let widths: Vec<_> =
        (0..COLUMNS).map(|column| lines.iter().filter_map(|line| line.get(column)).map(String::len).max()).collect();
    let mut text = String::new();
    for line in lines {
        let mut padded = String::new();
        for (cell, width) in line.iter().zip(&widths) {
            padded.push_str(&format!("{cell:width$}   ", width = width.unwrap_or(0)));
        }
        text.push_str(padded.trim_end());
        text.push('\n');
    }
    text
}

fn cells(row: &ReportRow) -> [String; 7] {
    let frontend = row.frontend().map_or_else(String::new, |frontend| frontend.to_string());
    let affinity = row.session_affinity_seconds.map_or_else(|| "-".to_owned(), |seconds| format!("{seconds}s"));
    let (service, port, source) =
        (or_dash(row.service.as_deref()), or_dash(row.port_name.as_deref()), or_dash(row.source.as_deref()));
    [service, port, frontend, source, row.action.clone(), affinity, backends(row)]
}

fn backends(row: &ReportRow) -> String {
    let name = |backend: &ReportBackend| Backend { address: backend.address.into(), port: backend.port }.to_string();
    list_first(row.backends.len(), row.backends.iter().map(name))
}

fn or_dash(cell: Option<&str>) -> String {
    cell.filter(|cell| !cell.is_empty()).map_or_else(|| "-".to_owned(), printable)
}

/// First names of a list, and the number of the others.
fn list_first(count: usize, names: impl Iterator<Item = String>) -> String {
    let mut names: Vec<_> = names.take(NAMED_MAX).collect();
    match count.saturating_sub(NAMED_MAX) {
        0 => {}
        more => names.push(format!("and {more} more")),
    }
    if names.is_empty() { "-".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use cproxy_core::{Affinity, Members, parse_address};

    use super::*;

    fn row(address: &str, backends: usize, seconds: u32) -> ReportRow {
        let frontend = Frontend { address: parse_address(address).unwrap(), port: 80, protocol: Protocol::Tcp };
        let backend = |index| Backend { address: parse_address(&format!("10.0.0.{index}")).unwrap(), port: 8080 };
        let members = Members::new(&(1..=backends).map(backend).collect::<Vec<_>>(), &[backend(99)], true);
        ReportRow::unnamed(frontend, &KernelSet { first_slot: 0, members, affinity: Affinity { id: 7, seconds } })
    }

    #[test]
    fn json_is_the_contract() {
        let mut json = Vec::new();
        write_frontends_json([row("FD00:0:0::1", 1, 0)].into_iter(), &mut json).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&json).unwrap();
        let expected = serde_json::json!([{
            "service": null, "port_name": null, "protocol": "TCP", "address": "fd00::1", "port": 80, "source": null,
            "action": "forward", "session_affinity_seconds": null,
            "backends": [{"address": "10.0.0.1", "port": 8080}],
        }]);
        assert_eq!(value, expected);
    }

    #[test]
    fn text_names_some_backends_and_counts_the_rest() {
        let text = frontends_text([row("10.96.0.1", 8, 60), row("10.96.0.2", 0, 0)].into_iter());
        assert!(text.contains("10.0.0.6:8080, and 2 more"), "{text}");
        assert!(text.lines().nth(1).unwrap().contains("forward   60s"), "{text}");
        assert!(text.lines().nth(2).unwrap().ends_with("drop      -          -"), "{text}");
    }
}
