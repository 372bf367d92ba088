//! Slim Kubernetes objects: the fields that cproxy reads, and nothing else. An object of many kilobytes is decoded into
//! these without being held whole.

use std::collections::BTreeMap;

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _},
};

/// A kind of Kubernetes object.
pub trait Object: DeserializeOwned {
    /// API group; empty for the core group.
    const GROUP: &'static str;
    /// Version within the group.
    const VERSION: &'static str;
    /// `kind` of an object.
    const KIND: &'static str;
    /// Resource name in URLs.
    const PLURAL: &'static str;

    /// Name, labels and version of the object.
    fn metadata(&self) -> &Metadata;
}

/// `metadata` of an object. `managedFields`, annotations and owner references are skipped while it is decoded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// Name within the namespace.
    pub name: Option<String>,
    /// Namespace; a cluster-scoped object has none.
    pub namespace: Option<String>,
    /// Version to resume a watch from.
    pub resource_version: Option<String>,
    /// Labels.
    pub labels: Option<BTreeMap<String, String>>,
    /// Creation time in seconds since 1970.
    #[serde(default, rename = "creationTimestamp", deserialize_with = "seconds")]
    pub created_s: Option<i64>,
}

/// v1 Service.
#[expect(clippy::manual_non_exhaustive, reason = "the kind is looked at and not kept")]
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Service {
    #[serde(default, rename = "kind", deserialize_with = "own_kind::<Service, _>")]
    _kind: (),
    /// Names and labels.
    #[serde(default, deserialize_with = "null_as_default")]
    pub metadata: Metadata,
    /// What it serves.
    pub spec: Option<ServiceSpec>,
    /// What others have made of it.
    pub status: Option<ServiceStatus>,
}

/// `spec` of a Service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceSpec {
    /// ClusterIP, NodePort, LoadBalancer or ExternalName.
    #[serde(rename = "type")]
    pub type_: Option<String>,
    /// The first ClusterIP, "None" or nothing.
    #[serde(rename = "clusterIP")]
    pub cluster_ip: Option<String>,
    /// The ClusterIPs, in the order of `ip_families`.
    #[serde(rename = "clusterIPs")]
    pub cluster_ips: Option<Vec<String>>,
    /// IPv4, IPv6.
    pub ip_families: Option<Vec<String>>,
    /// Its ports.
    pub ports: Option<Vec<ServicePortSpec>>,
    /// None or ClientIP.
    pub session_affinity: Option<String>,
    /// More about ClientIP.
    pub session_affinity_config: Option<SessionAffinityConfig>,
    /// Cluster or Local.
    pub internal_traffic_policy: Option<String>,
    /// Addresses outside the cluster that lead to it.
    #[serde(rename = "externalIPs")]
    pub external_ips: Option<Vec<String>>,
    /// Who may use its load balancer's addresses; nothing means everybody.
    pub load_balancer_source_ranges: Option<Vec<String>>,
}

/// `status` of a Service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceStatus {
    /// What its load balancer has.
    pub load_balancer: Option<LoadBalancerStatus>,
}

/// `status.loadBalancer` of a Service.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct LoadBalancerStatus {
    /// Its addresses.
    pub ingress: Option<Vec<LoadBalancerIngress>>,
}

/// One address of a load balancer.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadBalancerIngress {
    /// The address; an entry may have a host name only.
    pub ip: Option<String>,
    /// VIP (default) or Proxy.
    pub ip_mode: Option<String>,
}

/// `spec.sessionAffinityConfig` of a Service.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct SessionAffinityConfig {
    /// For ClientIP.
    #[serde(rename = "clientIP")]
    pub client_ip: Option<ClientIpConfig>,
}

/// How session affinity by ClientIP behaves.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClientIpConfig {
    /// For how long a client is remembered.
    pub timeout_seconds: Option<i64>,
}

/// One of a Service's ports.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServicePortSpec {
    /// Its name; may be missing where there is only one.
    pub name: Option<String>,
    /// TCP (default), UDP, SCTP.
    pub protocol: Option<String>,
    /// The port.
    pub port: Option<i64>,
    /// The port on every node; 0 is none.
    pub node_port: Option<i64>,
}

