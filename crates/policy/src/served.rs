//! Policies of single pods and slices of address sets as a relay serves them: two kinds of a group of its own.
//!
//! Protobuf and JSON have the same fields. Text is text as in NetworkPolicies; only the addresses of a slice are packed
//! in protobuf, with 4 and 16 bytes each.

mod addresses;

use std::net::IpAddr;

use cproxy_core::{
    Address, AddressRange, ObjectName,
    api::{Metadata, Object, null_as_default},
    parse_address,
};
use serde::{Deserialize, Serialize, Serializer, ser::SerializeMap as _};

pub use self::addresses::Addresses;
use crate::{
    address_set::{AddressSlice as Slice, SetName, SetReference, SliceName},
    model::{Action, Direction, Directions, IpBlock as Block, PortRange, Protocol, Tier},
    pod_policy::{PodIsolation, PodPeers, PodPolicy as Policy, PodPorts, PodRule},
};

/// API group of the kinds.
pub const GROUP: &str = "policy.cproxy.dev";
/// Version within the group.
pub const VERSION: &str = "v1alpha1";
/// API version, as `apiVersion` has it.
pub const API_VERSION: &str = "policy.cproxy.dev/v1alpha1";

/// Most slices of a set: a set of so many has more addresses than IPv4.
const SLICES_MAX: u32 = 1 << 26;

/// Policy of a pod. Its name and namespace are the pod's. A pod that no NetworkPolicy selects has one, too.
#[derive(Clone, PartialEq, Eq, Deserialize, Serialize, prost::Message)]
pub struct PodPolicy {
    /// Names and version.
    #[serde(default, deserialize_with = "null_as_default", serialize_with = "metadata")]
    #[prost(message, required, tag = "1")]
    pub metadata: Metadata,
    /// `spec` of the policy.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "2")]
    pub spec: PodPolicySpec,
}

/// `spec` of a [`PodPolicy`].
#[derive(Clone, PartialEq, Eq, Deserialize, Serialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct PodPolicySpec {
    /// Identity of the pod.
    #[serde(default, rename = "podUID")]
    #[prost(string, tag = "1")]
    pub pod_uid: String,
    /// Node of the pod; empty before it is scheduled.
    #[serde(default)]
    #[prost(string, tag = "2")]
    pub node_name: String,
    /// Ingress, Egress: directions in which all is denied that no rule accepts. None: no NetworkPolicy selects the pod.
    #[serde(default)]
    #[prost(string, repeated, tag = "3")]
    pub isolated: Vec<String>,
    /// Policies that isolate the pod, for people: the first 128 of them.
    #[serde(default)]
    #[prost(message, repeated, tag = "8")]
    pub policies: Vec<Isolation>,
    /// Addresses of the pod's node, which are always allowed.
    #[serde(default)]
    #[prost(string, repeated, tag = "4")]
    pub node_addresses: Vec<String>,
    /// Addresses of the pod itself, which are always allowed.
    #[serde(default)]
    #[prost(string, repeated, tag = "5")]
    pub pod_addresses: Vec<String>,
    /// Rules, in the order in which they decide.
    #[serde(default)]
    #[prost(message, repeated, tag = "6")]
    pub rules: Vec<Rule>,
    /// Sets that the rules name, each once. The policy is in force only with all slices of all of them.
    #[serde(default)]
    #[prost(message, repeated, tag = "7")]
    pub sets: Vec<Set>,
}

/// Policy that isolates a pod.
#[derive(Clone, PartialEq, Eq, Deserialize, Serialize, prost::Message)]
pub struct Isolation {
    /// Kind, namespace and name of the policy.
    #[serde(default)]
    #[prost(string, tag = "1")]
    pub name: String,
    /// Ingress, Egress: directions in which it isolates.
    #[serde(default)]
    #[prost(string, repeated, tag = "2")]
    pub isolates: Vec<String>,
}

