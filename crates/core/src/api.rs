//! Slim Kubernetes objects with only the fields that cproxy reads, from JSON and from protobuf. All other fields are
//! skipped while an object is decoded.
//!
//! Each field is as the Go type has it (k8s.io/api, whose generated.proto has the tags), so that both encodings give
//! the same object: a field that is no pointer in Go is empty or zero where JSON leaves it out or has null, and
//! protobuf writes it even then. A kind is in JSON alone, and its tag 1000 is no field of Kubernetes.

use std::{borrow::Cow, collections::BTreeMap};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _},
};

/// Kind of Kubernetes object.
pub trait Object: DeserializeOwned + prost::Message + Default {
    /// API group; empty for the core group.
    const GROUP: &'static str;
    /// Version within the group.
    const VERSION: &'static str;
    /// `kind` of an object.
    const KIND: &'static str;
    /// Resource name in URLs.
    const PLURAL: &'static str;
    /// Features that are lost without this resource, if it is optional; `None`: its reader cannot do without it.
    const LOST_WITHOUT: Option<&'static str> = None;

    /// Name, labels and version of the object.
    fn metadata(&self) -> &Metadata;
}

/// `metadata` of an object. `managedFields`, annotations and owner references are skipped while it is decoded.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// Name within the namespace.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "1")]
    pub name: String,
    /// Namespace; a cluster-scoped object has none.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "3")]
    pub namespace: String,
    /// Version to resume a watch from.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "6")]
    pub resource_version: String,
    /// Labels.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(btree_map = "string, string", tag = "11")]
    pub labels: BTreeMap<String, String>,
    /// Creation time.
    #[serde(default, rename = "creationTimestamp", deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "8")]
    pub created: Time,
}

/// A time; in JSON an RFC 3339 time, the API server's format.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Time {
    /// Seconds since 1970; null in JSON is a time without seconds in protobuf.
    #[prost(int64, optional, tag = "1")]
    pub seconds: Option<i64>,
}

/// v1 Service.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct Service {
    #[serde(default, rename = "kind", deserialize_with = "own_kind::<Service, _>")]
    #[prost(message, optional, tag = "1000")]
    _kind: Option<()>,
    /// Names and labels.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "1")]
    pub metadata: Metadata,
    /// `spec` of the Service.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "2")]
    pub spec: ServiceSpec,
    /// `status` of the Service.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "3")]
    pub status: ServiceStatus,
}

/// `spec` of a Service.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct ServiceSpec {
    /// ClusterIP, NodePort, LoadBalancer or ExternalName.
    #[serde(default, rename = "type", deserialize_with = "null_as_default")]
    #[prost(string, tag = "4")]
    pub type_: String,
    /// First ClusterIP, "None" or empty.
    #[serde(default, rename = "clusterIP", deserialize_with = "null_as_default")]
    #[prost(string, tag = "3")]
    pub cluster_ip: String,
    /// ClusterIPs, in the order of `ip_families`.
    #[serde(default, rename = "clusterIPs", deserialize_with = "null_as_default")]
    #[prost(string, repeated, tag = "18")]
    pub cluster_ips: Vec<String>,
    /// IPv4, IPv6.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, repeated, tag = "19")]
    pub ip_families: Vec<String>,
    /// Ports of the Service.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "1")]
    pub ports: Vec<ServicePortSpec>,
    /// None or ClientIP.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "7")]
    pub session_affinity: String,
    /// Settings of ClientIP affinity.
    #[prost(message, optional, tag = "14")]
    pub session_affinity_config: Option<SessionAffinityConfig>,
    /// Cluster or Local.
    #[prost(string, optional, tag = "22")]
    pub internal_traffic_policy: Option<String>,
    /// Addresses outside the cluster that lead to the Service.
    #[serde(default, rename = "externalIPs", deserialize_with = "null_as_default")]
    #[prost(string, repeated, tag = "5")]
    pub external_ips: Vec<String>,
    /// Clients that may use the load balancer's addresses; empty: all.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, repeated, tag = "9")]
    pub load_balancer_source_ranges: Vec<String>,
}

/// `status` of a Service.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct ServiceStatus {
    /// State of the load balancer.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "1")]
    pub load_balancer: LoadBalancerStatus,
}

/// `status.loadBalancer` of a Service.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct LoadBalancerStatus {
    /// Addresses of the load balancer.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "1")]
    pub ingress: Vec<LoadBalancerIngress>,
}

/// One address of a load balancer.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct LoadBalancerIngress {
    /// IP address; an entry may have a host name only.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "1")]
    pub ip: String,
    /// VIP (default) or Proxy.
    #[prost(string, optional, tag = "3")]
    pub ip_mode: Option<String>,
}

/// `spec.sessionAffinityConfig` of a Service.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct SessionAffinityConfig {
    /// Settings of ClientIP affinity.
    #[serde(rename = "clientIP")]
    #[prost(message, optional, tag = "1")]
    pub client_ip: Option<ClientIpConfig>,
}

/// `clientIP` of the session affinity's settings.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct ClientIpConfig {
    /// Time for which a client keeps its backend.
    #[prost(int32, optional, tag = "1")]
    pub timeout_seconds: Option<i32>,
}

