//! The table in the form of the JSON contract, and as text.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::model::{Action, Backend, Frontend, Protocol, Row, printable};

/// How many backends a line of text names before it only counts.
const BACKENDS_NAMED_MAX: usize = 6;

/// A frontend as commands print it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct ReportRow {
    /// namespace/name; `None` if only the kernel could be asked.
    pub service: Option<String>,
    /// The name of the Service's port; `None` if only the kernel could be asked.
    pub port_name: Option<String>,
    /// TCP or UDP.
    pub protocol: String,
    /// What clients connect to.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// ClusterIP; `None` if only the kernel could be asked.
    pub source: Option<String>,
    /// forward or refuse.
    pub action: String,
    /// For how long a client keeps its backend; `None` without session affinity.
    pub session_affinity_seconds: Option<u32>,
    /// Sorted by address and port; empty unless `action` is forward.
    pub backends: Vec<ReportBackend>,
}

/// A backend as commands print it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct ReportBackend {
    /// The endpoint's address.
    pub address: IpAddr,
    /// Its own port.
    pub port: u16,
}

impl From<&Row> for ReportRow {
    fn from(row: &Row) -> Self {
        Self {
            service: Some(row.service.to_string()),
            port_name: Some(row.port_name.to_string()),
            source: Some(row.source.as_str().to_owned()),
            action: row.action().as_str().to_owned(),
            ..Self::unnamed(row.frontend, &row.backends)
        }
    }
}

impl ReportRow {
    /// A row of which only the kernel's part is known.
    #[must_use]
    pub fn unnamed(frontend: Frontend, backends: &[Backend]) -> Self {
        let action = if backends.is_empty() { Action::Refuse } else { Action::Forward };
        Self {
            service: None,
            port_name: None,
            protocol: frontend.protocol.to_string(),
            address: frontend.address.into(),
            port: frontend.port,
            source: None,
            action: action.as_str().to_owned(),
            session_affinity_seconds: None,
            backends: backends.iter().map(|b| ReportBackend { address: b.address.into(), port: b.port }).collect(),
        }
    }

    /// The frontend it is about, if its protocol is one.
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

/// The rows as the JSON array of the contract.
///
/// # Errors
/// Never for these types.
pub fn json(rows: &[ReportRow]) -> serde_json::Result<String> {
    serde_json::to_string_pretty(rows)
}

/// The rows as aligned columns.
#[must_use]
pub fn text(rows: &[ReportRow]) -> String {
    let header = ["SERVICE", "PORT", "FRONTEND", "SOURCE", "ACTION", "BACKENDS"].map(str::to_owned);
    let lines: Vec<_> = std::iter::once(header).chain(rows.iter().map(cells)).collect();
    let widths: Vec<_> =
        (0..6).map(|column| lines.iter().filter_map(|line| line.get(column)).map(String::len).max()).collect();
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

fn cells(row: &ReportRow) -> [String; 6] {
    let or_dash = |cell: &Option<String>| {
        cell.as_deref().filter(|cell| !cell.is_empty()).map_or_else(|| "-".to_owned(), printable)
    };
    let frontend = row.frontend().map_or_else(String::new, |frontend| frontend.to_string());
    [or_dash(&row.service), or_dash(&row.port_name), frontend, or_dash(&row.source), row.action.clone(), backends(row)]
}

fn backends(row: &ReportRow) -> String {
    let name = |backend: &ReportBackend| Backend { address: backend.address.into(), port: backend.port }.to_string();
    let mut names: Vec<_> = row.backends.iter().take(BACKENDS_NAMED_MAX).map(name).collect();
    match row.backends.len().saturating_sub(BACKENDS_NAMED_MAX) {
        0 => {}
        more => names.push(format!("and {more} more")),
    }
    if names.is_empty() { "-".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::parse_address;

    fn row(address: &str, backends: usize) -> ReportRow {
        let frontend = Frontend { address: parse_address(address).unwrap(), port: 80, protocol: Protocol::Tcp };
        let backend = |index| Backend { address: parse_address(&format!("10.0.0.{index}")).unwrap(), port: 8080 };
        ReportRow::unnamed(frontend, &(1..=backends).map(backend).collect::<Vec<_>>())
    }

    #[test]
    fn json_is_the_contract() {
        let json = json(&[row("FD00:0:0::1", 1)]).unwrap();
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        let expected = serde_json::json!([{
            "service": null, "port_name": null, "protocol": "TCP", "address": "fd00::1", "port": 80, "source": null,
            "action": "forward", "session_affinity_seconds": null,
            "backends": [{"address": "10.0.0.1", "port": 8080}],
        }]);
        assert_eq!(value, expected);
    }

    #[test]
    fn text_names_some_backends_and_counts_the_rest() {
        let text = text(&[row("10.96.0.1", 8), row("10.96.0.2", 0)]);
        assert!(text.contains("10.0.0.6:8080, and 2 more"), "{text}");
        assert!(text.lines().nth(2).unwrap().ends_with("refuse    -"), "{text}");
    }
}