/// Rule of a pod's policy.
#[derive(Clone, PartialEq, Eq, Deserialize, Serialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct Rule {
    /// Ingress or Egress.
    #[serde(default)]
    #[prost(string, tag = "1")]
    pub direction: String,
    /// Admin, NetworkPolicy or Baseline.
    #[serde(default)]
    #[prost(string, tag = "2")]
    pub tier: String,
    /// Priority within the tiers Admin and Baseline.
    #[serde(default)]
    #[prost(uint32, tag = "3")]
    pub priority: u32,
    /// Accept, Deny or Pass.
    #[serde(default)]
    #[prost(string, tag = "4")]
    pub action: String,
    /// Policy and rule that it is from, for people.
    #[serde(default)]
    #[prost(string, tag = "5")]
    pub from: String,
    /// All ports of all protocols.
    #[serde(default)]
    #[prost(bool, tag = "6")]
    pub all_ports: bool,
    /// Ports: the pod's own for ingress, the peer's for egress.
    #[serde(default)]
    #[prost(message, repeated, tag = "7")]
    pub ports: Vec<Ports>,
    /// Every address.
    #[serde(default)]
    #[prost(bool, tag = "8")]
    pub all_peers: bool,
    /// Names of sets of addresses.
    #[serde(default)]
    #[prost(string, repeated, tag = "9")]
    pub sets: Vec<String>,
    /// Ranges of addresses.
    #[serde(default)]
    #[prost(message, repeated, tag = "10")]
    pub blocks: Vec<IpBlock>,
    /// Only those addresses of the sets count that are in one of the ranges.
    #[serde(default)]
    #[prost(bool, tag = "11")]
    pub in_blocks: bool,
}

/// Ports of one protocol from the first to the last.
#[derive(Clone, PartialEq, Eq, Deserialize, Serialize, prost::Message)]
pub struct Ports {
    /// TCP, UDP or SCTP.
    #[serde(default)]
    #[prost(string, tag = "1")]
    pub protocol: String,
    /// First port.
    #[serde(default)]
    #[prost(uint32, tag = "2")]
    pub first: u32,
    /// Last port.
    #[serde(default)]
    #[prost(uint32, tag = "3")]
    pub last: u32,
}

/// Range of addresses with exceptions.
#[derive(Clone, PartialEq, Eq, Deserialize, Serialize, prost::Message)]
pub struct IpBlock {
    /// The range.
    #[serde(default)]
    #[prost(string, tag = "1")]
    pub cidr: String,
    /// Ranges within it that are left out.
    #[serde(default)]
    #[prost(string, repeated, tag = "2")]
    pub except: Vec<String>,
}

/// Set of addresses, and the number of its slices.
#[derive(Clone, PartialEq, Eq, Deserialize, Serialize, prost::Message)]
pub struct Set {
    /// Name of the set.
    #[serde(default)]
    #[prost(string, tag = "1")]
    pub name: String,
    /// Number of its slices, all of which make the set: `NAME-SLICES-0` and so on.
    #[serde(default)]
    #[prost(uint32, tag = "2")]
    pub slices: u32,
}

/// Part of a set of addresses. Its name is `SET-SLICES-INDEX`.
#[derive(Clone, PartialEq, Eq, Deserialize, Serialize, prost::Message)]
pub struct AddressSlice {
    /// Name and version.
    #[serde(default, deserialize_with = "null_as_default", serialize_with = "metadata")]
    #[prost(message, required, tag = "1")]
    pub metadata: Metadata,
    /// The addresses.
    #[serde(default)]
    #[prost(message, required, tag = "2")]
    pub addresses: Addresses,
}

macro_rules! object {
    ($type:ty, $kind:literal, $plural:literal) => {
        impl Object for $type {
            const GROUP: &'static str = GROUP;
            const VERSION: &'static str = VERSION;
            const KIND: &'static str = $kind;
            const PLURAL: &'static str = $plural;

            fn metadata(&self) -> &Metadata {
                &self.metadata
            }
        }
    };
}

object!(PodPolicy, "PodPolicy", "podpolicies");
object!(AddressSlice, "AddressSlice", "addressslices");

/// Field of an object that cannot be read. The object is of a later version, or broken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {value:?} is not known")]
pub struct ServedError {
    field: &'static str,
    value: String,
}

/// Writes the names and the version.
fn metadata<S: Serializer>(metadata: &Metadata, serializer: S) -> Result<S::Ok, S::Error> {
    let fields =
        [("name", &metadata.name), ("namespace", &metadata.namespace), ("resourceVersion", &metadata.resource_version)];
    let present = fields.into_iter().filter(|(_, value)| !value.is_empty());
    let mut map = serializer.serialize_map(None)?;
    for (name, value) in present {
        map.serialize_entry(name, value)?;
    }
    map.end()
}

