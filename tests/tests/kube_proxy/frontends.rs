//! What both proxies say of their frontends, in one form.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
};

use serde_json::Value;

/// What a client connects to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Frontend {
    /// TCP, UDP or SCTP.
    pub(crate) protocol: String,
    pub(crate) address: SocketAddr,
}

/// What a new connection gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Refuse,
    /// kube-proxy lets the client hang; cproxy says EHOSTUNREACH.
    Drop,
    Forward {
        backends: BTreeSet<SocketAddr>,
        /// For how many seconds a client keeps its backend.
        affinity: Option<u64>,
    },
}

/// One line of cproxy's table. Its names are empty if it changed while it was read: they come from the agent, later.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// namespace/name.
    pub(crate) service: String,
    pub(crate) port_name: String,
    /// ClusterIP, ExternalIP, LoadBalancerIP or NodePort.
    pub(crate) source: String,
    pub(crate) outcome: Outcome,
}

pub(crate) type Rows = BTreeMap<Frontend, Row>;

/// cproxy's table, as `get services -o json` and `resolve -o json` print it.
pub(crate) fn rows(json: &Value) -> Rows {
    json.as_array().expect("an array of rows").iter().map(row).collect()
}

fn row(row: &Value) -> (Frontend, Row) {
    let socket = |object: &Value| {
        SocketAddr::new(address(&object["address"]), object["port"].as_u64().unwrap().try_into().unwrap())
    };
    let text = |field: &str| row[field].as_str().unwrap_or_default().to_owned();
    let outcome = match text("action").as_str() {
        "refuse" => Outcome::Refuse,
        "drop" => Outcome::Drop,
        "forward" => Outcome::Forward {
            backends: row["backends"].as_array().unwrap().iter().map(socket).collect(),
            affinity: row["session_affinity_seconds"].as_u64(),
        },
        other => panic!("unknown action {other}: {row}"),
    };
    let frontend = Frontend { protocol: text("protocol"), address: socket(row) };
    (frontend, Row { service: text("service"), port_name: text("port_name"), source: text("source"), outcome })
}

/// The address that a JSON string is.
pub(crate) fn address(value: &Value) -> IpAddr {
    value.as_str().and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{value} is no address"))
}

impl fmt::Display for Frontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.protocol, self.address)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refuse => f.write_str("refuse"),
            Self::Drop => f.write_str("drop"),
            Self::Forward { backends, affinity } => {
                f.write_str("forward to")?;
                backends.iter().try_for_each(|backend| write!(f, " {backend}"))?;
                affinity.map_or(Ok(()), |seconds| write!(f, ", kept for {seconds} s"))
            }
        }
    }
}
