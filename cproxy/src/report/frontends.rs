//! Frontends with their backends.

use std::{
    io::{self, Write},
    net::IpAddr,
};

use cproxy_core::{Action, Backend, Frontend, FrontendName, KernelSet, Protocol, Row};
use cproxy_datapath::bpf::ServiceCounts;
use serde::Serialize;
use serde_json::Value;

use super::{
    address::{BackendAddress, address_of},
    fields::{list_of, number_of, text_of},
    json::indented,
    names::{FrontendLabel, Names},
    table::{Cell, Column, TableRow},
};

/// Frontend in the output of commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FrontendRow {
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
    pub backends: Vec<BackendAddress>,
    /// Connects, and first datagrams of a flow, that were sent to a backend; `None` unless the agent counts by Service.
    pub connections: Option<u64>,
    /// Calls that failed with ECONNREFUSED; `None` likewise.
    pub refused: Option<u64>,
    /// Calls that failed with EHOSTUNREACH; `None` likewise.
    pub dropped: Option<u64>,
}

impl From<&Row> for FrontendRow {
    fn from(row: &Row) -> Self {
        Self {
            service: Some(row.service.to_string()),
            port_name: Some(row.port_name.to_string()),
            source: Some(row.source.as_str().to_owned()),
            ..Self::new(row.frontend, row.action, row.session_affinity_seconds, row.backends())
        }
    }
}

impl FrontendRow {
    /// Row as an agent has sent it, without counters; `None` if it has another form.
    #[must_use]
    pub fn read(row: &Value) -> Option<Self> {
        Some(Self {
            service: text_of(row, "service"),
            port_name: text_of(row, "port_name"),
            protocol: text_of(row, "protocol")?,
            address: address_of(row)?,
            port: number_of(row, "port")?,
            source: text_of(row, "source"),
            action: text_of(row, "action")?,
            session_affinity_seconds: number_of(row, "session_affinity_seconds"),
            backends: list_of(row, "backends", BackendAddress::read)?,
            connections: None,
            refused: None,
            dropped: None,
        })
    }

    /// Row of the kernel's part, with the agent's names.
    #[must_use]
    pub fn named(frontend: Frontend, set: &KernelSet, names: &Names) -> Self {
        let FrontendLabel { service, port_name, source } = names.label(&frontend);
        Self { service, port_name, source, ..Self::unnamed(frontend, set) }
    }

    /// The same row with counters.
    #[must_use]
    pub fn counted(self, counts: ServiceCounts) -> Self {
        let ServiceCounts { connections, refusals, drops } = counts;
        Self { connections: Some(connections), refused: Some(refusals), dropped: Some(drops), ..self }
    }

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
            backends: backends.iter().map(BackendAddress::from).collect(),
            connections: None,
            refused: None,
            dropped: None,
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

impl FromIterator<FrontendRow> for Names {
    fn from_iter<Rows: IntoIterator<Item = FrontendRow>>(rows: Rows) -> Self {
        let mut names = Self::default();
        for row in rows {
            if let Some(frontend) = row.frontend() {
                let FrontendRow { service, port_name, source, .. } = row;
                names.insert(frontend, FrontendLabel { service, port_name, source });
            }
        }
        names
    }
}

/// Writes the rows as the JSON array of the contract, one at a time: each may have very many backends.
///
/// # Errors
/// The output cannot be written to.
pub fn write_frontends_json(rows: impl Iterator<Item = FrontendRow>, output: &mut dyn Write) -> io::Result<()> {
    let mut start = "[\n  ";
    for row in rows {
        output.write_all(start.as_bytes())?;
        output.write_all(indented(&serde_json::to_string(&row)?, 1).as_bytes())?;
        start = ",\n  ";
    }
    output.write_all(if start.starts_with(',') { b"\n]" } else { b"[]" })
}

/// End of a row without counters, which the answer for other processes leaves out: there may be very many rows.
const UNCOUNTED: &[u8] = b",\"connections\":null,\"refused\":null,\"dropped\":null}";

/// The JSON array of the contract, without backends and counters: one row at a time, since there may be very many.
#[must_use]
pub fn frontend_names_json<'a>(names: impl Iterator<Item = FrontendName<'a>>) -> Vec<u8> {
    let mut json = Vec::from(b"[");
    for FrontendName { frontend, service, port_name, source, action } in names {
        let row = FrontendRow {
            service: Some(service.to_string()),
            port_name: Some(port_name.to_owned()),
            source: Some(source.as_str().to_owned()),
            ..FrontendRow::new(frontend, action, None, &[])
        };
        if json.len() > 1 {
            json.push(b',');
        }
        // Writing to memory does not fail.
        serde_json::to_writer(&mut json, &row).ok();
        if json.ends_with(UNCOUNTED) {
            json.truncate(json.len() - UNCOUNTED.len());
            json.push(b'}');
        }
    }
    json.push(b']');
    json
}

