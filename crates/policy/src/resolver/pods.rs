//! Pods in compact rows, and the addresses that they claim.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use cproxy_core::{Address, ObjectName};

use super::{
    compact::{Addresses, Uid},
    slab::Slab,
};
use crate::{
    address_set::{HIGHEST, LOWEST, SliceHash, SliceName},
    model::Node,
};

/// Compact row of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PodRow {
    pub(super) name: ObjectName,
    pub(super) uid: Uid,
    pub(super) addresses: Addresses,
    /// Shared by the pods of the node.
    pub(super) node: Arc<Node>,
    /// Namespace, labels and ports.
    pub(super) profile: u32,
    pub(super) is_host_network: bool,
    pub(super) has_ended: bool,
    pub(super) is_terminating: bool,
    pub(super) created_seconds: i64,
}

/// All pods.
#[derive(Default)]
pub(super) struct Pods {
    rows: Slab<PodRow>,
    by_name: BTreeMap<ObjectName, u32>,
    /// Addresses by slice, with the pods that have them and are peers: mostly one.
    claims: BTreeSet<(SliceHash, Address, u32)>,
    nodes: BTreeSet<Arc<Node>>,
}

impl PodRow {
    fn is_peer(&self) -> bool {
        !self.is_host_network && !self.has_ended
    }

    /// Order of pods that have one address: the last has it.
    fn precedence(&self) -> (i64, bool, Box<str>, &ObjectName) {
        (self.created_seconds, !self.is_terminating, self.uid.text(), &self.name)
    }
}

impl Pods {
    pub(super) fn id(&self, name: &ObjectName) -> Option<u32> {
        self.by_name.get(name).copied()
    }

    pub(super) fn get(&self, id: u32) -> Option<&PodRow> {
        self.rows.get(id)
    }

    pub(super) fn find(&self, name: &ObjectName) -> Option<&PodRow> {
        self.rows.get(self.id(name)?)
    }

    /// Names of all pods, sorted.
    pub(super) fn names(&self) -> impl Iterator<Item = &ObjectName> {
        self.by_name.keys()
    }

    /// All pods, sorted by name.
    pub(super) fn rows(&self) -> impl Iterator<Item = &PodRow> {
        self.by_name.values().filter_map(|&id| self.rows.get(id))
    }

    #[cfg(test)]
    pub(super) fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// Node that pods share.
    pub(super) fn share(&mut self, node: Node) -> Arc<Node> {
        if let Some(known) = self.nodes.get(&node) {
            return known.clone();
        }
        let node = Arc::new(node);
        self.nodes.insert(node.clone());
        node
    }

    /// The pod that has an address.
    pub(super) fn owner(&self, address: Address) -> Option<&PodRow> {
        let hash = SliceHash::new(address);
        let claims = self.claims.range((hash, address, 0)..=(hash, address, u32::MAX));
        let rows = claims.filter_map(|&(.., id)| self.rows.get(id));
        rows.reduce(|a, b| if a.precedence() < b.precedence() { b } else { a })
    }

    /// Addresses whose hashes are those of a slice, of all pods, each with the profile of the pod that has it.
    pub(super) fn owned(&self, slice: SliceName) -> impl Iterator<Item = (Address, u32)> {
        let ((first, last), (lowest, highest)) = (slice.hashes(), (LOWEST, HIGHEST));
        let claims = self.claims.range((first, lowest, 0)..=(last, highest, u32::MAX));
        let mut before = None;
        let addresses = claims.map(|claim| claim.1).filter(move |&address| before.replace(address) != Some(address));
        addresses.filter_map(|address| Some((address, self.owner(address)?.profile)))
    }

    /// Number of addresses of all pods.
    pub(super) fn claim_count(&self) -> usize {
        self.claims.len()
    }

    /// Adds or replaces a pod, and returns its id.
    pub(super) fn put(&mut self, row: PodRow) -> u32 {
        self.remove_claims(&row.name);
        let claimed = if row.is_peer() { row.addresses.to_vec() } else { Vec::new() };
        let id = match self.id(&row.name) {
            Some(id) => {
                if let Some(place) = self.rows.get_mut(id) {
                    let old = std::mem::replace(place, row);
                    self.unshare(old.node);
                }
                id
            }
            None => {
                let name = row.name.clone();
                let id = self.rows.insert(row);
                self.by_name.insert(name, id);
                id
            }
        };
        self.claims.extend(claimed.into_iter().map(|address| (SliceHash::new(address), address, id)));
        id
    }

    /// Removes a pod.
    pub(super) fn remove(&mut self, name: &ObjectName) {
        self.remove_claims(name);
        if let Some(row) = self.by_name.remove(name).and_then(|id| self.rows.remove(id)) {
            self.unshare(row.node);
        }
    }

    fn remove_claims(&mut self, name: &ObjectName) {
        let Some(id) = self.id(name) else { return };
        for address in self.rows.get(id).map_or(&[][..], |row| &*row.addresses) {
            self.claims.remove(&(SliceHash::new(*address), *address, id));
        }
    }

    /// Removes a node that no pod has any more.
    fn unshare(&mut self, node: Arc<Node>) {
        // The list has it, and the caller.
        if Arc::strong_count(&node) == 2 {
            self.nodes.remove(&node);
        }
    }
}
