//! Policies, pods and namespaces as the resolver takes them.

use std::fmt;

use cproxy_core::{Address, AddressRange, ObjectName, Text};

use crate::{labels::Labels, selector::LabelSelector};

/// Transport protocol of a rule; the order is that of the protocols' numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl From<cproxy_core::Protocol> for Protocol {
    fn from(protocol: cproxy_core::Protocol) -> Self {
        match protocol {
            cproxy_core::Protocol::Tcp => Self::Tcp,
            cproxy_core::Protocol::Udp => Self::Udp,
        }
    }
}

/// Direction of traffic, as the pod sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// Traffic to the pod.
    Ingress,
    /// Traffic from the pod.
    Egress,
}

/// Set of directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Directions {
    /// Traffic to the pod.
    pub ingress: bool,
    /// Traffic from the pod.
    pub egress: bool,
}

/// Place of a policy among the others. Admin policies come first, by priority, then NetworkPolicies, then Baseline
/// ones. For a pod that a NetworkPolicy isolates, its tier has the last word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// ClusterNetworkPolicy of the tier Admin with this priority.
    Admin(u16),
    /// NetworkPolicy.
    NetworkPolicy,
    /// ClusterNetworkPolicy of the tier Baseline with this priority.
    Baseline(u16),
}

/// Consequence of a rule that matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// The traffic is allowed.
    Accept,
    /// The traffic is denied.
    Deny,
    /// The next tier decides.
    Pass,
}

/// Ports of one protocol from the first to the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortRange {
    /// Protocol of the ports.
    pub protocol: Protocol,
    /// First port.
    pub first: u16,
    /// Last port.
    pub last: u16,
}

/// Ports of a rule by their name in containers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortName {
    /// Name of the port.
    pub name: Box<str>,
    /// Protocol of the port: a port with this name and another protocol is another one.
    pub protocol: Protocol,
}

/// Ports that a rule is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ports {
    /// All ports of all protocols.
    All,
    /// These ports, perhaps none.
    Some {
        /// Ports by number.
        ranges: Box<[PortRange]>,
        /// Ports by name.
        names: Box<[PortName]>,
    },
}

/// Range of addresses with exceptions.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IpBlock {
    /// The range.
    pub cidr: AddressRange,
    /// Ranges within it that are left out.
    pub except: Box<[AddressRange]>,
}

/// Namespaces in which pods are selected.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// This namespace.
    Namespace(Text),
    /// Namespaces with such labels.
    Namespaces(LabelSelector),
}

/// Pods by the labels of their namespace and their own.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodSelection {
    /// Namespaces of the pods.
    pub scope: Scope,
    /// Pods of these namespaces.
    pub pods: LabelSelector,
}

/// Peers that a rule is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peers {
    /// Every address.
    All,
    /// These peers, perhaps none.
    Some {
        /// Pods.
        pods: Box<[PodSelection]>,
        /// Addresses.
        blocks: Box<[IpBlock]>,
    },
}

/// Rule of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Direction of the traffic.
    pub direction: Direction,
    /// Position among the rules of this direction in the object.
    pub index: usize,
    /// Consequence of a match.
    pub action: Action,
    /// Ports: the pod's own for ingress, the peer's for egress.
    pub ports: Ports,
    /// Other side of the traffic.
    pub peers: Peers,
}

/// A policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Name of the object; a cluster-wide policy has no namespace.
    pub name: ObjectName,
    /// Identity of the object.
    pub uid: Box<str>,
    /// Place among other policies.
    pub tier: Tier,
    /// Pods that it applies to; none if its selector is invalid.
    pub subject: Option<PodSelection>,
    /// Directions in which a NetworkPolicy denies what no rule allows. Other tiers isolate nothing.
    pub isolates: Directions,
    /// Rules, in the order of the object.
    pub rules: Box<[Rule]>,
}

/// Named port of a pod's containers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContainerPort {
    /// Name and protocol.
    pub name: PortName,
    /// Number of the port.
    pub number: u16,
}

