//! Slim Pods, Namespaces and NetworkPolicies with only the fields that policies need, from JSON and from protobuf. All
//! other fields, such as the environment and the volumes of a Pod, are skipped while an object is decoded.
//!
//! Fields are as in [`cproxy_core::api`].

use std::collections::BTreeMap;

use cproxy_core::api::{Time, null_as_default};
use serde::{Deserialize, Deserializer};

/// `metadata` of an object.
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
    /// Identity of the object.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "5")]
    pub uid: String,
    /// Version to resume a watch from.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "6")]
    pub resource_version: String,
    /// Creation time.
    #[serde(default, rename = "creationTimestamp", deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "8")]
    pub created: Time,
    /// Time from which the object is being deleted.
    #[serde(default, rename = "deletionTimestamp")]
    #[prost(message, optional, tag = "9")]
    pub deleted: Option<Time>,
    /// Labels.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(btree_map = "string, string", tag = "11")]
    pub labels: BTreeMap<String, String>,
}

/// v1 Namespace.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct Namespace {
    /// Name and labels.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "1")]
    pub metadata: Metadata,
}

/// v1 Pod.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct Pod {
    /// Names, labels and times.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "1")]
    pub metadata: Metadata,
    /// `spec` of the Pod.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "2")]
    pub spec: PodSpec,
    /// `status` of the Pod.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "3")]
    pub status: PodStatus,
}

/// `spec` of a Pod.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec {
    /// Containers.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "2")]
    pub containers: Vec<Container>,
    /// Name of the Pod's node; empty before it is scheduled.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "10")]
    pub node_name: String,
    /// Whether the Pod is in the network of its node.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(bool, tag = "11")]
    pub host_network: bool,
    /// Containers that run before the others; those with `restartPolicy: Always` run on beside them.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "20")]
    pub init_containers: Vec<Container>,
}

/// Container of a Pod.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct Container {
    /// Ports on which it listens.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "6")]
    pub ports: Vec<ContainerPort>,
    /// Always for an init container that runs on.
    #[prost(string, optional, tag = "24")]
    pub restart_policy: Option<String>,
}

/// Port of a container.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct ContainerPort {
    /// Name of the port; optional.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "1")]
    pub name: String,
    /// Number of the port.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(int32, tag = "3")]
    pub container_port: i32,
    /// TCP (default), UDP, SCTP.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "4")]
    pub protocol: String,
}

/// `status` of a Pod.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct PodStatus {
    /// Pending, Running, Succeeded, Failed or Unknown.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "1")]
    pub phase: String,
    /// First address of the node.
    #[serde(default, rename = "hostIP", deserialize_with = "null_as_default")]
    #[prost(string, tag = "5")]
    pub host_ip: String,
    /// First address of the Pod.
    #[serde(default, rename = "podIP", deserialize_with = "null_as_default")]
    #[prost(string, tag = "6")]
    pub pod_ip: String,
    /// Addresses of the Pod.
    #[serde(default, rename = "podIPs", deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "12")]
    pub pod_ips: Vec<Ip>,
    /// Addresses of the node; none from API servers before 1.29.
    #[serde(default, rename = "hostIPs", deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "16")]
    pub host_ips: Vec<Ip>,
}

/// Address of a Pod or of its node.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct Ip {
    /// IP address.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "1")]
    pub ip: String,
}

/// networking.k8s.io/v1 NetworkPolicy.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct NetworkPolicy {
    /// Names.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "1")]
    pub metadata: Metadata,
    /// `spec` of the policy.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "2")]
    pub spec: NetworkPolicySpec,
}

/// `spec` of a NetworkPolicy.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct NetworkPolicySpec {
    /// Pods of the policy's namespace that it applies to.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, required, tag = "1")]
    pub pod_selector: LabelSelector,
    /// Rules for traffic to the pods.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "2")]
    pub ingress: Vec<IngressRule>,
    /// Rules for traffic from the pods.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "3")]
    pub egress: Vec<EgressRule>,
    /// Ingress, Egress; empty: Ingress, and Egress if there are rules of it.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, repeated, tag = "4")]
    pub policy_types: Vec<String>,
}

/// Rule for traffic to the pods.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct IngressRule {
    /// Ports of the pods; empty: all.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "1")]
    pub ports: Vec<PolicyPort>,
    /// Peers; empty: all.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "2")]
    pub from: Vec<Peer>,
}

/// Rule for traffic from the pods.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct EgressRule {
    /// Ports of the peers; empty: all.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "1")]
    pub ports: Vec<PolicyPort>,
    /// Peers; empty: all.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "2")]
    pub to: Vec<Peer>,
}

/// Port of a rule.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct PolicyPort {
    /// TCP (default), UDP, SCTP.
    #[prost(string, optional, tag = "1")]
    pub protocol: Option<String>,
    /// Number or name; absent: all ports of the protocol.
    #[prost(message, optional, tag = "2")]
    pub port: Option<IntOrString>,
    /// Last port of a range.
    #[prost(int32, optional, tag = "3")]
    pub end_port: Option<i32>,
}

/// A number or a text; in JSON it is that.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct IntOrString {
    /// 0: number; 1: text.
    #[prost(int64, tag = "1")]
    pub kind: i64,
    /// The number.
    #[prost(int32, tag = "2")]
    pub number: i32,
    /// The text.
    #[prost(string, tag = "3")]
    pub text: String,
}

/// Peer of a rule: an `ipBlock`, or one or both selectors.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct Peer {
    /// Pods; absent beside a namespace selector: all.
    #[prost(message, optional, tag = "1")]
    pub pod_selector: Option<LabelSelector>,
    /// Namespaces; absent: the policy's own.
    #[prost(message, optional, tag = "2")]
    pub namespace_selector: Option<LabelSelector>,
    /// Range of addresses.
    #[prost(message, optional, tag = "3")]
    pub ip_block: Option<IpBlock>,
}

/// Range of addresses with exceptions.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct IpBlock {
    /// The range.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "1")]
    pub cidr: String,
    /// Ranges within it that are left out.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, repeated, tag = "2")]
    pub except: Vec<String>,
}

/// Selector of objects by labels.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub struct LabelSelector {
    /// Labels with their values.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(btree_map = "string, string", tag = "1")]
    pub match_labels: BTreeMap<String, String>,
    /// Further requirements.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(message, repeated, tag = "2")]
    pub match_expressions: Vec<LabelSelectorRequirement>,
}

/// Requirement of a selector.
#[derive(Clone, PartialEq, Eq, Deserialize, prost::Message)]
pub struct LabelSelectorRequirement {
    /// Key of the label.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "1")]
    pub key: String,
    /// In, NotIn, Exists or DoesNotExist.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, tag = "2")]
    pub operator: String,
    /// Values of In and NotIn.
    #[serde(default, deserialize_with = "null_as_default")]
    #[prost(string, repeated, tag = "3")]
    pub values: Vec<String>,
}

impl<'de> Deserialize<'de> for IntOrString {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Number(i32),
            Text(String),
        }
        Ok(match Either::deserialize(deserializer)? {
            Either::Number(number) => Self { number, ..Self::default() },
            Either::Text(text) => Self { kind: 1, text, ..Self::default() },
        })
    }
}