impl TableRow for FrontendRow {
    const COLUMNS: &'static [Column] = &[
        Column::name("SERVICE"),
        Column::name("PORT").rank(1),
        Column::fixed("FRONTEND"),
        Column::fixed("SOURCE").rank(2),
        Column::fixed("ACTION"),
        Column::fixed("AFFINITY").rank(3),
        Column::fixed("BACKENDS"),
    ];

    type Key = (IpAddr, u16, String);

    fn key(&self) -> Self::Key {
        (self.address, self.port, self.protocol.clone())
    }

    fn cells(&self) -> Vec<Cell> {
        let frontend = self.frontend().map_or_else(String::new, |frontend| frontend.to_string());
        let affinity = self.session_affinity_seconds.map_or_else(|| "-".to_owned(), |seconds| format!("{seconds}s"));
        vec![
            Cell::or_dash(self.service.as_deref()),
            Cell::or_dash(self.port_name.as_deref()),
            Cell::Text(frontend),
            Cell::or_dash(self.source.as_deref()),
            Cell::Text(self.action.clone()),
            Cell::Text(affinity),
            Cell::List(self.backends.iter().map(ToString::to_string).collect()),
        ]
    }
}

/// Row of a frontend with its counters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct CountedRow(pub FrontendRow);

impl TableRow for CountedRow {
    const COLUMNS: &'static [Column] = &[
        Column::name("SERVICE"),
        Column::name("PORT"),
        Column::fixed("FRONTEND"),
        Column::fixed("SOURCE"),
        Column::fixed("ACTION"),
        Column::fixed("AFFINITY"),
        Column::fixed("CONNECTIONS"),
        Column::fixed("REFUSED"),
        Column::fixed("DROPPED"),
        Column::fixed("BACKENDS"),
    ];

    type Key = <FrontendRow as TableRow>::Key;

    fn key(&self) -> Self::Key {
        self.0.key()
    }

    fn cells(&self) -> Vec<Cell> {
        let mut cells = self.0.cells();
        let counts = [self.0.connections, self.0.refused, self.0.dropped];
        let counts = counts.map(|count| Cell::Text(count.unwrap_or_default().to_string()));
        let backends = cells.pop();
        cells.into_iter().chain(counts).chain(backends).collect()
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::{Affinity, Members, parse_address};

    use super::*;
    use crate::report::{Layout, table_text};

    fn row(address: &str, backends: usize, seconds: u32) -> FrontendRow {
        let frontend = Frontend { address: parse_address(address).unwrap(), port: 80, protocol: Protocol::Tcp };
        let backend = |index| Backend { address: parse_address(&format!("10.0.0.{index}")).unwrap(), port: 8080 };
        let members = Members::new(&(1..=backends).map(backend).collect::<Vec<_>>(), &[backend(99)], true);
        FrontendRow::unnamed(frontend, &KernelSet { first_slot: 0, members, affinity: Affinity { id: 7, seconds } })
    }

    #[test]
    fn json_is_the_contract() {
        let mut json = Vec::new();
        write_frontends_json([row("FD00:0:0::1", 1, 0)].into_iter(), &mut json).unwrap();
        let value: Value = serde_json::from_slice(&json).unwrap();
        let expected = serde_json::json!([{
            "service": null, "port_name": null, "protocol": "TCP", "address": "fd00::1", "port": 80, "source": null,
            "action": "forward", "session_affinity_seconds": null,
            "backends": [{"address": "10.0.0.1", "port": 8080}],
            "connections": null, "refused": null, "dropped": null,
        }]);
        assert_eq!(value, expected);
    }

    #[test]
    fn text_names_some_backends_and_counts_the_rest() {
        let text = table_text(&[row("10.96.0.1", 8, 60), row("10.96.0.2", 0, 0)], Layout::Plain);
        assert!(text.contains("10.0.0.6:8080, and 2 more"), "{text}");
        assert!(text.lines().nth(1).unwrap().contains("forward   60s"), "{text}");
        assert!(text.lines().nth(2).unwrap().ends_with("drop      -          -"), "{text}");
    }
}
