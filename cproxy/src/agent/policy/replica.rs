//! The pod's policy and its sets as the source has them: complete, or a reason why not.

use std::collections::BTreeMap;

use cproxy_core::{Address, ObjectName, sorted_map};
use cproxy_policy::{AddressSlice, PodPolicy, SetName, SliceName};

/// Change of the source's objects.
#[derive(Clone, Debug)]
pub(in crate::agent) enum Update {
    Policies(Change<ObjectName, PodPolicy>),
    Slices(Change<SliceName, AddressSlice>),
    /// The source does not show objects of a kind, with the reason.
    Failed(String),
    /// The source has something else now that cannot be used, with the reason.
    Unusable(String),
    /// The source is an API server, which has no policies of pods, with its answer.
    NoRelay(String),
}

/// Change of the objects of a kind.
#[derive(Clone, Debug)]
pub(in crate::agent) enum Change<K, V> {
    ListStarted,
    Listed(K, V),
    ListDone,
    Applied(K, V),
    Deleted(K),
}

/// Objects of the source.
#[derive(Debug, Default)]
pub(super) struct Replica {
    policies: Kind<ObjectName, PodPolicy>,
    slices: Kind<SliceName, AddressSlice>,
    failure: Option<String>,
    /// Why what the source has now cannot be used.
    unusable: Option<String>,
    /// Whether the source is an API server.
    has_no_relay: bool,
}

/// Objects of a kind.
#[derive(Debug)]
struct Kind<K, V> {
    objects: BTreeMap<K, V>,
    /// Objects of a list that is not complete.
    listed: Option<BTreeMap<K, V>>,
    is_synced: bool,
}

/// Policy of the pod with the addresses of all of its sets.
#[derive(Debug)]
pub(super) struct Complete<'a> {
    pub(super) policy: &'a PodPolicy,
    slices: &'a BTreeMap<SliceName, AddressSlice>,
}

impl Replica {
    /// Takes all that is known as another pod's: nothing is complete before new lists.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    pub(super) fn apply(&mut self, update: Update) {
        match update {
            Update::Policies(change) => {
                self.unusable = None;
                self.policies.apply(change);
            }
            Update::Slices(change) => self.slices.apply(change),
            Update::Failed(reason) => self.failure = Some(reason),
            Update::Unusable(reason) => self.unusable = Some(reason),
            Update::NoRelay(answer) => {
                self.failure = Some(format!("{answer}: an API server has no policies of pods, a cproxy-relay has"));
                self.has_no_relay = true;
            }
        }
        if self.policies.is_synced && self.slices.is_synced {
            self.failure = None;
        }
    }

    /// Whether the source is known to be an API server, which has no policies of pods.
    pub(super) fn has_no_relay(&self) -> bool {
        self.has_no_relay && !self.policies.is_synced
    }

    /// Whether the source has shown all policies, and none is of this pod.
    pub(super) fn lacks(&self, pod: &ObjectName) -> bool {
        self.unusable.is_none() && self.policies.is_synced && !self.policies.objects.contains_key(pod)
    }

    /// The policy of `pod`, or of the only pod that the source shows.
    ///
    /// # Errors
    /// Something is missing: what.
    pub(super) fn complete(&self, pod: Option<&ObjectName>) -> Result<Complete<'_>, String> {
        if let Some(reason) = &self.unusable {
            return Err(reason.clone());
        }
        if !self.policies.is_synced {
            return Err(self.failure.clone().unwrap_or_else(|| "the source has not shown the pod's policy yet".into()));
        }
        let policies = &self.policies.objects;
        let policy = match pod {
            Some(pod) => policies.get(pod).ok_or_else(|| format!("the source has no policy of pod {pod}"))?,
            None => match policies.len() {
                0 => return Err("the source has no policy of this pod".to_owned()),
                1 => policies.values().next().ok_or("the source has no policy of this pod")?,
                more => return Err(format!("the source shows policies of {more} pods: say which by --policy-pod")),
            },
        };
        let names = || policy.sets.iter().flat_map(|set| set.slice_names());
        let missing = names().filter(|name| !self.slices.objects.contains_key(name)).count();
        if missing > 0 || !self.slices.is_synced {
            let of = names().count();
            return Err(format!("{missing} of {of} slices of the policy's sets have not come yet"));
        }
        Ok(Complete { policy, slices: &self.slices.objects })
    }
}

