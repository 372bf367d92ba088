//! The place that the table is seen from: the node, its zone, the addresses of node and VM.

use std::sync::Arc;

use super::{Address, Problem, address::parse_address, problem::Findings};
use crate::api::Node;

/// Names the zone of a node.
const LABEL_ZONE: &str = "topology.kubernetes.io/zone";

/// What is given, or found, about the place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeContext {
    /// The own node's name: decides what is local and which Node counts.
    pub node_name: Option<String>,
    /// The own node's addresses; empty: the InternalIPs of its Node.
    pub node_ips: Vec<Address>,
    /// The VM's own addresses, which decide whether `loadBalancerSourceRanges` let it through.
    pub pod_ips: Vec<Address>,
}

/// What is kept of the own Node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeRow {
    pub(super) zone: Option<Arc<str>>,
    pub(super) internal_ips: Vec<Address>,
}

impl NodeRow {
    pub(super) fn from_object(name: &str, node: &Node, problems: &mut Vec<Problem>) -> Self {
        let zone = node.metadata.labels.as_ref().and_then(|labels| labels.get(LABEL_ZONE));
        let zone = zone.filter(|zone| !zone.is_empty()).map(|zone| zone.as_str().into());
        let addresses = node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
        let mut internal_ips = Vec::new();
        let mut findings = Findings::new(format_args!("Node {name}"));
        for (index, address) in addresses.iter().enumerate() {
            if address.type_.as_deref() != Some("InternalIP") {
                continue;
            }
            let text = address.address.as_deref().unwrap_or_default();
            match parse_address(text.trim()) {
                Some(address) => internal_ips.push(address),
                None => findings.item(
                    ("status.addresses", index, ".address"),
                    format_args!("{text:?}"),
                    " is no IP address; left out",
                ),
            }
        }
        problems.append(&mut findings.into_problems());
        internal_ips.sort_unstable();
        internal_ips.dedup();
        Self { zone, internal_ips }
    }
}
