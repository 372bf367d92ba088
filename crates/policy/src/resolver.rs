//! The resolver: pods, namespaces and policies to the policies of single pods and the sets that these name. It has one
//! writer, and each event touches only the parts that it changes.
//!
//! ```text
//! pod -> profile (namespace, labels, ports) -> selection (policies) -> PodPolicy
//!                                           -> sets of groups (selectors that rules name) -> AddressSlices
//! ```

mod compact;
mod pod_policy;
mod pods;
mod policies;
mod problems;
mod profiles;
mod scope_index;
mod selections;
mod sets;
mod slab;
mod sorted;
mod work;

use std::collections::{BTreeMap, BTreeSet};

use cproxy_core::{Address, ObjectName, Text, sorted_set};
pub use selections::{POD_ADDRESSES_MAX, POD_NAMES_MAX, POD_PARTS_MAX, POD_SETS_MAX};

use self::{
    compact::{Addresses, Uid},
    pods::{PodRow, Pods},
    policies::{Policies, PolicyRow, RuleGroups},
    profiles::{ProfileKey, Profiles},
    selections::Selections,
    sets::Sets,
    work::Work,
};
use crate::{
    address_set::{AddressSlice, SliceHash, SliceName},
    labels::Labels,
    model::{Namespace, Pod, Policy, Scope},
};

/// Change of an object.
#[derive(Clone, Debug)]
pub enum Event {
    /// The pod is there, or has changed.
    Pod(Box<Pod>),
    /// The pod is gone.
    PodDeleted(ObjectName),
    /// The namespace is there, or has changed.
    Namespace(Namespace),
    /// The namespace is gone.
    NamespaceDeleted(Text),
    /// The policy is there, or has changed.
    Policy(Box<Policy>),
    /// The policy is gone.
    PolicyDeleted(ObjectName),
}

/// Identity of a pod among those with its name, and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodIdentity {
    /// Identity of the object.
    pub uid: Box<str>,
    /// Name of the pod's node; empty before it is scheduled.
    pub node_name: Box<str>,
}

/// Names whose objects an event has changed: each is there with another content, or is gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Names of pods' policies.
    pub pods: BTreeSet<ObjectName>,
    /// Names of slices.
    pub slices: BTreeSet<SliceName>,
}

/// State of a namespace.
#[derive(Default)]
struct NamespaceRow {
    /// Labels, if the Namespace is known.
    labels: Option<Labels>,
    pods: usize,
}

/// Pods, namespaces and policies, and all that follows from them.
#[derive(Default)]
pub struct Resolver {
    namespaces: BTreeMap<Text, NamespaceRow>,
    pods: Pods,
    profiles: Profiles,
    policies: Policies,
    sets: Sets,
    selections: Selections,
}

impl Resolver {
    /// Applies an event.
    pub fn apply(&mut self, event: Event) -> Changes {
        let mut work = Work::default();
        match event {
            Event::Pod(pod) => self.put_pod(*pod, &mut work),
            Event::PodDeleted(name) => self.remove_pod(&name, &mut work),
            Event::Namespace(Namespace { name, labels }) => self.label_namespace(name, Some(labels), &mut work),
            Event::NamespaceDeleted(name) => self.label_namespace(name, None, &mut work),
            Event::Policy(policy) => self.put_policy(*policy, &mut work),
            Event::PolicyDeleted(name) => self.remove_policy(&name, &mut work),
        }
        self.finish(work)
    }

    /// Names of all pods, sorted.
    pub fn pods(&self) -> impl Iterator<Item = &ObjectName> {
        self.pods.names()
    }

    /// Identity of a pod, if the pod is there.
    #[must_use]
    pub fn pod_identity(&self, name: &ObjectName) -> Option<PodIdentity> {
        let pod = self.pods.find(name)?;
        Some(PodIdentity { uid: pod.uid.text(), node_name: pod.node.name.clone() })
    }

    /// Names of the pods of a node, sorted. Looks at all pods.
    pub fn pods_of_node(&self, node_name: &str) -> impl Iterator<Item = &ObjectName> {
        self.pods.rows().filter(move |pod| *pod.node.name == *node_name).map(|pod| &pod.name)
    }

