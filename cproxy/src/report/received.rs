//! Addresses and ports of load balancers that the pod receives.

use cproxy_core::{Frontend, Protocol, Received};
use serde::Serialize;
use serde_json::Value;

use super::{
    fields::text_of,
    table::{Cell, Column, TableRow},
};

/// Address and port in the output of `cproxy get receive`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReceivedRow {
    /// Address of the load balancer.
    pub address: String,
    /// Its port.
    pub port: u16,
    /// `TCP` or `UDP`.
    pub protocol: String,
    /// Port of the pod.
    pub pod_port: u16,
    /// namespace/name of the Service; `None` if no Service wants it any more.
    pub service: Option<String>,
    /// Ranges of clients that are let in; none: all.
    pub sources: Vec<String>,
    /// `received`; `leaving` if no Service wants it any more, and sockets still have it.
    pub state: String,
    /// Whether a socket listens: `yes`, `no`, `loopback` if one listens there alone, `elsewhere` if on another
    /// address of the VM alone, `too-old` if it has listened since
    /// before cproxy ran and the ports differ; `None`: it is not known, as for UDP.
    pub listener: Option<String>,
}

/// Socket that listens for a port of the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listener {
    /// It is chosen.
    Yes,
    /// There is none.
    No,
    /// It listens on a loopback address alone.
    Loopback,
    /// It listens on another address.
    Elsewhere,
    /// It has listened since before the programs were attached, and is not found.
    TooOld,
}

impl Listener {
    fn as_str(self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::No => "no",
            Self::Loopback => "loopback",
            Self::Elsewhere => "elsewhere",
            Self::TooOld => "too-old",
        }
    }
}

impl ReceivedRow {
    /// Row of an address and port; `received` if a Service wants it.
    #[must_use]
    pub fn new(frontend: &Frontend, pod_port: u16, received: Option<&Received>, listener: Option<Listener>) -> Self {
        Self {
            address: frontend.address.to_string(),
            port: frontend.port,
            protocol: frontend.protocol.to_string(),
            pod_port,
            service: received.map(|received| received.service.to_string()),
            sources: received.iter().flat_map(|received| received.sources.iter().map(ToString::to_string)).collect(),
            state: if received.is_some() { "received" } else { "leaving" }.to_owned(),
            listener: listener.filter(|_| frontend.protocol == Protocol::Tcp).map(|one| one.as_str().to_owned()),
        }
    }

    /// Row as an agent has sent it, which may be of another version.
    #[must_use]
    pub fn read(row: &Value) -> Self {
        let text = |name: &str| text_of(row, name);
        let port = |name: &str| row.get(name).and_then(Value::as_u64).unwrap_or_default() as u16;
        let sources = row.get("sources").and_then(Value::as_array).into_iter().flatten();
        Self {
            address: text("address").unwrap_or_default(),
            port: port("port"),
            protocol: text("protocol").unwrap_or_default(),
            pod_port: port("pod_port"),
            service: text("service"),
            sources: sources.filter_map(|source| source.as_str().map(str::to_owned)).collect(),
            state: text("state").unwrap_or_default(),
            listener: text("listener"),
        }
    }

    /// Name for `-o name`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}/{}/{}", self.address, self.port, self.protocol)
    }
}

impl TableRow for ReceivedRow {
    const COLUMNS: &'static [Column] = &[
        Column::name("ADDRESS"),
        Column::fixed("PORT"),
        Column::fixed("POD PORT"),
        Column::fixed("STATE"),
        Column::fixed("LISTENER"),
        Column::fixed("CLIENTS"),
        Column::fixed("SERVICE"),
    ];

    type Key = (String, u16, String);

    fn key(&self) -> Self::Key {
        (self.address.clone(), self.port, self.protocol.clone())
    }

    fn cells(&self) -> Vec<Cell> {
        let port = format!("{}/{}", self.port, self.protocol);
        let clients = if self.sources.is_empty() { "all".to_owned() } else { self.sources.join(",") };
        let pod_port = self.pod_port.to_string();
        let (listener, service) = (self.listener.as_deref().unwrap_or("-"), self.service.as_deref().unwrap_or("-"));
        let cells = [&self.address, &port, &pod_port, &self.state, listener, &clients, service];
        cells.map(|cell| Cell::or_dash(Some(cell))).into()
    }
}