impl PodPolicy {
    /// The policy of a pod, without a version.
    #[must_use]
    pub fn new(policy: &Policy) -> Self {
        let Policy { name, uid, node_name, isolated, policies, node_addresses, own_addresses, rules, sets } = policy;
        let texts =
            |addresses: &[Address]| addresses.iter().map(|&address| IpAddr::from(address).to_string()).collect();
        Self {
            metadata: Metadata {
                name: (*name.name).to_owned(),
                namespace: name.namespace.to_string(),
                ..Metadata::default()
            },
            spec: PodPolicySpec {
                pod_uid: (**uid).to_owned(),
                node_name: (**node_name).to_owned(),
                isolated: directions(*isolated),
                policies: policies.iter().map(Isolation::new).collect(),
                node_addresses: texts(node_addresses),
                pod_addresses: texts(own_addresses),
                rules: rules.iter().map(Rule::new).collect(),
                sets: sets.iter().map(|set| Set { name: set.name.to_string(), slices: set.slices }).collect(),
            },
        }
    }

    /// The policy as it is enforced.
    ///
    /// # Errors
    /// A field cannot be read: the policy must not be applied without it.
    pub fn read(&self) -> Result<Policy, ServedError> {
        let PodPolicySpec { pod_uid, node_name, isolated, policies, node_addresses, pod_addresses, rules, sets } =
            &self.spec;
        let addresses = |field, texts: &[String]| -> Result<Box<[Address]>, ServedError> {
            texts.iter().map(|text| parse_address(text).ok_or_else(|| unknown(field, text))).collect()
        };
        Ok(Policy {
            name: ObjectName::new(&self.metadata.namespace, &*self.metadata.name),
            uid: (**pod_uid).into(),
            node_name: (**node_name).into(),
            isolated: read_directions("isolated", isolated)?,
            policies: policies.iter().map(Isolation::read).collect::<Result<_, _>>()?,
            node_addresses: addresses("nodeAddresses", node_addresses)?,
            own_addresses: addresses("podAddresses", pod_addresses)?,
            rules: rules.iter().map(Rule::read).collect::<Result<_, _>>()?,
            sets: sets.iter().map(Set::read).collect::<Result<_, _>>()?,
        })
    }
}

impl Isolation {
    fn new(PodIsolation { policy, isolates }: &PodIsolation) -> Self {
        Self { name: (**policy).to_owned(), isolates: directions(*isolates) }
    }

    fn read(&self) -> Result<PodIsolation, ServedError> {
        Ok(PodIsolation { policy: (*self.name).into(), isolates: read_directions("isolates", &self.isolates)? })
    }
}

impl Rule {
    fn new(rule: &PodRule) -> Self {
        let PodRule { direction, tier, action, source, ports, peers } = rule;
        let priority = match tier {
            Tier::Admin(priority) | Tier::Baseline(priority) => u32::from(*priority),
            Tier::NetworkPolicy => 0,
        };
        let action = match action {
            Action::Accept => "Accept",
            Action::Deny => "Deny",
            Action::Pass => "Pass",
        };
        let tier = match tier {
            Tier::Admin(_) => "Admin",
            Tier::NetworkPolicy => "NetworkPolicy",
            Tier::Baseline(_) => "Baseline",
        };
        let (all_ports, ports) = match ports {
            PodPorts::All => (true, Vec::new()),
            PodPorts::Some(ranges) => (false, ranges.iter().map(Ports::new).collect()),
        };
        Self {
            direction: direction.to_string(),
            tier: tier.to_owned(),
            priority,
            action: action.to_owned(),
            from: (**source).to_owned(),
            all_ports,
            ports,
            all_peers: matches!(peers, PodPeers::All),
            sets: peers.sets().iter().map(ToString::to_string).collect(),
            blocks: peers.blocks().iter().map(IpBlock::new).collect(),
            in_blocks: matches!(peers, PodPeers::InBlocks { .. }),
        }
    }