impl Complete<'_> {
    /// Number of the addresses of each set.
    pub(super) fn set_sizes(&self) -> BTreeMap<SetName, u64> {
        let size = |slice: SliceName| self.slices.get(&slice).map_or(0, |slice| slice.addresses.len() as u64);
        let sets = self.policy.sets.iter();
        sorted_map(sets.map(|set| (set.name, set.slice_names().map(size).sum())))
    }

    /// Addresses of a set.
    pub(super) fn addresses(&self, name: SetName) -> Vec<Address> {
        let sets = self.policy.sets.iter().filter(|set| set.name == name);
        let slices = sets.flat_map(|set| set.slice_names()).filter_map(|slice| self.slices.get(&slice));
        slices.flat_map(|slice| slice.addresses.iter().copied()).collect()
    }
}

impl<K, V> Default for Kind<K, V> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), listed: None, is_synced: false }
    }
}

impl<K: Ord, V> Kind<K, V> {
    fn apply(&mut self, change: Change<K, V>) {
        match change {
            Change::ListStarted => self.listed = Some(BTreeMap::new()),
            Change::Listed(name, object) => drop(self.listed.get_or_insert_default().insert(name, object)),
            Change::ListDone => {
                self.objects = self.listed.take().unwrap_or_default();
                self.is_synced = true;
            }
            Change::Applied(name, object) => drop(self.objects.insert(name, object)),
            Change::Deleted(name) => drop(self.objects.remove(&name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use cproxy_policy::{Directions, SetReference};

    use super::*;

    fn policy(sets: &[(&str, u32)]) -> PodPolicy {
        PodPolicy {
            name: ObjectName::new("shop", "web"),
            uid: "".into(),
            node_name: "".into(),
            isolated: Directions::default(),
            policies: Vec::new(),
            node_addresses: [].into(),
            own_addresses: [].into(),
            rules: Vec::new(),
            sets: sets.iter().map(|&(name, slices)| SetReference { name: set(name), slices }).collect(),
        }
    }

    fn set(name: &str) -> SetName {
        SetName::parse(&format!("{name:0>32}")).unwrap()
    }

    fn slice(set_name: &str, slices: u32, index: u32) -> Update {
        let name = SliceName { set: SetReference { name: set(set_name), slices }, index };
        Update::Slices(Change::Applied(name, AddressSlice { name, addresses: Vec::new() }))
    }

    fn applied(policy: PodPolicy) -> Update {
        Update::Policies(Change::Applied(policy.name.clone(), policy))
    }

    #[test]
    fn a_policy_is_complete_with_all_slices_of_all_sets() {
        let mut replica = Replica::default();
        let state = |replica: &Replica| replica.complete(None).map(|_| ()).err().unwrap_or_default();
        assert_eq!(state(&replica), "the source has not shown the pod's policy yet");
        replica.apply(Update::Failed("forbidden".into()));
        assert_eq!(state(&replica), "forbidden");
        for change in [Update::Policies(Change::ListDone), Update::Slices(Change::ListDone)] {
            replica.apply(change);
        }
        assert_eq!(state(&replica), "the source has no policy of this pod");
        replica.apply(applied(policy(&[("a", 1), ("b", 2)])));
        assert_eq!(state(&replica), "3 of 3 slices of the policy's sets have not come yet");
        replica.apply(slice("a", 1, 0));
        replica.apply(slice("b", 2, 0));
        // Of another generation.
        replica.apply(slice("b", 4, 1));
        assert_eq!(state(&replica), "1 of 3 slices of the policy's sets have not come yet");
        replica.apply(slice("b", 2, 1));
        assert_eq!(state(&replica), "");
        // A new list has no effect until it is complete.
        replica.apply(Update::Slices(Change::ListStarted));
        assert_eq!(state(&replica), "");
        replica.apply(Update::Slices(Change::ListDone));
        assert_eq!(state(&replica), "3 of 3 slices of the policy's sets have not come yet");
    }

    #[test]
    fn one_of_several_policies_needs_a_name() {
        let mut replica = Replica::default();
        replica.apply(Update::Policies(Change::ListDone));
        replica.apply(Update::Slices(Change::ListDone));
        let other = PodPolicy { name: ObjectName::new("shop", "db"), ..policy(&[]) };
        replica.apply(applied(policy(&[])));
        replica.apply(applied(other));
        let error = replica.complete(None).unwrap_err();
        assert_eq!(error, "the source shows policies of 2 pods: say which by --policy-pod");
        assert_eq!(&*replica.complete(Some(&ObjectName::new("shop", "web"))).unwrap().policy.name.name, "web");
        let error = replica.complete(Some(&ObjectName::new("shop", "no"))).unwrap_err();
        assert_eq!(error, "the source has no policy of pod shop/no");
    }
}
