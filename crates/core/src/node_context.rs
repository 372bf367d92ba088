//! Node name, zone, node IPs and VM IPs.

use std::sync::Arc;

use super::{
    Address, Problem,
    address::parse_address,
    packed::{Packed, Reader, Writer},
    problem::Findings,
    sort_unique,
};
use crate::api::Node;

/// Names the zone of a node.
const LABEL_ZONE: &str = "topology.kubernetes.io/zone";

/// Settings of the node and the VM, given or detected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeContext {
    /// Name of this node: decides which endpoints are local and which Node counts.
    pub node_name: Option<String>,
    /// Addresses of the node; empty: the InternalIPs of its Node.
    pub node_ips: Vec<Address>,
    /// Addresses of the VM, which are compared with `loadBalancerSourceRanges` and take no claim from outside.
    pub pod_ips: Vec<Address>,
    /// Whether the external addresses of Services are served.
    pub external_ips: ExternalIps,
}

/// Treatment of `spec.externalIPs`, which whoever may write a Service can set to any address (CVE-2020-8554).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExternalIps {
    /// They are frontends.
    #[default]
    Serve,
    /// They are not served.
    Ignore,
}

/// Compact row of the Node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeRow {
    pub(super) zone: Option<Arc<str>>,
    pub(super) internal_ips: Vec<Address>,
}

impl NodeRow {
    pub(super) fn from_object(name: &str, node: &Node, problems: &mut Vec<Problem>) -> Self {
        let zone =
            node.metadata.labels.get(LABEL_ZONE).filter(|zone| !zone.is_empty()).map(|zone| zone.as_str().into());
        let mut internal_ips = Vec::new();
        let mut findings = Findings::default();
        for (index, address) in node.status.addresses.iter().enumerate() {
            if address.type_ != "InternalIP" {
                continue;
            }
            let text = &address.address;
            match parse_address(text.trim()) {
                Some(address) => internal_ips.push(address),
                None => findings.item(
                    ("status.addresses", index, ".address"),
                    format_args!("{text:?}"),
                    " is not a valid IP address; left out",
                ),
            }
        }
        problems.append(&mut findings.into_problems(format_args!("Node {name}")));
        sort_unique(&mut internal_ips);
        Self { zone, internal_ips }
    }

    pub(super) fn pack(&self) -> Packed {
        let mut writer = Writer::default();
        writer.text(self.zone.as_deref().unwrap_or_default());
        writer.list(&self.internal_ips, |writer, address| writer.any_address(*address));
        writer.finish()
    }

    pub(super) fn unpack(packed: &Packed) -> Self {
        let mut reader = Reader::new(packed);
        let zone = Some(reader.text()).filter(|zone| !zone.is_empty()).map(Into::into);
        Self { zone, internal_ips: reader.list(Reader::any_address) }
    }
}