/// Node of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node {
    /// Name of the node; empty before the pod is scheduled.
    pub name: Box<str>,
    /// Addresses of the node.
    pub addresses: Box<[Address]>,
}

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Name of the object.
    pub name: ObjectName,
    /// Identity of the object.
    pub uid: Box<str>,
    /// Labels of the pod.
    pub labels: Labels,
    /// Addresses of the pod, of both families, each once.
    pub addresses: Box<[Address]>,
    /// Node of the pod.
    pub node: Node,
    /// Named ports of the containers that stay, each name and protocol once, sorted.
    pub ports: Box<[ContainerPort]>,
    /// The pod is in the network of its node: no policy selects it, and its packets are the node's.
    pub is_host_network: bool,
    /// The pod has ended (Succeeded or Failed): its addresses may be another's by now.
    pub has_ended: bool,
    /// The pod is being deleted. It keeps its rights until it is gone.
    pub is_terminating: bool,
    /// Creation time in seconds since 1970.
    pub created_seconds: i64,
}

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Name of the namespace.
    pub name: Text,
    /// Labels of the namespace, with that of its name.
    pub labels: Labels,
}

impl Protocol {
    /// All protocols that rules may name.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// Number of the protocol in packets (IPPROTO_TCP and others).
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

impl Direction {
    /// Both directions.
    pub const BOTH: [Self; 2] = [Self::Ingress, Self::Egress];
}

impl Directions {
    /// Whether the direction is in the set.
    #[must_use]
    pub fn has(self, direction: Direction) -> bool {
        match direction {
            Direction::Ingress => self.ingress,
            Direction::Egress => self.egress,
        }
    }

    /// Directions that are in one of two sets.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self { ingress: self.ingress || other.ingress, egress: self.egress || other.egress }
    }
}

impl PortRange {
    /// All ports of a protocol.
    #[must_use]
    pub fn all(protocol: Protocol) -> Self {
        Self { protocol, first: 0, last: u16::MAX }
    }

    /// One port.
    #[must_use]
    pub fn single(protocol: Protocol, port: u16) -> Self {
        Self { protocol, first: port, last: port }
    }

    /// Whether the range has the port.
    #[must_use]
    pub fn contains(&self, protocol: Protocol, port: u16) -> bool {
        self.protocol == protocol && (self.first..=self.last).contains(&port)
    }
}

impl IpBlock {
    /// Whether all addresses of a range are in the block, if the range is not wider than one of the exceptions.
    #[must_use]
    pub fn covers(&self, range: &AddressRange) -> bool {
        self.cidr.covers(range) && !self.except.iter().any(|except| except.covers(range))
    }
}

impl PodSelection {
    /// All pods of all namespaces.
    #[must_use]
    pub fn all() -> Self {
        Self { scope: Scope::Namespaces(LabelSelector::default()), pods: LabelSelector::default() }
    }

    /// Whether it selects a pod of a namespace, given its labels if it is known.
    #[must_use]
    pub fn matches(&self, namespace: &str, namespace_labels: Option<&Labels>, pod_labels: &Labels) -> bool {
        self.scope.matches(namespace, namespace_labels) && self.pods.matches(|key| pod_labels.get(key))
    }
}

impl Scope {
    /// Whether it has a namespace, given its labels if it is known.
    #[must_use]
    pub fn matches(&self, namespace: &str, labels: Option<&Labels>) -> bool {
        match self {
            Self::Namespace(own) => **own == *namespace,
            Self::Namespaces(selector) => labels.is_some_and(|labels| selector.matches(|key| labels.get(key))),
        }
    }
}

impl Tier {
    /// Kind of its objects.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::NetworkPolicy => "NetworkPolicy",
            Self::Admin(_) | Self::Baseline(_) => "ClusterNetworkPolicy",
        }
    }
}

impl Pod {
    /// Whether its addresses are peers of policies.
    #[must_use]
    pub fn is_peer(&self) -> bool {
        !self.is_host_network && !self.has_ended
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        })
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ingress => "Ingress",
            Self::Egress => "Egress",
        })
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.first, self.last) {
            (first, last) if first == last => write!(f, "{}/{first}", self.protocol),
            (first, last) => write!(f, "{}/{first}-{last}", self.protocol),
        }
    }
}