    fn read(&self) -> Result<PodRule, ServedError> {
        let priority = || u16::try_from(self.priority).map_err(|_| unknown("priority", &self.priority.to_string()));
        let tier = match &*self.tier {
            "Admin" => Tier::Admin(priority()?),
            "NetworkPolicy" => Tier::NetworkPolicy,
            "Baseline" => Tier::Baseline(priority()?),
            other => return Err(unknown("tier", other)),
        };
        let action = match &*self.action {
            "Accept" => Action::Accept,
            "Deny" => Action::Deny,
            "Pass" => Action::Pass,
            other => return Err(unknown("action", other)),
        };
        let ports = match self.all_ports {
            true => PodPorts::All,
            false => PodPorts::Some(self.ports.iter().map(Ports::read).collect::<Result<_, _>>()?),
        };
        let sets = self.sets.iter().map(|name| read_set_name(name)).collect::<Result<_, _>>()?;
        let blocks = self.blocks.iter().map(IpBlock::read).collect::<Result<_, _>>()?;
        let peers = match (self.all_peers, self.in_blocks) {
            (true, _) => PodPeers::All,
            (false, true) => PodPeers::InBlocks { sets, blocks },
            (false, false) => PodPeers::Some { sets, blocks },
        };
        let direction = read_direction("direction", &self.direction)?;
        Ok(PodRule { direction, tier, action, source: (*self.from).into(), ports, peers })
    }
}

impl Ports {
    fn new(range: &PortRange) -> Self {
        let PortRange { protocol, first, last } = *range;
        Self { protocol: protocol.to_string(), first: first.into(), last: last.into() }
    }

    fn read(&self) -> Result<PortRange, ServedError> {
        let protocol = match &*self.protocol {
            "TCP" => Protocol::Tcp,
            "UDP" => Protocol::Udp,
            "SCTP" => Protocol::Sctp,
            other => return Err(unknown("protocol", other)),
        };
        let number = |port: u32| u16::try_from(port).map_err(|_| unknown("port", &port.to_string()));
        Ok(PortRange { protocol, first: number(self.first)?, last: number(self.last)? })
    }
}

impl IpBlock {
    fn new(block: &Block) -> Self {
        let Block { cidr, except } = block;
        Self { cidr: cidr.to_string(), except: except.iter().map(ToString::to_string).collect() }
    }

    fn read(&self) -> Result<Block, ServedError> {
        let range = |text: &String| AddressRange::parse(text).ok_or_else(|| unknown("cidr", text));
        Ok(Block { cidr: range(&self.cidr)?, except: self.except.iter().map(range).collect::<Result<_, _>>()? })
    }
}

impl Set {
    fn read(&self) -> Result<SetReference, ServedError> {
        let is_valid = self.slices.is_power_of_two() && self.slices <= SLICES_MAX;
        let slices =
            Some(self.slices).filter(|_| is_valid).ok_or_else(|| unknown("slices", &self.slices.to_string()))?;
        Ok(SetReference { name: read_set_name(&self.name)?, slices })
    }
}

impl AddressSlice {
    /// A slice, without a version.
    #[must_use]
    pub fn new(slice: &Slice) -> Self {
        let metadata = Metadata { name: slice.name.to_string(), ..Metadata::default() };
        Self { metadata, addresses: Addresses::new(&slice.addresses) }
    }

    /// The slice as it is enforced.
    ///
    /// # Errors
    /// A field cannot be read.
    pub fn read(&self) -> Result<Slice, ServedError> {
        let name =
            SliceName::parse(&self.metadata.name).ok_or_else(|| unknown("metadata.name", &self.metadata.name))?;
        Ok(Slice { name, addresses: self.addresses.read()? })
    }
}

/// Names of directions.
fn directions(of: Directions) -> Vec<String> {
    Direction::BOTH.into_iter().filter(|&direction| of.has(direction)).map(|direction| direction.to_string()).collect()
}

fn read_directions(field: &'static str, texts: &[String]) -> Result<Directions, ServedError> {
    let mut directions = Directions::default();
    for text in texts {
        match read_direction(field, text)? {
            Direction::Ingress => directions.ingress = true,
            Direction::Egress => directions.egress = true,
        }
    }
    Ok(directions)
}

fn read_direction(field: &'static str, text: &str) -> Result<Direction, ServedError> {
    match text {
        "Ingress" => Ok(Direction::Ingress),
        "Egress" => Ok(Direction::Egress),
        other => Err(unknown(field, other)),
    }
}

fn read_set_name(text: &str) -> Result<SetName, ServedError> {
    SetName::parse(text).ok_or_else(|| unknown("sets", text))
}

fn unknown(field: &'static str, value: &str) -> ServedError {
    ServedError { field, value: value.chars().take(64).collect() }
}

#[cfg(test)]
mod tests;
