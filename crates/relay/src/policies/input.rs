//! Objects from which policies follow, and how far each kind of them is known.

use std::collections::BTreeSet;

use cproxy_core::ObjectName;
use cproxy_policy::{AddressSlice, Event, PodPolicy, SliceName};

/// Kind of object from which policies follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyInput {
    /// v1 Pod.
    Pods,
    /// v1 Namespace.
    Namespaces,
    /// networking.k8s.io/v1 NetworkPolicy.
    NetworkPolicies,
    /// PodPolicy of another relay.
    PodPolicies,
    /// AddressSlice of another relay.
    AddressSlices,
}

/// Change of an object.
#[derive(Clone, Debug)]
pub enum PolicyChange {
    /// Of a Pod, Namespace or NetworkPolicy.
    Resolved(Event),
    /// Policy of a pod, from another relay.
    Policy(Box<PodPolicy>),
    /// The policy of the pod is gone.
    PolicyDeleted(ObjectName),
    /// Slice, from another relay.
    Slice(AddressSlice),
    /// The slice is gone.
    SliceDeleted(SliceName),
}

/// Update of one kind's objects.
#[derive(Clone, Debug)]
pub enum PolicyUpdate {
    /// A list begins.
    ListStarted,
    /// Object of the list.
    Listed(PolicyChange),
    /// Object of the list that cannot be read: its last state stays.
    ListedUnreadable(ObjectName),
    /// The list is complete, at this revision.
    ListDone(u64),
    /// Object that was added, changed or deleted, at this revision.
    Applied(PolicyChange, u64),
    /// All changes up to this revision have been sent.
    Known(u64),
}

impl PolicyChange {
    /// Deletion of an object.
    pub(super) fn gone(input: PolicyInput, name: ObjectName) -> Self {
        match input {
            PolicyInput::Pods => Self::Resolved(Event::PodDeleted(name)),
            PolicyInput::Namespaces => Self::Resolved(Event::NamespaceDeleted((&*name.name).into())),
            PolicyInput::NetworkPolicies => Self::Resolved(Event::PolicyDeleted(name)),
            PolicyInput::PodPolicies => Self::PolicyDeleted(name),
            PolicyInput::AddressSlices => match SliceName::parse(&name.name) {
                Some(name) => Self::SliceDeleted(name),
                // Slices have no other names.
                None => Self::PolicyDeleted(name),
            },
        }
    }

    /// Name of the object.
    pub(super) fn name(&self) -> ObjectName {
        match self {
            Self::Resolved(Event::Pod(pod)) => pod.name.clone(),
            Self::Resolved(Event::Namespace(namespace)) => cluster_scoped(&namespace.name),
            Self::Resolved(Event::Policy(policy)) => policy.name.clone(),
            Self::Resolved(Event::PodDeleted(name) | Event::PolicyDeleted(name)) | Self::PolicyDeleted(name) => {
                name.clone()
            }
            Self::Resolved(Event::NamespaceDeleted(name)) => cluster_scoped(name),
            Self::Policy(policy) => policy.name.clone(),
            Self::Slice(slice) => cluster_scoped(&slice.name.to_string()),
            Self::SliceDeleted(name) => cluster_scoped(&name.to_string()),
        }
    }

    /// Name of the pod whose object it is.
    pub(super) fn pod(&self) -> Option<ObjectName> {
        match self {
            Self::Resolved(Event::Pod(_) | Event::PodDeleted(_)) | Self::Policy(_) | Self::PolicyDeleted(_) => {
                Some(self.name())
            }
            _ => None,
        }
    }
}

/// Name of an object without a namespace.
pub(super) fn cluster_scoped(name: &str) -> ObjectName {
    ObjectName::new("", name)
}

/// How far each kind of object is known.
#[derive(Debug)]
pub(super) struct Inputs(Vec<Progress>);

#[derive(Debug)]
struct Progress {
    input: PolicyInput,
    /// Revision up to which all changes are known; `None` before the first list is complete.
    known: Option<u64>,
    /// Objects of the list that is under way.
    listed: BTreeSet<ObjectName>,
}

impl Inputs {
    pub(super) fn new(inputs: &[PolicyInput]) -> Self {
        let progress = |&input| Progress { input, known: None, listed: BTreeSet::new() };
        Self(inputs.iter().map(progress).collect())
    }

    fn of(&mut self, input: PolicyInput) -> Option<&mut Progress> {
        self.0.iter_mut().find(|progress| progress.input == input)
    }

    pub(super) fn start_list(&mut self, input: PolicyInput) {
        if let Some(progress) = self.of(input) {
            progress.listed.clear();
        }
    }

    pub(super) fn record_listed(&mut self, input: PolicyInput, name: ObjectName) {
        if let Some(progress) = self.of(input) {
            progress.listed.insert(name);
        }
    }

    /// Ends a list. Returns the names of its objects.
    pub(super) fn end_list(&mut self, input: PolicyInput, revision: u64) -> BTreeSet<ObjectName> {
        let Some(progress) = self.of(input) else { return BTreeSet::new() };
        // Of a server whose data went back, the list counts.
        progress.known = Some(revision);
        std::mem::take(&mut progress.listed)
    }

    pub(super) fn set_known(&mut self, input: PolicyInput, revision: u64) {
        if let Some(progress) = self.of(input) {
            progress.known = progress.known.map(|known| known.max(revision));
        }
    }

    /// Revision up to which all kinds are known.
    pub(super) fn least(&self) -> Option<u64> {
        self.known()?.min()
    }

    /// Latest revision that is known of any kind, once the first lists are complete.
    pub(super) fn latest(&self) -> Option<u64> {
        self.known()?.max()
    }

    fn known(&self) -> Option<impl Iterator<Item = u64>> {
        let known: Option<Vec<u64>> = self.0.iter().map(|progress| progress.known).collect();
        known.map(Vec::into_iter)
    }
}
