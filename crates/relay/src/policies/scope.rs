//! Pods whose policies a client gets.

use cproxy_core::ObjectName;
use cproxy_policy::PodIdentity;

/// Pods whose policies a client gets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PolicyScope {
    /// One pod. Without a UID, whatever pod has the name.
    Pod {
        /// Name of the pod.
        name: ObjectName,
        /// Identity of the pod: a later pod with its name is another one.
        uid: Option<Box<str>>,
    },
    /// All pods of a node.
    Node(Box<str>),
}

impl PolicyScope {
    /// Whether a pod is the client's.
    pub(super) fn shows(&self, name: &ObjectName, pod: &PodIdentity) -> bool {
        match self {
            Self::Pod { name: own, uid } => own == name && uid.as_ref().is_none_or(|uid| *uid == pod.uid),
            Self::Node(node_name) => *node_name == pod.node_name,
        }
    }

    /// Topic of notices about its pods.
    pub(super) fn topic(&self) -> Box<str> {
        match self {
            Self::Pod { name, .. } => Self::topic_of_pod(name),
            Self::Node(node_name) => Self::topic_of_node(node_name),
        }
    }

    pub(super) fn topic_of_pod(name: &ObjectName) -> Box<str> {
        format!("pod {name}").into()
    }

    pub(super) fn topic_of_node(node_name: &str) -> Box<str> {
        format!("node {node_name}").into()
    }
}
