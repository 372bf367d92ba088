//! Sockets that are connected through cproxy.

use std::net::IpAddr;

use cproxy_datapath::sockets::TranslatedSocket;
use serde::Serialize;

use super::{
    address::BackendAddress,
    columns::{align_columns, or_dash},
    names::{FrontendLabel, Names},
};

/// Socket in the output of commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
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
    /// serving, stale or no-frontend.
    pub state: String,
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
        let TranslatedSocket { frontend, backend, local, netns, state, uid, pid, command } = socket;
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
            local: local.into(),
            netns: *netns,
            uid: *uid,
            pid: *pid,
            command: command.clone(),
        }
    }
}

/// Sockets as the JSON array of the contract.
///
/// # Errors
/// Never for these types.
pub fn sockets_json(rows: &[SocketRow]) -> serde_json::Result<String> {
    serde_json::to_string_pretty(rows)
}

/// Sockets as aligned columns.
#[must_use]
pub fn sockets_text(rows: &[SocketRow]) -> String {
    let header = ["PROTOCOL", "LOCAL", "FRONTEND", "BACKEND", "STATE", "SERVICE", "NETNS", "UID", "PROCESS"];
    let lines = std::iter::once(header.map(str::to_owned)).chain(rows.iter().map(cells));
    align_columns(&lines.collect::<Vec<_>>())
}

fn cells(row: &SocketRow) -> [String; 9] {
    let process = format!("{}/{}", row.pid, or_dash(row.command.as_deref()));
    [
        row.protocol.clone(),
        row.local.to_string(),
        BackendAddress { address: row.address, port: row.port }.to_string(),
        row.backend.to_string(),
        row.state.clone(),
        or_dash(row.service.as_deref()),
        row.netns.to_string(),
        row.uid.to_string(),
        process,
    ]
}

#[cfg(test)]
mod tests {
    use cproxy_core::{Backend, Frontend, KernelSet, Protocol, parse_address};
    use cproxy_datapath::sockets::BackendState;

    use super::*;
    use crate::report::FrontendRow;

    fn socket(state: BackendState, command: Option<&str>) -> TranslatedSocket {
        let at = |address: &str, port| Backend { address: parse_address(address).unwrap(), port };
        TranslatedSocket {
            frontend: Frontend { address: parse_address("fd00::a").unwrap(), port: 53, protocol: Protocol::Udp },
            backend: at("fd01::7", 5353),
            local: at("fd01::1", 40_000),
            netns: 4_026_531_840,
            state,
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
        let value: serde_json::Value = serde_json::from_str(&sockets_json(&[row]).unwrap()).unwrap();
        let expected = serde_json::json!([{
            "service": null, "port_name": null, "protocol": "UDP", "address": "fd00::a", "port": 53, "source": null,
            "backend": {"address": "fd01::7", "port": 5353}, "state": "no-frontend",
            "local": {"address": "fd01::1", "port": 40000},
            "netns": 4_026_531_840_u64, "uid": 1000, "pid": 77, "command": "dig",
        }]);
        assert_eq!(value, expected);
    }

    #[test]
    fn a_process_name_never_breaks_its_line() {
        let sockets = [socket(BackendState::Stale, Some("a\n\u{1b}[2Jb")), socket(BackendState::Serving, None)];
        let text = sockets_text(&sockets.map(|socket| SocketRow::new(&socket, &names())));
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let lines: Vec<_> = text.lines().map(words).collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
        let expected = "UDP [fd01::1]:40000 [fd00::a]:53 [fd01::7]:5353 serving kube-system/dns 4026531840 1000 77/-";
        assert_eq!(lines[2], words(expected));
    }
}
