//! Backends, each with the frontends that lead to it.

use std::{collections::BTreeMap, net::IpAddr};

use cproxy_core::{Backend, Frontend, KernelTable, Protocol, printable, sort_few, sort_unique};
use serde::Serialize;

use super::{
    names::{FrontendLabel, Names},
    table::{Cell, Column, TableRow},
};

/// Backend in the output of commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BackendRow {
    /// TCP or UDP.
    pub protocol: String,
    /// Address of the endpoint.
    pub address: IpAddr,
    /// Port on which the endpoint listens.
    pub port: u16,
    /// Whether any frontend gives it new connections; otherwise it only keeps those that it has.
    pub eligible: bool,
    /// Sorted by address and port.
    pub frontends: Vec<BackendFrontend>,
}

/// Frontend that leads to a backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BackendFrontend {
    /// namespace/name; `None` without an agent.
    pub service: Option<String>,
    /// Name of the Service's port; `None` without an agent.
    pub port_name: Option<String>,
    /// Address that clients connect to.
    pub address: IpAddr,
    /// Port that clients connect to.
    pub port: u16,
    /// Source, such as ClusterIP; `None` without an agent.
    pub source: Option<String>,
    /// Whether new connections of this frontend go to the backend.
    pub eligible: bool,
}

/// Each distinct backend that the kernel holds, sorted by address, port and protocol.
#[must_use]
pub fn backend_rows(kernel: &KernelTable, names: &Names) -> Vec<BackendRow> {
    let mut backends = BTreeMap::<(Backend, Protocol), Vec<(Frontend, bool)>>::new();
    for (&frontend, set) in &kernel.frontends {
        let Some(members) = kernel.sets.get(set).map(|set| &set.members) else { continue };
        let runs = [(members.eligible(), true), (members.kept(), false)];
        for (&backend, eligible) in runs.iter().flat_map(|(run, eligible)| run.iter().map(move |of| (of, *eligible))) {
            backends.entry((backend, frontend.protocol)).or_default().push((frontend, eligible));
        }
    }
    backends.into_iter().map(|((backend, protocol), frontends)| row(backend, protocol, frontends, names)).collect()
}

fn row(backend: Backend, protocol: Protocol, mut frontends: Vec<(Frontend, bool)>, names: &Names) -> BackendRow {
    sort_few(&mut frontends);
    let leading = |(frontend, eligible): &(Frontend, bool)| {
        let FrontendLabel { service, port_name, source } = names.label(frontend);
        let (address, port) = (frontend.address.into(), frontend.port);
        BackendFrontend { service, port_name, address, port, source, eligible: *eligible }
    };
    BackendRow {
        protocol: protocol.to_string(),
        address: backend.address.into(),
        port: backend.port,
        eligible: frontends.iter().any(|(_, eligible)| *eligible),
        frontends: frontends.iter().map(leading).collect(),
    }
}

impl TableRow for BackendRow {
    const COLUMNS: &'static [Column] = &[
        Column::fixed("BACKEND"),
        Column::fixed("ELIGIBLE"),
        Column::fixed("FRONTENDS").rank(1),
        Column::fixed("SERVICES"),
    ];

    type Key = (IpAddr, u16, String);

    fn key(&self) -> Self::Key {
        (self.address, self.port, self.protocol.clone())
    }

    fn cells(&self) -> Vec<Cell> {
        let mut services: Vec<_> = self.frontends.iter().filter_map(|frontend| frontend.service.as_deref()).collect();
        sort_unique(&mut services);
        vec![
            Cell::Text(self.name()),
            Cell::Text(eligible(self)),
            Cell::Text(self.frontends.len().to_string()),
            Cell::List(services.into_iter().map(printable).collect()),
        ]
    }
}

impl BackendRow {
    /// Address, port and protocol.
    #[must_use]
    pub fn name(&self) -> String {
        let backend = Backend { address: self.address.into(), port: self.port };
        format!("{backend}/{}", self.protocol)
    }
}

