//! Peers that the pod's policy has denied.

use cproxy_core::printable;
use cproxy_datapath::bpf::{DeniedPeer, PolicyDecision};
use serde::Serialize;

use super::{
    PodPolicyReport,
    table::{Cell, Column, TableRow},
    time::time,
};

/// Peer in the output of `cproxy get denials`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DenialRow {
    /// `Ingress` or `Egress`.
    pub direction: String,
    /// Address of the peer.
    pub peer: String,
    /// Port that was called: the pod's own for ingress, the peer's for egress.
    pub port: u16,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// `denied`, or `audited` if it was only recorded.
    pub verdict: String,
    /// Why: the rule, or the policies of which none has one.
    pub reason: String,
    /// Number of calls, datagrams or connections.
    pub count: u64,
    /// Seconds since the last one.
    pub last_seconds: u64,
}

impl DenialRow {
    /// Row of a peer, with the names of the policy that an agent enforces now.
    #[must_use]
    pub fn new(peer: &DeniedPeer, policy: Option<&PodPolicyReport>) -> Self {
        let decision = PolicyDecision { is_allowed: false, rule: peer.rule };
        Self {
            reason: PodPolicyReport::verdict(policy, peer.direction, peer.peer.into(), decision).reason,
            direction: peer.direction.to_string(),
            peer: peer.peer.to_string(),
            port: peer.port,
            protocol: peer.protocol.to_string(),
            verdict: if peer.is_audited { "audited" } else { "denied" }.to_owned(),
            count: peer.count,
            last_seconds: peer.age.as_secs(),
        }
    }

    /// Name for `-o name`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}/{}/{}", self.peer, self.port, self.protocol)
    }
}

impl TableRow for DenialRow {
    const COLUMNS: &'static [Column] = &[
        Column::name("PEER"),
        Column::fixed("DIRECTION"),
        Column::fixed("PORT"),
        Column::fixed("VERDICT"),
        Column::fixed("COUNT"),
        Column::fixed("LAST"),
        Column::fixed("WHY"),
    ];

    type Key = (String, String, u16, String);

    fn key(&self) -> Self::Key {
        (self.peer.clone(), self.direction.clone(), self.port, self.protocol.clone())
    }

    fn cells(&self) -> Vec<Cell> {
        let port = format!("{}/{}", self.port, self.protocol);
        let count = self.count.to_string();
        let last = time(self.last_seconds);
        let cells = [&self.peer, &self.direction, &port, &self.verdict, &count, &last];
        let mut cells: Vec<_> = cells.map(|cell| Cell::or_dash(Some(cell))).into();
        cells.push(Cell::Prose(printable(&self.reason)));
        cells
    }
}
