//! Slim Kubernetes objects with only the fields that cproxy reads. Decoding never holds an object of many kilobytes in
//! memory as a whole.

use std::collections::BTreeMap;

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _},
};

/// Kind of Kubernetes object.
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
    /// `spec` of the Service.
    pub spec: Option<ServiceSpec>,
    /// `status` of the Service.
    pub status: Option<ServiceStatus>,
}

/// `spec` of a Service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceSpec {
    /// ClusterIP, NodePort, LoadBalancer or ExternalName.
    #[serde(rename = "type")]
    pub type_: Option<String>,
    /// First ClusterIP, "None" or absent.
    #[serde(rename = "clusterIP")]
    pub cluster_ip: Option<String>,
    /// ClusterIPs, in the order of `ip_families`.
    #[serde(rename = "clusterIPs")]
    pub cluster_ips: Option<Vec<String>>,
    /// IPv4, IPv6.
    pub ip_families: Option<Vec<String>>,
    /// Ports of the Service.
    pub ports: Option<Vec<ServicePortSpec>>,
    /// None or ClientIP.
    pub session_affinity: Option<String>,
    /// Settings of ClientIP affinity.
    pub session_affinity_config: Option<SessionAffinityConfig>,
    /// Cluster or Local.
    pub internal_traffic_policy: Option<String>,
    /// Addresses outside the cluster that lead to the Service.
    #[serde(rename = "externalIPs")]
    pub external_ips: Option<Vec<String>>,
    /// Clients that may use the load balancer's addresses; absent: all.
    pub load_balancer_source_ranges: Option<Vec<String>>,
}

/// `status` of a Service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceStatus {
    /// State of the load balancer.
    pub load_balancer: Option<LoadBalancerStatus>,
}

/// `status.loadBalancer` of a Service.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct LoadBalancerStatus {
    /// Addresses of the load balancer.
    pub ingress: Option<Vec<LoadBalancerIngress>>,
}

/// One address of a load balancer.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadBalancerIngress {
    /// IP address; an entry may have a host name only.
    pub ip: Option<String>,
    /// VIP (default) or Proxy.
    pub ip_mode: Option<String>,
}

/// `spec.sessionAffinityConfig` of a Service.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct SessionAffinityConfig {
    /// Settings of ClientIP affinity.
    #[serde(rename = "clientIP")]
    pub client_ip: Option<ClientIpConfig>,
}

/// `clientIP` of the session affinity's settings.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClientIpConfig {
    /// Time for which a client keeps its backend.
    pub timeout_seconds: Option<i64>,
}

/// One port of a Service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServicePortSpec {
    /// Name of the port; optional for a single port.
    pub name: Option<String>,
    /// TCP (default), UDP, SCTP.
    pub protocol: Option<String>,
    /// Port number.
    pub port: Option<i64>,
    /// Port on every node; 0 means none.
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
    /// Endpoints of the slice.
    pub endpoints: Option<Vec<EndpointSpec>>,
    /// Ports that every endpoint of the slice has.
    pub ports: Option<Vec<EndpointPortSpec>>,
}

/// One endpoint of a slice.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointSpec {
    /// Addresses of the endpoint; only the first counts.
    pub addresses: Option<Vec<String>>,
    /// State of the endpoint.
    pub conditions: Option<EndpointConditions>,
    /// Name of the endpoint's node.
    pub node_name: Option<String>,
    /// Zones and nodes whose clients should use the endpoint.
    pub hints: Option<EndpointHints>,
}

/// `hints` of an endpoint.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointHints {
    /// Zones whose clients should use the endpoint.
    pub for_zones: Option<Vec<HintName>>,
    /// Nodes whose clients should use the endpoint.
    pub for_nodes: Option<Vec<HintName>>,
}

/// Zone or node in a hint.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct HintName {
    /// Name of the zone or node.
    pub name: Option<String>,
}

/// `conditions` of an endpoint.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct EndpointConditions {
    /// Takes new connections; absent: true.
    pub ready: Option<bool>,
    /// Still serves; absent: true.
    pub serving: Option<bool>,
    /// Is terminating; absent: false.
    pub terminating: Option<bool>,
}

/// One port of a slice.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct EndpointPortSpec {
    /// Name that the Service's port has too.
    pub name: Option<String>,
    /// TCP (default), UDP, SCTP.
    pub protocol: Option<String>,
    /// Port on which the endpoints listen.
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
    /// State of the Node.
    pub status: Option<NodeStatus>,
}

/// `status` of a Node.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct NodeStatus {
    /// Addresses of the Node.
    pub addresses: Option<Vec<NodeAddress>>,
}

/// One address of a Node.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct NodeAddress {
    /// InternalIP, ExternalIP, Hostname and others.
    #[serde(rename = "type")]
    pub type_: Option<String>,
    /// IP address or host name.
    pub address: Option<String>,
}

/// Rejects an object whose `kind` names another kind.
fn own_kind<'de, K: Object, D: Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
    match Option::<String>::deserialize(deserializer)? {
        Some(kind) if kind != K::KIND => Err(D::Error::custom(format_args!("{kind} where {} is asked for", K::KIND))),
        _ => Ok(()),
    }
}

fn null_as_default<'de, T: Default + Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// Decodes an RFC 3339 time, the API server's format, to seconds since 1970.
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