/// A Service may send new connections to it by one of its frontends, and by another one only keep those that are there.
fn eligible(row: &BackendRow) -> String {
    let count = row.frontends.iter().filter(|frontend| frontend.eligible).count();
    match row.frontends.len() {
        all if count == all => "yes".to_owned(),
        _ if count == 0 => "no".to_owned(),
        all => format!("for {count} of {all}"),
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::{KernelSet, Members, parse_address};

    use super::*;
    use crate::report::{FrontendRow, Layout, table_text};

    fn frontend(address: &str, protocol: Protocol) -> Frontend {
        Frontend { address: parse_address(address).unwrap(), port: 53, protocol }
    }

    fn backends(hosts: &[u8]) -> Vec<Backend> {
        let backend = |host| Backend { address: parse_address(&format!("10.0.0.{host}")).unwrap(), port: 5353 };
        hosts.iter().copied().map(backend).collect()
    }

    /// Two frontends with one set, one whose backends only keep connections, one of another protocol, and one without
    /// backends.
    fn table() -> KernelTable {
        let set = |eligible: &[u8], kept: &[u8]| KernelSet {
            members: Members::new(&backends(eligible), &backends(kept), false),
            ..KernelSet::default()
        };
        KernelTable {
            frontends: [
                (frontend("10.96.0.11", Protocol::Udp), 1),
                (frontend("10.96.0.10", Protocol::Udp), 1),
                (frontend("fd00::1", Protocol::Udp), 2),
                (frontend("10.96.0.10", Protocol::Tcp), 3),
                (frontend("10.96.0.12", Protocol::Tcp), 4),
                (frontend("10.96.0.13", Protocol::Tcp), 5),
            ]
            .into(),
            sets: [(1, set(&[2, 10], &[9])), (2, set(&[], &[2])), (3, set(&[2], &[])), (4, set(&[], &[]))].into(),
            ..KernelTable::default()
        }
    }

    fn names() -> Names {
        let row = |frontend, service: &str| {
            let [service, port_name, source] = [service, "", "ClusterIP"].map(|name| Some(name.to_owned()));
            let unnamed = FrontendRow::unnamed(frontend, &KernelSet::default());
            FrontendRow { service, port_name, source, ..unnamed }
        };
        let udp = |address| frontend(address, Protocol::Udp);
        Names::from_iter([
            row(udp("10.96.0.11"), "default/b"),
            row(udp("10.96.0.10"), "default/a"),
            row(udp("fd00::1"), "default/a"),
        ])
    }

    #[test]
    fn text_has_one_line_for_each_backend() {
        let expected = "\
BACKEND             ELIGIBLE     FRONTENDS   SERVICES
10.0.0.2:5353/TCP   yes          1           -
10.0.0.2:5353/UDP   for 2 of 3   3           default/a, default/b
10.0.0.9:5353/UDP   no           2           default/a, default/b
10.0.0.10:5353/UDP  yes          2           default/a, default/b
";
        let text = table_text(&backend_rows(&table(), &names()), Layout::Plain);
        let squeezed = |text: &str| {
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
        };
        assert_eq!(squeezed(&text), squeezed(expected), "{text}");
    }

    #[test]
    fn json_is_the_contract() {
        let rows = backend_rows(&table(), &names());
        let value: serde_json::Value = serde_json::to_value(&rows[1..3]).unwrap();
        let of = |service: &str, address: &str, eligible: bool| {
            serde_json::json!({
                "service": service, "port_name": "", "address": address, "port": 53, "source": "ClusterIP",
                "eligible": eligible,
            })
        };
        let expected = serde_json::json!([
            {"protocol": "UDP", "address": "10.0.0.2", "port": 5353, "eligible": true, "frontends": [
                of("default/a", "10.96.0.10", true), of("default/b", "10.96.0.11", true),
                of("default/a", "fd00::1", false),
            ]},
            {"protocol": "UDP", "address": "10.0.0.9", "port": 5353, "eligible": false, "frontends": [
                of("default/a", "10.96.0.10", false), of("default/b", "10.96.0.11", false),
            ]},
        ]);
        assert_eq!(value, expected);
        let unnamed = backend_rows(&table(), &Names::default());
        assert!(unnamed.iter().flat_map(|row| &row.frontends).all(|frontend| frontend.service.is_none()));
    }
}
