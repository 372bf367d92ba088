//! Frontends of both proxies in a common form.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
};

use serde_json::Value;

/// Address, port and protocol of a connection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Frontend {
    /// Protocol: TCP, UDP or SCTP.
    pub(crate) protocol: String,
    pub(crate) address: SocketAddr,
}

/// Outcome of a new connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Refuse,
    /// In kube-proxy the client hangs; in cproxy it gets EHOSTUNREACH.
    Drop,
    Forward {
        backends: BTreeSet<SocketAddr>,
        /// Duration of the session affinity in seconds.
        affinity: Option<u64>,
    },
}

/// One row of cproxy's table. Its names are empty if it changed while it was read, since they come from the agent,
/// later.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// Service as namespace/name.
    pub(crate) service: String,
    pub(crate) port_name: String,
    /// Source: ClusterIP, ExternalIP, LoadBalancerIP or NodePort.
    pub(crate) source: String,
    pub(crate) outcome: Outcome,
}

pub(crate) type Rows = BTreeMap<Frontend, Row>;

/// Rows of cproxy's table, from the output of `get services -o json` or `resolve -o json`.
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

/// The address in a JSON string.
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