/// discovery.k8s.io/v1 EndpointSlice.
#[expect(clippy::manual_non_exhaustive, reason = "the kind is looked at and not kept")]
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointSlice {
    #[serde(default, rename = "kind", deserialize_with = "own_kind::<EndpointSlice, _>")]
    _kind: (),
    /// Names and labels.
    #[serde(default, deserialize_with = "null_as_default")]
    pub metadata: Metadata,
    /// IPv4, IPv6 or FQDN.
    pub address_type: Option<String>,
    /// The endpoints.
    pub endpoints: Option<Vec<EndpointSpec>>,
    /// The ports that each of the endpoints has.
    pub ports: Option<Vec<EndpointPortSpec>>,
}

/// One endpoint of a slice.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointSpec {
    /// Its addresses; only the first counts.
    pub addresses: Option<Vec<String>>,
    /// Its state.
    pub conditions: Option<EndpointConditions>,
    /// The node it runs on.
    pub node_name: Option<String>,
    /// For whom it is meant.
    pub hints: Option<EndpointHints>,
}

/// For whom an endpoint is meant.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointHints {
    /// Clients in these zones.
    pub for_zones: Option<Vec<HintName>>,
    /// Clients on these nodes.
    pub for_nodes: Option<Vec<HintName>>,
}

/// A zone or node in a hint.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct HintName {
    /// Its name.
    pub name: Option<String>,
}

/// The state of an endpoint.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct EndpointConditions {
    /// Nothing means true.
    pub ready: Option<bool>,
    /// Nothing means true.
    pub serving: Option<bool>,
    /// Nothing means false.
    pub terminating: Option<bool>,
}

/// One port of a slice.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct EndpointPortSpec {
    /// The name that the Service's port has too.
    pub name: Option<String>,
    /// TCP (default), UDP, SCTP.
    pub protocol: Option<String>,
    /// The endpoints' own port.
    pub port: Option<i64>,
}

/// v1 Node.
#[expect(clippy::manual_non_exhaustive, reason = "the kind is looked at and not kept")]
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Node {
    #[serde(default, rename = "kind", deserialize_with = "own_kind::<Node, _>")]
    _kind: (),
    /// Names and labels.
    #[serde(default, deserialize_with = "null_as_default")]
    pub metadata: Metadata,
    /// How it is.
    pub status: Option<NodeStatus>,
}

/// `status` of a Node.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct NodeStatus {
    /// Its addresses.
    pub addresses: Option<Vec<NodeAddress>>,
}

/// One address of a Node.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct NodeAddress {
    /// InternalIP, ExternalIP, Hostname and others.
    #[serde(rename = "type")]
    pub type_: Option<String>,
    /// The address.
    pub address: Option<String>,
}

/// An object that names another kind is not one of this kind.
fn own_kind<'de, K: Object, D: Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
    match Option::<String>::deserialize(deserializer)? {
        Some(kind) if kind != K::KIND => Err(D::Error::custom(format_args!("{kind} where {} is asked for", K::KIND))),
        _ => Ok(()),
    }
}

fn null_as_default<'de, T: Default + Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// RFC 3339, as the API server writes times.
fn seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<i64>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
    text.parse().map(|time: jiff::Timestamp| Some(time.as_second())).map_err(D::Error::custom)
}

macro_rules! object {
    ($type:ty, $group:literal, $version:literal, $kind:literal, $plural:literal) => {
        impl Object for $type {
            const GROUP: &'static str = $group;
            const VERSION: &'static str = $version;
            const KIND: &'static str = $kind;
            const PLURAL: &'static str = $plural;

            fn metadata(&self) -> &Metadata {
                &self.metadata
            }
        }
    };
}

object!(Service, "", "v1", "Service", "services");
object!(EndpointSlice, "discovery.k8s.io", "v1", "EndpointSlice", "endpointslices");
object!(Node, "", "v1", "Node", "nodes");