    /// Name of the pod with an identity. Looks at all pods.
    #[must_use]
    pub fn find_pod(&self, uid: &str) -> Option<&ObjectName> {
        let uid = Uid::new(uid.into());
        self.pods.rows().find(|pod| pod.uid == uid).map(|pod| &pod.name)
    }

    /// Names of all namespaces that are known, sorted.
    pub fn namespaces(&self) -> impl Iterator<Item = &Text> {
        self.namespaces.iter().filter(|(_, row)| row.labels.is_some()).map(|(name, _)| name)
    }

    /// Names of all policies, sorted.
    pub fn policies(&self) -> impl Iterator<Item = &ObjectName> {
        self.policies.names()
    }

    /// Number of all sets.
    #[must_use]
    pub fn set_count(&self) -> usize {
        self.sets.iter().count()
    }

    /// The pod that has an address: of several the youngest.
    #[must_use]
    pub fn owner(&self, address: Address) -> Option<&ObjectName> {
        self.pods.owner(address).map(|row| &row.name)
    }

    /// Names of all slices, sorted.
    pub fn slices(&self) -> impl Iterator<Item = SliceName> {
        self.sets.iter().flat_map(|set| set.reference().slice_names())
    }

    /// A slice, if its generation is the present one.
    #[must_use]
    pub fn slice(&self, name: SliceName) -> Option<AddressSlice> {
        let set = self.sets.find(name.set.name).filter(|set| set.reference() == name.set)?;
        if name.index >= name.set.slices {
            return None;
        }
        // Where nearly each pod has a profile of its own, looking at all addresses with these hashes is shorter.
        let mut addresses: Vec<_> = if set.profiles.len() <= self.pods.claim_count() / name.set.slices as usize {
            set.profiles.iter().flat_map(|&profile| self.profiles.members(profile, name)).collect()
        } else {
            let has = |profile: &u32| set.profiles.binary_search(profile).is_ok();
            self.pods.owned(name).filter(|(_, profile)| has(profile)).map(|(address, _)| address).collect()
        };
        addresses.sort_unstable();
        Some(AddressSlice { name, addresses })
    }

    /// Number of nodes that are in memory.
    #[cfg(test)]
    pub(crate) fn node_count(&self) -> usize {
        self.pods.node_count()
    }

    fn put_pod(&mut self, pod: Pod, work: &mut Work) {
        let namespace = self.namespace(&pod.name.namespace);
        let key = ProfileKey { namespace: namespace.clone(), labels: pod.labels, ports: pod.ports };
        let profile = self.profiles.id(&key).unwrap_or_else(|| self.new_profile(key, work));
        let row = PodRow {
            name: ObjectName { namespace, name: pod.name.name },
            uid: Uid::new(pod.uid),
            addresses: Addresses::new(pod.addresses),
            node: self.pods.share(pod.node),
            profile,
            is_host_network: pod.is_host_network,
            has_ended: pod.has_ended,
            is_terminating: pod.is_terminating,
            created_seconds: pod.created_seconds,
        };
        let old = self.pods.find(&row.name);
        let addresses = sorted_set(old.iter().flat_map(|old| &*old.addresses).chain(&*row.addresses).copied());
        let before = self.owners(addresses);
        if self.has_other_policy(old, &row) {
            work.pods.insert(row.name.clone());
        }
        let old_profile = old.map(|old| old.profile);
        if old_profile.is_none()
            && let Some(namespace) = self.namespaces.get_mut(&row.name.namespace)
        {
            namespace.pods += 1;
        }
        let id = self.pods.put(row);
        self.move_addresses(before, work);
        self.profiles.add_pod(profile, id);
        if let Some(old) = old_profile.filter(|old| *old != profile) {
            self.leave_profile(old, id, work);
        }
    }

