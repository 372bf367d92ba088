//! The policy of one pod, as its guest gets it: no selectors, and no names or labels of other pods.

use cproxy_core::{Address, ObjectName};

use crate::{
    address_set::{SetName, SetReference},
    model::{Action, Direction, Directions, IpBlock, PortRange, Tier},
};

/// Policy of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodPolicy {
    /// Name of the pod.
    pub name: ObjectName,
    /// Identity of the pod.
    pub uid: Box<str>,
    /// Name of the pod's node; empty before it is scheduled.
    pub node_name: Box<str>,
    /// Directions in which all is denied that no rule accepts. None: no NetworkPolicy selects the pod.
    pub isolated: Directions,
    /// Policies that isolate the pod, for people: the first [`POD_NAMES_MAX`](crate::POD_NAMES_MAX) of them.
    pub policies: Vec<PodIsolation>,
    /// Addresses of the pod's node, which are always allowed.
    pub node_addresses: Box<[Address]>,
    /// Addresses of the pod itself, which are always allowed.
    pub own_addresses: Box<[Address]>,
    /// Rules, in the order in which they decide. The position of a rule is its id.
    pub rules: Vec<PodRule>,
    /// Sets that the rules name, each once, sorted. The policy is in force only with all of them.
    pub sets: Vec<SetReference>,
}

/// Policy that isolates a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodIsolation {
    /// Kind, namespace and name of the policy.
    pub policy: Box<str>,
    /// Directions in which it isolates.
    pub isolates: Directions,
}

/// Rule of a pod's policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodRule {
    /// Direction of the traffic.
    pub direction: Direction,
    /// Tier and priority of the rule's policy.
    pub tier: Tier,
    /// Consequence of a match.
    pub action: Action,
    /// Policy and rule that it is from, for people.
    pub source: Box<str>,
    /// Ports: the pod's own for ingress, the peer's for egress.
    pub ports: PodPorts,
    /// Other side of the traffic.
    pub peers: PodPeers,
}

/// Ports of a pod's rule, by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodPorts {
    /// All ports of all protocols.
    All,
    /// These ports.
    Some(Box<[PortRange]>),
}

/// Peers of a pod's rule, by address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodPeers {
    /// Every address.
    All,
    /// These addresses.
    Some {
        /// Sets of addresses.
        sets: Box<[SetName]>,
        /// Ranges of addresses.
        blocks: Box<[IpBlock]>,
    },
    /// Addresses of the sets that are in one of the ranges.
    InBlocks {
        /// Sets of addresses.
        sets: Box<[SetName]>,
        /// Ranges of addresses.
        blocks: Box<[IpBlock]>,
    },
}

impl PodPeers {
    /// Sets of addresses.
    #[must_use]
    pub fn sets(&self) -> &[SetName] {
        match self {
            Self::All => &[],
            Self::Some { sets, .. } | Self::InBlocks { sets, .. } => sets,
        }
    }

    /// Ranges of addresses.
    #[must_use]
    pub fn blocks(&self) -> &[IpBlock] {
        match self {
            Self::All => &[],
            Self::Some { blocks, .. } | Self::InBlocks { blocks, .. } => blocks,
        }
    }

    /// Whether no address is one.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match self {
            Self::All => false,
            Self::Some { sets, blocks } => sets.is_empty() && blocks.is_empty(),
            Self::InBlocks { sets, blocks } => sets.is_empty() || blocks.is_empty(),
        }
    }
}

impl PodRule {
    /// Ranges of all ports of the rule.
    #[must_use]
    pub fn ranges(&self) -> Box<[PortRange]> {
        match &self.ports {
            PodPorts::All => crate::model::Protocol::ALL.map(PortRange::all).into(),
            PodPorts::Some(ranges) => ranges.clone(),
        }
    }
}
