//! The parts of Kubernetes objects that cproxy reads, and nothing else: an object of many kilobytes is read into these
//! without ever being kept whole.

use std::borrow::Cow;

use k8s_openapi::{ClusterResourceScope, NamespaceResourceScope};
use kube::core::{ObjectMeta, Resource};
use serde::{Deserialize, Deserializer, de::Error as _};

/// v1 Service.
#[expect(clippy::manual_non_exhaustive, reason = "the kind is looked at and not kept")]
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Service {
    #[serde(default, rename = "kind", deserialize_with = "own_kind::<Service, _>")]
    _kind: (),
    /// Names and labels.
    #[serde(default, deserialize_with = "slim_metadata")]
    pub metadata: ObjectMeta,
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
    #[serde(default, deserialize_with = "slim_metadata")]
    pub metadata: ObjectMeta,
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
    #[serde(default, deserialize_with = "slim_metadata")]
    pub metadata: ObjectMeta,
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

/// An object that says that it is of another kind is none of this one.
fn own_kind<'de, K: Resource<DynamicType = ()>, D: Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
    let own = K::kind(&());
    match Option::<String>::deserialize(deserializer)? {
        Some(kind) if kind != own => Err(D::Error::custom(format_args!("{kind} where {own} is asked for"))),
        _ => Ok(()),
    }
}

/// Reads of `metadata` what is used; above all it leaves `managedFields` where they are.
fn slim_metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    #[derive(Default, Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Metadata {
        name: Option<String>,
        namespace: Option<String>,
        resource_version: Option<String>,
        labels: Option<std::collections::BTreeMap<String, String>>,
        creation_timestamp: Option<k8s_openapi::apimachinery::pkg::apis::meta::v1::Time>,
    }
    let metadata = Option::<Metadata>::deserialize(deserializer)?.unwrap_or_default();
    Ok(ObjectMeta {
        name: metadata.name,
        namespace: metadata.namespace,
        resource_version: metadata.resource_version,
        labels: metadata.labels,
        creation_timestamp: metadata.creation_timestamp,
        ..ObjectMeta::default()
    })
}

/// Tells kube where the API server keeps a type.
macro_rules! resource {
    ($type:ty, $scope:ty, $group:literal, $version:literal, $kind:literal, $plural:literal) => {
        impl Resource for $type {
            type DynamicType = ();
            type Scope = $scope;

            fn kind(_: &()) -> Cow<'_, str> {
                $kind.into()
            }
            fn group(_: &()) -> Cow<'_, str> {
                $group.into()
            }
            fn version(_: &()) -> Cow<'_, str> {
                $version.into()
            }
            fn plural(_: &()) -> Cow<'_, str> {
                $plural.into()
            }
            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }
            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

resource!(Service, NamespaceResourceScope, "", "v1", "Service", "services");
resource!(EndpointSlice, NamespaceResourceScope, "discovery.k8s.io", "v1", "EndpointSlice", "endpointslices");
resource!(Node, ClusterResourceScope, "", "v1", "Node", "nodes");
