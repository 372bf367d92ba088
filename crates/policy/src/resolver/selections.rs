//! Selections: policies that select pods together, each combination once, with the bounds of the sets that these name.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::AtomicBool},
};

use super::sets::Sets;

/// Addresses in all sets of one pod's policy, at most.
pub const POD_ADDRESSES_MAX: usize = 65_536;
/// Sets of one pod's policy, at most.
pub const POD_SETS_MAX: usize = 256;

/// Parts of one pod's policy, at most: rules with their ranges of ports, sets and ranges of addresses. A client reads
/// them in one object.
pub const POD_PARTS_MAX: usize = 32_768;

/// Policies that isolate a pod, at most, whose names its guest gets.
pub const POD_NAMES_MAX: usize = 128;

/// Policies that select the same pods.
pub(super) struct Selection {
    pub(super) policies: Arc<[u32]>,
    /// Groups that their rules name, each once.
    groups: Box<[u32]>,
    /// Addresses in all sets.
    addresses: usize,
    /// Some sets are beyond the bounds, or were at the last assessment.
    is_beyond: bool,
    /// Sorted sets beyond the bounds, of which no address is allowed.
    pub(super) left_out: Box<[u32]>,
    /// The policy of the last pod that was asked for has more than [`POD_PARTS_MAX`] parts.
    pub(super) is_cut: AtomicBool,
}

/// All selections that profiles have.
#[derive(Default)]
pub(super) struct Selections {
    rows: super::slab::Slab<Selection>,
    by_policies: BTreeMap<Arc<[u32]>, u32>,
    of_groups: BTreeSet<(u32, u32)>,
    profiles: BTreeSet<(u32, u32)>,
}

impl Selections {
    pub(super) fn get(&self, id: u32) -> Option<&Selection> {
        self.rows.get(id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Selection> {
        self.rows.iter().map(|(_, selection)| selection)
    }

    /// The selection of sorted policies, if there is one.
    pub(super) fn id(&self, policies: &[u32]) -> Option<u32> {
        self.by_policies.get(policies).copied()
    }

    /// Adds the selection of sorted policies that name these groups. It has to be assessed.
    pub(super) fn insert(&mut self, policies: Vec<u32>, mut groups: Vec<u32>, sets: &Sets) -> u32 {
        groups.sort_unstable();
        groups.dedup();
        let policies: Arc<[u32]> = policies.into();
        let members = groups.iter().flat_map(|&group| sets.of_group(group));
        let addresses = members.filter_map(|(_, set)| sets.get(set)).map(|set| set.counted).sum();
        let selection = Selection {
            policies: policies.clone(),
            groups: groups.into(),
            addresses,
            is_beyond: false,
            left_out: Box::default(),
            is_cut: AtomicBool::new(false),
        };
        let groups = selection.groups.clone();
        let id = self.rows.insert(selection);
        self.of_groups.extend(groups.iter().map(|&group| (group, id)));
        self.by_policies.insert(policies, id);
        id
    }

    /// Selections whose policies name a group.
    pub(super) fn of_group(&self, group: u32) -> Vec<u32> {
        self.of_groups.range((group, 0)..=(group, u32::MAX)).map(|&(_, id)| id).collect()
    }

    pub(super) fn add_profile(&mut self, id: u32, profile: u32) {
        self.profiles.insert((id, profile));
    }

    /// Removes a profile, and the selection after its last one.
    pub(super) fn remove_profile(&mut self, id: u32, profile: u32) {
        self.profiles.remove(&(id, profile));
        if self.profiles(id).next().is_some() {
            return;
        }
        let Some(selection) = self.rows.remove(id) else { return };
        self.by_policies.remove(&selection.policies);
        for &group in &selection.groups {
            self.of_groups.remove(&(group, id));
        }
    }

    pub(super) fn profiles(&self, id: u32) -> impl Iterator<Item = u32> {
        self.profiles.range((id, 0)..=(id, u32::MAX)).map(|&(_, profile)| profile)
    }

    /// Counts addresses that have come to a set and gone from it. Returns whether the selection has to be assessed.
    pub(super) fn count(&mut self, id: u32, come: usize, gone: usize) -> bool {
        let Some(selection) = self.rows.get_mut(id) else { return false };
        selection.addresses = (selection.addresses + come).saturating_sub(gone);
        selection.is_beyond || selection.addresses > POD_ADDRESSES_MAX
    }

    /// Decides which sets are within the bounds: the smallest, so that a set that grows harms itself first, and those
    /// without an address last. Returns whether others are than before.
    pub(super) fn assess(&mut self, id: u32, sets: &Sets) -> bool {
        let Some(selection) = self.rows.get_mut(id) else { return false };
        let members = selection.groups.iter().flat_map(|&group| sets.of_group(group));
        let mut by_size: Vec<_> =
            members.filter_map(|(_, id)| sets.get(id).map(|set| (set.count, set.name, id))).collect();
        by_size.sort_unstable_by_key(|&(count, name, id)| (count == 0, count, name, id));
        selection.addresses = by_size.iter().map(|set| set.0).sum();
        selection.is_beyond = selection.addresses > POD_ADDRESSES_MAX || by_size.len() > POD_SETS_MAX;
        let (mut addresses, mut within) = (0, 0);
        while let Some(&(count, ..)) = by_size.get(within)
            && within < POD_SETS_MAX
            && addresses + count <= POD_ADDRESSES_MAX
        {
            addresses += count;
            within += 1;
        }
        let mut left_out: Vec<_> = by_size.iter().skip(within).map(|set| set.2).collect();
        left_out.sort_unstable();
        let has_changed = *left_out != *selection.left_out;
        selection.left_out = left_out.into();
        has_changed
    }
}