/// One port of a Service.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct ServicePortSpec {
    /// Name of the port; optional for a single port.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "1")]
    pub name: String,
    /// TCP (default), UDP, SCTP.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "2")]
    pub protocol: String,
    /// Port number.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(int32, tag = "3")]
    pub port: i32,
    /// Port on every node; 0 means none.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(int32, tag = "5")]
    pub node_port: i32,
}

/// discovery.k8s.io/v1 EndpointSlice.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct EndpointSlice {
    #[serde(default, rename = "kind", deserialize_with = "own_kind::<EndpointSlice, _>")]
    #[prost(message, optional, tag = "1000")]
    _kind: Option<()>,
    /// Names and labels.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "1")]
    pub metadata: Metadata,
    /// IPv4, IPv6 or FQDN.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "4")]
    pub address_type: String,
    /// Endpoints of the slice.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "2")]
    pub endpoints: Vec<EndpointSpec>,
    /// Ports that every endpoint of the slice has.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "3")]
    pub ports: Vec<EndpointPortSpec>,
}

/// One endpoint of a slice.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct EndpointSpec {
    /// Addresses of the endpoint; only the first counts.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, repeated, tag = "1")]
    pub addresses: Vec<String>,
    /// State of the endpoint.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "2")]
    pub conditions: EndpointConditions,
    /// Name of the endpoint's node.
    #[prost(string, optional, tag = "6")]
    pub node_name: Option<String>,
    /// Zones and nodes whose clients should use the endpoint.
    #[prost(message, optional, tag = "8")]
    pub hints: Option<EndpointHints>,
}

/// `hints` of an endpoint.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct EndpointHints {
    /// Zones whose clients should use the endpoint.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "1")]
    pub for_zones: Vec<HintName>,
    /// Nodes whose clients should use the endpoint.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "2")]
    pub for_nodes: Vec<HintName>,
}

/// Zone or node in a hint.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct HintName {
    /// Name of the zone or node.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "1")]
    pub name: String,
}

/// `conditions` of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize, prost::Message)]
pub struct EndpointConditions {
    /// Takes new connections; absent: true.
    #[prost(bool, optional, tag = "1")]
    pub ready: Option<bool>,
    /// Still serves; absent: true.
    #[prost(bool, optional, tag = "2")]
    pub serving: Option<bool>,
    /// Is terminating; absent: false.
    #[prost(bool, optional, tag = "3")]
    pub terminating: Option<bool>,
}

/// One port of a slice.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct EndpointPortSpec {
    /// Name that the Service's port has too.
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// TCP (default), UDP, SCTP.
    #[prost(string, optional, tag = "2")]
    pub protocol: Option<String>,
    /// Port on which the endpoints listen.
    #[prost(int32, optional, tag = "3")]
    pub port: Option<i32>,
}

/// v1 Node.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct Node {
    #[serde(default, rename = "kind", deserialize_with = "own_kind::<Node, _>")]
    #[prost(message, optional, tag = "1000")]
    _kind: Option<()>,
    /// Names and labels.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "1")]
    pub metadata: Metadata,
    /// State of the Node.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "3")]
    pub status: NodeStatus,
}

/// `status` of a Node.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct NodeStatus {
    /// Addresses of the Node.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "5")]
    pub addresses: Vec<NodeAddress>,
}

/// One address of a Node.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct NodeAddress {
    /// InternalIP, ExternalIP, Hostname and others.
    #[serde(default, rename = "type", deserialize_with = "null_as_default")]
    #[prost(string, tag = "1")]
    pub type_: String,
    /// IP address or host name.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "2")]
    pub address: String,
}

/// Rejects an object whose `kind` names another kind.
fn own_kind<'de, K: Object, D: Deserializer<'de>>(deserializer: D) -> Result<Option<()>, D::Error> {
    match Option::<String>::deserialize(deserializer)? {
        Some(kind) if kind != K::KIND => Err(D::Error::custom(format_args!("{kind} where {} is asked for", K::KIND))),
        _ => Ok(None),
    }
}

/// Reads `null` as an absent value: the API's objects may have either.
///
/// # Errors
/// Those of the value.
pub fn null_as_default<'de, T: Default + Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <Cow<'de, str>>::deserialize(deserializer)?;
        let time: jiff::Timestamp = text.parse().map_err(D::Error::custom)?;
        Ok(Self { seconds: Some(time.as_second()) })
    }
}

macro_rules! object {
    ($type:ty, $group:literal, $version:literal, $kind:literal, $plural:literal $(, $lost_without:literal)?) => {
        impl Object for $type {
            const GROUP: &'static str = $group;
            const VERSION: &'static str = $version;
            const KIND: &'static str = $kind;
            const PLURAL: &'static str = $plural;
            $(const LOST_WITHOUT: Option<&'static str> = Some($lost_without);)?

            fn metadata(&self) -> &Metadata {
                &self.metadata
            }
        }
    };
}

object!(Service, "", "v1", "Service", "services");
object!(EndpointSlice, "discovery.k8s.io", "v1", "EndpointSlice", "endpointslices");
object!(
    Node,
    "",
    "v1",
    "Node",
    "nodes",
    "zone hints are not followed and, without --node-ip, node ports are not served"
);
