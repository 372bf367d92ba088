//! Sockets that are connected through cproxy.

use std::net::IpAddr;

use cproxy_core::printable;
use cproxy_datapath::sockets::TranslatedSocket;
use serde::Serialize;

use super::{
    address::BackendAddress,
    names::{FrontendLabel, Names},
    table::{Cell, Column, TableRow},
};

/// Socket in the output of commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SocketRow {
    /// namespace/name; `None` without an agent, or if the agent has no such frontend.
    pub service: Option<String>,
    /// Name of the Service's port; `None` as `service`.
    pub port_name: Option<String>,
    /// TCP or UDP.
    pub protocol: String,
    /// Address that the application connected to.
    pub address: IpAddr,
    /// Port that the application connected to.
    pub port: u16,
    /// Source, such as ClusterIP; `None` as `service`.
    pub source: Option<String>,
    /// Backend that the socket is connected to.
    pub backend: BackendAddress,
    /// serving, refused, stale or no-frontend.
    pub state: String,
    /// Times that what it has sent last was sent again, so far without an acknowledgement.
    pub retransmits: u8,
    /// Local address of the socket.
    pub local: BackendAddress,
    /// Inode number of its network namespace.
    pub netns: u64,
    /// User that owns the socket.
    pub uid: u32,
    /// A process that has the socket open.
    pub pid: u32,
    /// Name of that process; `None` if it has ended meanwhile.
    pub command: Option<String>,
}

impl SocketRow {
    /// Adds the agent's facts about the socket's frontend.
    #[must_use]
    pub fn new(socket: &TranslatedSocket, names: &Names) -> Self {
        let TranslatedSocket { frontend, backend, local, netns, state, retransmits, uid, pid, command } = socket;
        let FrontendLabel { service, port_name, source } = names.label(frontend);
        Self {
            service,
            port_name,
            protocol: frontend.protocol.to_string(),
            address: frontend.address.into(),
            port: frontend.port,
            source,
            backend: backend.into(),
            state: state.as_str().to_owned(),
            retransmits: *retransmits,
            local: local.into(),
            netns: *netns,
            uid: *uid,
            pid: *pid,
            command: command.clone(),
        }
    }
}

impl TableRow for SocketRow {
    const COLUMNS: &'static [Column] = &[
        Column::fixed("PROTOCOL").rank(1),
        Column::fixed("LOCAL").rank(3),
        Column::fixed("FRONTEND"),
        Column::fixed("BACKEND"),
        Column::fixed("STATE"),
        Column::name("SERVICE").rank(2),
        Column::fixed("NETNS").rank(5),
        Column::fixed("UID").rank(4),
        Column::name("PROCESS"),
    ];

    type Key = (u64, u32, String);

    fn key(&self) -> Self::Key {
        (self.netns, self.pid, self.name())
    }

    fn cells(&self) -> Vec<Cell> {
        let frontend = BackendAddress { address: self.address, port: self.port }.to_string();
        let command = self.command.as_deref().map_or_else(|| "-".to_owned(), printable);
        vec![
            Cell::Text(self.protocol.clone()),
            Cell::Text(self.local.to_string()),
            Cell::Text(frontend),
            Cell::Text(self.backend.to_string()),
            Cell::Text(self.state.clone()),
            Cell::or_dash(self.service.as_deref()),
            Cell::Text(self.netns.to_string()),
            Cell::Text(self.uid.to_string()),
            Cell::Text(format!("{}/{command}", self.pid)),
        ]
    }
}

impl SocketRow {
    /// Local address, port and protocol.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}/{}", self.local, self.protocol)
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::{Backend, Frontend, KernelSet, Protocol, parse_address};
    use cproxy_datapath::sockets::BackendState;

    use super::*;
    use crate::report::{FrontendRow, Layout, table_text};

    fn socket(state: BackendState, command: Option<&str>) -> TranslatedSocket {
        let at = |address: &str, port| Backend { address: parse_address(address).unwrap(), port };
        TranslatedSocket {
            frontend: Frontend { address: parse_address("fd00::a").unwrap(), port: 53, protocol: Protocol::Udp },
            backend: at("fd01::7", 5353),
            local: at("fd01::1", 40_000),
            netns: 4_026_531_840,
            state,
            retransmits: 3,
            uid: 1_000,
            pid: 77,
            command: command.map(str::to_owned),
        }
    }

    fn names() -> Names {
        let frontend = socket(BackendState::Stale, None).frontend;
        let unnamed = FrontendRow::unnamed(frontend, &KernelSet::default());
        let [service, port_name, source] = ["kube-system/dns", "dns", "ClusterIP"].map(|name| Some(name.to_owned()));
        Names::from_iter([FrontendRow { service, port_name, source, ..unnamed }])
    }

    #[test]
    fn json_is_the_contract() {
        let row = SocketRow::new(&socket(BackendState::NoFrontend, Some("dig")), &Names::default());
        let value: serde_json::Value = serde_json::to_value([row]).unwrap();
        let expected = serde_json::json!([{
            "service": null, "port_name": null, "protocol": "UDP", "address": "fd00::a", "port": 53, "source": null,
            "backend": {"address": "fd01::7", "port": 5353}, "state": "no-frontend",
            "retransmits": 3, "local": {"address": "fd01::1", "port": 40000},
            "netns": 4_026_531_840_u64, "uid": 1000, "pid": 77, "command": "dig",
        }]);
        assert_eq!(value, expected);
    }

    #[test]
    fn a_process_name_never_breaks_its_line() {
        let sockets = [socket(BackendState::Stale, Some("a\n\u{1b}[2Jb")), socket(BackendState::Serving, None)];
        let text = table_text(&sockets.map(|socket| SocketRow::new(&socket, &names())), Layout::Plain);
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let lines: Vec<_> = text.lines().map(words).collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
        let expected = "UDP [fd01::1]:40000 [fd00::a]:53 [fd01::7]:5353 serving kube-system/dns 4026531840 1000 77/-";
        assert_eq!(lines[2], words(expected));
    }
}
