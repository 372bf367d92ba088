//! Kinds of objects that the relay serves.

use cproxy_core::{
    ResourceKind,
    api::{EndpointSlice, Node, Object, Service},
};
use cproxy_policy::served;

/// Kind of object that the relay serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// v1 Service.
    Services,
    /// discovery.k8s.io/v1 EndpointSlice.
    EndpointSlices,
    /// v1 Node.
    Nodes,
    /// policy.cproxy.dev/v1alpha1 PodPolicy.
    PodPolicies,
    /// policy.cproxy.dev/v1alpha1 AddressSlice.
    AddressSlices,
}

/// Kinds that the relay passes on as the API server has them.
pub const KINDS: [Kind; 3] = [Kind::Services, Kind::EndpointSlices, Kind::Nodes];

/// Kinds that the relay serves with `--policies` besides.
pub const POLICY_KINDS: [Kind; 2] = [Kind::PodPolicies, Kind::AddressSlices];

/// Kinds that the relay serves.
pub fn served_kinds(has_policies: bool) -> impl Iterator<Item = Kind> {
    KINDS.into_iter().chain(POLICY_KINDS.into_iter().filter(move |_| has_policies))
}

impl Kind {
    /// API group; empty for the core group.
    #[must_use]
    pub fn group(self) -> &'static str {
        match self {
            Self::Services => Service::GROUP,
            Self::EndpointSlices => EndpointSlice::GROUP,
            Self::Nodes => Node::GROUP,
            Self::PodPolicies | Self::AddressSlices => served::GROUP,
        }
    }

    /// Version within the group.
    #[must_use]
    pub fn version(self) -> &'static str {
        match self {
            Self::Services | Self::EndpointSlices | Self::Nodes => "v1",
            Self::PodPolicies | Self::AddressSlices => served::VERSION,
        }
    }

    /// API version of the kind, as `apiVersion` has it.
    #[must_use]
    pub fn api_version(self) -> &'static str {
        match self {
            Self::Services | Self::Nodes => "v1",
            Self::EndpointSlices => "discovery.k8s.io/v1",
            Self::PodPolicies | Self::AddressSlices => served::API_VERSION,
        }
    }

    /// `kind` of one object.
    #[must_use]
    pub fn singular(self) -> &'static str {
        match self {
            Self::Services => Service::KIND,
            Self::EndpointSlices => EndpointSlice::KIND,
            Self::Nodes => Node::KIND,
            Self::PodPolicies => served::PodPolicy::KIND,
            Self::AddressSlices => served::AddressSlice::KIND,
        }
    }

    /// Resource name, as it is in paths.
    #[must_use]
    pub fn plural(self) -> &'static str {
        match self {
            Self::Services => Service::PLURAL,
            Self::EndpointSlices => EndpointSlice::PLURAL,
            Self::Nodes => Node::PLURAL,
            Self::PodPolicies => served::PodPolicy::PLURAL,
            Self::AddressSlices => served::AddressSlice::PLURAL,
        }
    }

    /// Whether its objects are in namespaces.
    #[must_use]
    pub fn is_namespaced(self) -> bool {
        !matches!(self, Self::Nodes | Self::AddressSlices)
    }

    /// Kind in the agent's store; `None` for those that are not there.
    #[must_use]
    pub fn resource(self) -> Option<ResourceKind> {
        match self {
            Self::Services => Some(ResourceKind::Services),
            Self::EndpointSlices => Some(ResourceKind::EndpointSlices),
            Self::Nodes => Some(ResourceKind::Nodes),
            Self::PodPolicies | Self::AddressSlices => None,
        }
    }
}