    fn remove_pod(&mut self, name: &ObjectName, work: &mut Work) {
        let (Some(id), Some(old)) = (self.pods.id(name), self.pods.find(name)) else { return };
        let before = self.owners(sorted_set(old.addresses.iter().copied()));
        let profile = old.profile;
        work.pods.insert(old.name.clone());
        self.pods.remove(name);
        self.move_addresses(before, work);
        self.leave_profile(profile, id, work);
        if let Some(namespace) = self.namespaces.get_mut(&name.namespace) {
            namespace.pods -= 1;
        }
        self.drop_namespace(&name.namespace);
    }

    /// Whether the policy of a pod is another one after it has changed, for reasons of the pod.
    fn has_other_policy(&self, old: Option<&PodRow>, new: &PodRow) -> bool {
        let Some(old) = old else { return true };
        let parts = |row: &PodRow| {
            let profile = self.profiles.get(row.profile)?;
            Some((profile.selection, &profile.key.ports))
        };
        fn own(row: &PodRow) -> impl PartialEq + '_ {
            (&row.uid, &row.addresses, &row.node, row.is_host_network)
        }
        own(old) != own(new) || (!new.is_host_network && old.profile != new.profile && parts(old) != parts(new))
    }

    /// Profiles that have these addresses now.
    fn owners(&self, addresses: BTreeSet<Address>) -> Vec<(Address, Option<u32>)> {
        addresses.into_iter().map(|address| (address, self.pods.owner(address).map(|row| row.profile))).collect()
    }

    /// Moves addresses from the profiles that had them to those that have them now.
    fn move_addresses(&mut self, before: Vec<(Address, Option<u32>)>, work: &mut Work) {
        for (address, old) in before {
            let new = self.pods.owner(address).map(|row| row.profile);
            if old == new {
                continue;
            }
            old.into_iter().for_each(|old| self.profiles.remove_member(old, address));
            new.into_iter().for_each(|new| self.profiles.add_member(new, address));
            let sets = |profile: Option<u32>| {
                profile.and_then(|id| self.profiles.get(id)).map_or(&[][..], |profile| &profile.sets)
            };
            let (old, new) = (sets(old), sets(new));
            let hash = SliceHash::new(address);
            for id in sorted::difference(old, new) {
                self.sets.change_address(id, hash, false, work);
            }
            for id in sorted::difference(new, old) {
                self.sets.change_address(id, hash, true, work);
            }
        }
    }

    /// Adds a profile, which has no pod yet, with its policies and sets.
    fn new_profile(&mut self, key: ProfileKey, work: &mut Work) -> u32 {
        let id = self.profiles.insert(key);
        self.place_profile(id, work);
        id
    }

    /// Evaluates all selectors for a profile.
    fn place_profile(&mut self, id: u32, work: &mut Work) {
        let Some(key) = self.profiles.get(id).map(|profile| profile.key.clone()) else { return };
        let namespace_labels = self.namespaces.get(&key.namespace).and_then(|row| row.labels.as_ref());
        let policies = self.policies.selecting(&key.namespace, namespace_labels, &key.labels);
        let groups: Vec<_> = self.sets.groups_in(&key.namespace, namespace_labels).collect();
        let sets = groups.into_iter().filter_map(|group| self.sets.of_pods(group, &key.labels, &key.ports, work));
        let mut sets: Vec<_> = sets.collect();
        sets.sort_unstable();
        self.select(id, policies, work);
        let old = self.profiles.get(id).map_or(Vec::new(), |profile| profile.sets.clone());
        for (list, other, comes) in [(&old, &sets, false), (&sets, &old, true)] {
            for set in sorted::difference(list, other) {
                self.change_set(id, set, comes, work);
            }
        }
    }

    /// Adds a profile to a set, or removes it.
    fn change_set(&mut self, profile_id: u32, set: u32, comes: bool, work: &mut Work) {
        self.sets.change_profile(set, profile_id, comes, self.profiles.hashes(profile_id), work);
        let Some(profile) = self.profiles.get_mut(profile_id) else { return };
        sorted::change(&mut profile.sets, set, comes);
    }

    /// Gives a profile the selection of these sorted policies.
    fn select(&mut self, profile_id: u32, policies: Vec<u32>, work: &mut Work) {
        let new = self.selections.id(&policies).unwrap_or_else(|| {
            let rows = policies.iter().filter_map(|&id| self.policies.get(id));
            let groups = rows.flat_map(|row| row.groups.iter().flat_map(RuleGroups::iter)).collect();
            let id = self.selections.insert(policies, groups, &self.sets);
            work.new_selections.insert(id);
            id
        });
        let Some(profile) = self.profiles.get_mut(profile_id) else { return };
        let old = profile.selection.replace(new);
        if old == Some(new) {
            return;
        }
        self.selections.add_profile(new, profile_id);
        // The pods of a new profile are to come.
        if let Some(old) = old {
            work.profiles.insert(profile_id);
            self.selections.remove_profile(old, profile_id);
        }
    }

    /// Takes a pod's profile away, and removes the profile after its last pod. Its addresses are gone by then.
    fn leave_profile(&mut self, id: u32, pod: u32, work: &mut Work) {
        self.profiles.remove_pod(id, pod);
        if self.profiles.pods(id).next().is_some() {
            return;
        }
        let Some(profile) = self.profiles.get(id) else { return };
        let selection = profile.selection;
        for set in profile.sets.clone() {
            self.change_set(id, set, false, work);
        }
        if let Some(selection) = selection {
            self.selections.remove_profile(selection, id);
        }
        self.profiles.remove(id);
    }

    /// The name of a namespace, in memory once.
    fn namespace(&mut self, name: &Text) -> Text {
        self.namespaces.entry(name.clone()).or_default();
        self.namespaces.get_key_value(name).map_or_else(|| name.clone(), |(name, _)| name.clone())
    }

    /// Forgets a namespace that is not known and has no pods.
    fn drop_namespace(&mut self, name: &Text) {
        if self.namespaces.get(name).is_some_and(|row| row.pods == 0 && row.labels.is_none()) {
            self.namespaces.remove(name);
        }
    }

    fn label_namespace(&mut self, name: Text, labels: Option<Labels>, work: &mut Work) {
        let row = self.namespaces.entry(name.clone()).or_default();
        if row.labels != labels {
            row.labels = labels;
            let profiles: Vec<_> = self.profiles.of_namespace(&name).collect();
            profiles.into_iter().for_each(|profile| self.place_profile(profile, work));
        }
        self.drop_namespace(&name);
    }

    /// Profiles in the namespaces of a scope.
    fn profiles_in(&self, scope: &Scope) -> Vec<u32> {
        if let Scope::Namespace(name) = scope {
            return self.profiles.of_namespace(name).collect();
        }
        let matching = self.namespaces.iter().filter(|(name, row)| scope.matches(name, row.labels.as_ref()));
        matching.flat_map(|(name, _)| self.profiles.of_namespace(name)).collect()
    }

    fn put_policy(&mut self, policy: Policy, work: &mut Work) {
        let old = self.policies.id(&policy.name);
        if old.and_then(|id| self.policies.get(id)).is_some_and(|row| row.policy == policy) {
            return;
        }
        let mut new_groups = Vec::new();
        let mut acquire = |key| {
            let (id, is_new) = self.sets.acquire(key, work);
            new_groups.extend(is_new.then_some(id));
            id
        };
        let groups = policy.rules.iter().map(|rule| RuleGroups::new(rule, &mut acquire)).collect();
        new_groups.into_iter().for_each(|group| self.fill(group, work));
        let new = self.policies.insert(PolicyRow { policy, groups });
        self.replace_policy(old, Some(new), work);
    }

    fn remove_policy(&mut self, name: &ObjectName, work: &mut Work) {
        if let Some(id) = self.policies.id(name) {
            self.replace_policy(Some(id), None, work);
        }
    }

    /// Adds the profiles that a new group has to its sets.
    fn fill(&mut self, group: u32, work: &mut Work) {
        let Some(scope) = self.sets.group(group).map(|group| group.key.selection.scope.clone()) else { return };
        for id in self.profiles_in(&scope) {
            let Some(key) = self.profiles.get(id).map(|profile| profile.key.clone()) else { continue };
            if let Some(set) = self.sets.of_pods(group, &key.labels, &key.ports, work) {
                self.change_set(id, set, true, work);
            }
        }
    }

    /// Gives the profiles that the old or the new policy selects their selections, and removes the old policy.
    fn replace_policy(&mut self, old: Option<u32>, new: Option<u32>, work: &mut Work) {
        let subject = |id: u32| self.policies.get(id).and_then(|row| row.policy.subject.clone());
        let subjects: Vec<_> = old.into_iter().chain(new).filter_map(subject).collect();
        let profiles = sorted_set(subjects.iter().flat_map(|subject| self.profiles_in(&subject.scope)));
        let row = old.and_then(|id| self.policies.remove(id));
        for id in profiles {
            let Some(profile) = self.profiles.get(id) else { continue };
            let key = profile.key.clone();
            if subjects.iter().any(|subject| subject.pods.matches(|name| key.labels.get(name))) {
                let labels = self.namespaces.get(&key.namespace).and_then(|row| row.labels.as_ref());
                let policies = self.policies.selecting(&key.namespace, labels, &key.labels);
                self.select(id, policies, work);
            }
        }
        for group in row.iter().flat_map(|row| row.groups.iter().flat_map(RuleGroups::iter)) {
            for set in self.sets.release(group) {
                let members = self.sets.get(set).map_or(Vec::new(), |set| set.profiles.clone());
                members.into_iter().for_each(|profile| self.change_set(profile, set, false, work));
                self.sets.remove(set, work);
            }
        }
    }

    /// Draws the consequences of an event.
    fn finish(&mut self, mut work: Work) -> Changes {
        let mut assessed = std::mem::take(&mut work.new_selections);
        for id in std::mem::take(&mut work.sets) {
            self.settle_set(id, &mut assessed, &mut work);
        }
        for group in std::mem::take(&mut work.groups) {
            let selections = self.selections.of_group(group);
            assessed.extend(&selections);
            work.selections.extend(selections);
        }
        for id in assessed {
            if self.selections.assess(id, &self.sets) {
                work.selections.insert(id);
            }
        }
        let selected = work.selections.iter().flat_map(|&id| self.selections.profiles(id));
        let profiles = sorted_set(work.profiles.iter().copied().chain(selected));
        let rows = profiles.iter().flat_map(|&id| self.profiles.pods(id)).filter_map(|id| self.pods.get(id));
        work.pods.extend(rows.filter(|row| !row.is_host_network).map(|row| row.name.clone()));
        Changes { pods: work.pods, slices: work.slices }
    }

    /// Counts and divides the addresses of a set that has changed, and removes it if it is no longer needed.
    fn settle_set(&mut self, id: u32, assessed: &mut BTreeSet<u32>, work: &mut Work) {
        let Some(set) = self.sets.get_mut(id) else { return };
        let group = set.group;
        let before = set.resize(|profile| self.profiles.hashes(profile));
        if let Some(before) = before {
            work.slices.extend(before.slice_names().chain(set.reference().slice_names()));
        }
        let (come, gone) = (set.count.saturating_sub(set.counted), set.counted.saturating_sub(set.count));
        set.counted = set.count;
        let is_idle = set.is_idle();
        for selection in self.selections.of_group(group) {
            if self.selections.count(selection, come, gone) {
                assessed.insert(selection);
            }
            work.selections.extend(before.map(|_| selection));
        }
        if is_idle {
            self.sets.remove(id, work);
        }
    }
}

impl Changes {
    /// Adds later changes.
    pub fn extend(&mut self, later: Self) {
        self.pods.extend(later.pods);
        self.slices.extend(later.slices);
    }

    /// Whether nothing has changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pods.is_empty() && self.slices.is_empty()
    }
}

/// A resolver that has seen these events.
impl FromIterator<Event> for Resolver {
    fn from_iter<I: IntoIterator<Item = Event>>(events: I) -> Self {
        let mut resolver = Self::default();
        events.into_iter().for_each(|event| drop(resolver.apply(event)));
        resolver
    }
}
