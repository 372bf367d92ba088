//! Profiles: namespaces, labels and named ports, each combination once, however many pods have it. Selectors are
//! evaluated for profiles, not for pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use cproxy_core::{Address, Text};

use super::slab::Slab;
use crate::{
    address_set::{HIGHEST, LOWEST, SliceHash, SliceName},
    labels::Labels,
    model::ContainerPort,
};

/// All of a pod that selectors and named ports see.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ProfileKey {
    pub(super) namespace: Text,
    pub(super) labels: Labels,
    pub(super) ports: Box<[ContainerPort]>,
}

/// A profile.
pub(super) struct Profile {
    pub(super) key: Arc<ProfileKey>,
    /// Policies that select its pods; `None` before they are known.
    pub(super) selection: Option<u32>,
    /// Sorted sets that its addresses are in.
    pub(super) sets: Vec<u32>,
}

/// All profiles that pods have.
#[derive(Default)]
pub(super) struct Profiles {
    rows: Slab<Profile>,
    by_key: BTreeMap<Arc<ProfileKey>, u32>,
    /// Profiles with their pods.
    pods: BTreeSet<(u32, u32)>,
    /// Profiles with the addresses of their pods, by slice.
    members: BTreeSet<(u32, SliceHash, Address)>,
}

impl Profiles {
    pub(super) fn id(&self, key: &ProfileKey) -> Option<u32> {
        self.by_key.get(key).copied()
    }

    pub(super) fn get(&self, id: u32) -> Option<&Profile> {
        self.rows.get(id)
    }

    pub(super) fn get_mut(&mut self, id: u32) -> Option<&mut Profile> {
        self.rows.get_mut(id)
    }

    pub(super) fn insert(&mut self, key: ProfileKey) -> u32 {
        let key = Arc::new(key);
        let id = self.rows.insert(Profile { key: key.clone(), selection: None, sets: Vec::new() });
        self.by_key.insert(key, id);
        id
    }

    pub(super) fn remove(&mut self, id: u32) {
        if let Some(profile) = self.rows.remove(id) {
            self.by_key.remove(&profile.key);
        }
    }

    /// Profiles of a namespace.
    pub(super) fn of_namespace(&self, name: &Text) -> impl Iterator<Item = u32> {
        let first = ProfileKey { namespace: name.clone(), labels: Labels::default(), ports: Box::default() };
        let from = self.by_key.range::<ProfileKey, _>(&first..);
        from.take_while(move |(key, _)| key.namespace == first.namespace).map(|(_, &id)| id)
    }

    pub(super) fn add_pod(&mut self, id: u32, pod: u32) {
        self.pods.insert((id, pod));
    }

    pub(super) fn remove_pod(&mut self, id: u32, pod: u32) {
        self.pods.remove(&(id, pod));
    }

    /// Pods with the profile.
    pub(super) fn pods(&self, id: u32) -> impl Iterator<Item = u32> {
        self.pods.range((id, 0)..=(id, u32::MAX)).map(|&(_, pod)| pod)
    }

    pub(super) fn add_member(&mut self, id: u32, address: Address) {
        self.members.insert((id, SliceHash::new(address), address));
    }

    pub(super) fn remove_member(&mut self, id: u32, address: Address) {
        self.members.remove(&(id, SliceHash::new(address), address));
    }

    /// Hashes of all addresses of the profile.
    pub(super) fn hashes(&self, id: u32) -> impl Iterator<Item = SliceHash> {
        self.members_of(id, (SliceHash(0), SliceHash(u32::MAX))).map(|member| member.0)
    }

    /// Addresses of the profile that are in a slice.
    pub(super) fn members(&self, id: u32, slice: SliceName) -> impl Iterator<Item = Address> {
        self.members_of(id, slice.hashes()).map(|member| member.1)
    }

    fn members_of(&self, id: u32, (first, last): (SliceHash, SliceHash)) -> impl Iterator<Item = (SliceHash, Address)> {
        self.members.range((id, first, LOWEST)..=(id, last, HIGHEST)).map(|&(_, hash, address)| (hash, address))
    }
}
