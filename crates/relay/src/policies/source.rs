//! Source of policies: the resolver, or another relay that has resolved them.

use std::collections::{BTreeMap, BTreeSet};

use cproxy_core::{ObjectName, Problem};
use cproxy_policy::{AddressSlice, Changes, PodIdentity, PodPolicy, Resolver, SliceName};

use super::{
    input::{PolicyChange, PolicyInput, cluster_scoped},
    summary::PolicySummary,
};

/// Source of policies.
pub(super) enum Source {
    /// Policies are resolved here.
    Resolver(Box<Resolver>),
    /// Policies are those of another relay.
    Followed(Followed),
}

/// Policies and slices of another relay.
#[derive(Default)]
pub(super) struct Followed {
    policies: BTreeMap<ObjectName, PodPolicy>,
    slices: BTreeMap<SliceName, AddressSlice>,
}

impl Source {
    pub(super) fn resolver() -> Self {
        Self::Resolver(Box::default())
    }

    pub(super) fn followed() -> Self {
        Self::Followed(Followed::default())
    }

    /// Kinds of objects from which it follows.
    pub(super) fn inputs(&self) -> &'static [PolicyInput] {
        match self {
            Self::Resolver(_) => &[PolicyInput::Pods, PolicyInput::Namespaces, PolicyInput::NetworkPolicies],
            Self::Followed(_) => &[PolicyInput::PodPolicies, PolicyInput::AddressSlices],
        }
    }

    /// Applies a change. Changes of the other source's kinds mean nothing.
    pub(super) fn apply(&mut self, change: PolicyChange) -> Changes {
        match (self, change) {
            (Self::Resolver(resolver), PolicyChange::Resolved(event)) => resolver.apply(event),
            (Self::Followed(followed), change) => followed.apply(change),
            (Self::Resolver(_), _) => Changes::default(),
        }
    }

    /// Names of all objects of a kind that are known.
    pub(super) fn names(&self, input: PolicyInput) -> Vec<ObjectName> {
        match (self, input) {
            (Self::Resolver(resolver), PolicyInput::Pods) => resolver.pods().cloned().collect(),
            (Self::Resolver(resolver), PolicyInput::Namespaces) => {
                resolver.namespaces().map(|name| cluster_scoped(name)).collect()
            }
            (Self::Resolver(resolver), PolicyInput::NetworkPolicies) => resolver.policies().cloned().collect(),
            (Self::Followed(followed), PolicyInput::PodPolicies) => followed.policies.keys().cloned().collect(),
            (Self::Followed(followed), PolicyInput::AddressSlices) => {
                followed.slices.keys().map(|name| cluster_scoped(&name.to_string())).collect()
            }
            _ => Vec::new(),
        }
    }

    pub(super) fn identity(&self, name: &ObjectName) -> Option<PodIdentity> {
        match self {
            Self::Resolver(resolver) => resolver.pod_identity(name),
            Self::Followed(followed) => followed.policies.get(name).map(identity),
        }
    }

    pub(super) fn policy(&self, name: &ObjectName) -> Option<PodPolicy> {
        match self {
            Self::Resolver(resolver) => resolver.pod_policy(name),
            Self::Followed(followed) => followed.policies.get(name).cloned(),
        }
    }

    pub(super) fn pods_of_node(&self, node_name: &str) -> Vec<ObjectName> {
        match self {
            Self::Resolver(resolver) => resolver.pods_of_node(node_name).cloned().collect(),
            Self::Followed(followed) => {
                let is_there = |policy: &&PodPolicy| *policy.node_name == *node_name;
                followed.policies.values().filter(is_there).map(|policy| policy.name.clone()).collect()
            }
        }
    }

    pub(super) fn find_pod(&self, uid: &str) -> Option<ObjectName> {
        match self {
            Self::Resolver(resolver) => resolver.find_pod(uid).cloned(),
            Self::Followed(followed) => {
                followed.policies.values().find(|policy| *policy.uid == *uid).map(|policy| policy.name.clone())
            }
        }
    }

    pub(super) fn slice(&self, name: SliceName) -> Option<AddressSlice> {
        match self {
            Self::Resolver(resolver) => resolver.slice(name),
            Self::Followed(followed) => followed.slices.get(&name).cloned(),
        }
    }

    pub(super) fn slices(&self) -> Vec<SliceName> {
        match self {
            Self::Resolver(resolver) => resolver.slices().collect(),
            Self::Followed(followed) => followed.slices.keys().copied().collect(),
        }
    }

    /// Rules that name sets of which no address is allowed. Another relay reports its own.
    pub(super) fn problems(&self) -> BTreeSet<Problem> {
        match self {
            Self::Resolver(resolver) => resolver.problems(),
            Self::Followed(_) => BTreeSet::new(),
        }
    }

    /// Numbers about what is known.
    pub(super) fn counts(&self) -> PolicySummary {
        let (pods, sets, oversized) = match self {
            Self::Resolver(resolver) => (resolver.pods().count(), resolver.set_count(), resolver.problems().len()),
            Self::Followed(followed) => {
                let sets: BTreeSet<_> = followed.slices.keys().map(|name| name.set.name).collect();
                (followed.policies.len(), sets.len(), 0)
            }
        };
        PolicySummary { pods, sets, oversized, ..PolicySummary::default() }
    }
}

impl Followed {
    fn apply(&mut self, change: PolicyChange) -> Changes {
        let mut changes = Changes::default();
        match change {
            PolicyChange::Policy(policy) => {
                let name = policy.name.clone();
                if self.policies.insert(name.clone(), (*policy).clone()).as_ref() != Some(&*policy) {
                    changes.pods.insert(name);
                }
            }
            PolicyChange::PolicyDeleted(name) => {
                if self.policies.remove(&name).is_some() {
                    changes.pods.insert(name);
                }
            }
            PolicyChange::Slice(slice) => {
                let name = slice.name;
                if self.slices.insert(name, slice.clone()).as_ref() != Some(&slice) {
                    changes.slices.insert(name);
                }
            }
            PolicyChange::SliceDeleted(name) => {
                if self.slices.remove(&name).is_some() {
                    changes.slices.insert(name);
                }
            }
            PolicyChange::Resolved(_) => {}
        }
        changes
    }
}

fn identity(policy: &PodPolicy) -> PodIdentity {
    PodIdentity { uid: policy.uid.clone(), node_name: policy.node_name.clone() }
}
