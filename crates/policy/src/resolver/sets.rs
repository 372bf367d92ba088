//! Sets of addresses, by the groups of pods that rules name. A group without a named port is one set, the other groups
//! are a set for each number of the port.

use std::{collections::BTreeMap, sync::Arc};

use super::{scope_index::ScopeIndex, slab::Slab, sorted, work::Work};
use crate::{
    address_set::{GroupKey, SLICE_ADDRESSES_MAX, SetName, SetReference, SliceHash, SliceName},
    labels::Labels,
    model::ContainerPort,
};

/// Mean addresses of a slice above which a set has twice as many.
const GROW_ADDRESSES: usize = 96;
/// Mean addresses of a slice below which a set has half as many.
const SHRINK_ADDRESSES: usize = 32;
/// Factor up to which a set has more slices than its size asks for, to keep each below its maximum.
const SPREAD_MAX: usize = 8;

/// Pods that rules name.
pub(super) struct Group {
    pub(super) key: Arc<GroupKey>,
    /// Number of rules that name it.
    rules: u32,
    /// Sets by the number of the port; 0 without a port.
    pub(super) sets: BTreeMap<u16, u32>,
}

/// Set of addresses.
pub(super) struct AddressSet {
    pub(super) name: SetName,
    pub(super) group: u32,
    number: u16,
    /// Sorted profiles whose addresses it has.
    pub(super) profiles: Vec<u32>,
    /// Number of addresses of each slice.
    slices: Vec<u32>,
    /// Number of addresses.
    pub(super) count: usize,
    /// Number of addresses that the selections know.
    pub(super) counted: usize,
}

/// All groups and sets.
#[derive(Default)]
pub(super) struct Sets {
    groups: Slab<Group>,
    by_key: BTreeMap<Arc<GroupKey>, u32>,
    by_scope: ScopeIndex,
    sets: Slab<AddressSet>,
    by_name: BTreeMap<SetName, u32>,
}

impl AddressSet {
    /// Name and generation.
    pub(super) fn reference(&self) -> SetReference {
        SetReference { name: self.name, slices: self.slices.len() as u32 }
    }

    /// Counts an address that comes or goes.
    fn change(&mut self, hash: SliceHash, comes: bool) -> SliceName {
        let name = self.reference().slice_of(hash);
        let slice = self.slices.get_mut(name.index as usize);
        if comes {
            self.count += 1;
            slice.into_iter().for_each(|count| *count += 1);
        } else {
            self.count = self.count.saturating_sub(1);
            slice.into_iter().for_each(|count| *count = count.saturating_sub(1));
        }
        name
    }

    /// Number of slices for the mean, given the present one.
    fn wanted_slices(&self) -> usize {
        let mut slices = self.slices.len().max(1);
        while slices > 1 && self.count < SHRINK_ADDRESSES * slices {
            slices /= 2;
        }
        while self.count > GROW_ADDRESSES * slices {
            slices *= 2;
        }
        slices
    }

    fn is_even(slices: &[u32]) -> bool {
        slices.iter().all(|&count| count as usize <= SLICE_ADDRESSES_MAX)
    }

    /// Brings the number of slices in line with the number of addresses. `hashes` returns those of a profile. Returns
    /// the generation before, if there is a new one.
    pub(super) fn resize<H: Iterator<Item = SliceHash>>(&mut self, hashes: impl Fn(u32) -> H) -> Option<SetReference> {
        let mut wanted = self.wanted_slices();
        if wanted == self.slices.len() && Self::is_even(&self.slices) {
            return None;
        }
        let hashes: Vec<_> = self.profiles.iter().copied().flat_map(hashes).collect();
        let wanted_max = SPREAD_MAX * self.count.div_ceil(GROW_ADDRESSES).max(1).next_power_of_two();
        let slices = loop {
            let mut slices = vec![0; wanted];
            for hash in &hashes {
                slices.get_mut(hash.index(wanted as u32) as usize).into_iter().for_each(|count| *count += 1);
            }
            if Self::is_even(&slices) || wanted >= wanted_max {
                break slices;
            }
            wanted *= 2;
        };
        let before = self.reference();
        self.slices = slices;
        (before.slices as usize != wanted).then_some(before)
    }

    /// Whether it exists only as long as a profile is in it.
    pub(super) fn is_idle(&self) -> bool {
        self.number != 0 && self.profiles.is_empty()
    }
}

impl Sets {
    pub(super) fn get(&self, id: u32) -> Option<&AddressSet> {
        self.sets.get(id)
    }

    pub(super) fn get_mut(&mut self, id: u32) -> Option<&mut AddressSet> {
        self.sets.get_mut(id)
    }

    pub(super) fn find(&self, name: SetName) -> Option<&AddressSet> {
        self.sets.get(*self.by_name.get(&name)?)
    }

    /// All sets, sorted by name.
    pub(super) fn iter(&self) -> impl Iterator<Item = &AddressSet> {
        self.by_name.values().filter_map(|&id| self.sets.get(id))
    }

    pub(super) fn group(&self, id: u32) -> Option<&Group> {
        self.groups.get(id)
    }

    /// Sets of a group, each with its number.
    pub(super) fn of_group(&self, id: u32) -> impl Iterator<Item = (u16, u32)> {
        self.groups.get(id).into_iter().flat_map(|group| group.sets.iter().map(|(&number, &set)| (number, set)))
    }

    /// The group of a rule, and whether it is new and so without members.
    pub(super) fn acquire(&mut self, key: GroupKey, work: &mut Work) -> (u32, bool) {
        if let Some(&id) = self.by_key.get(&key) {
            self.groups.get_mut(id).into_iter().for_each(|group| group.rules += 1);
            return (id, false);
        }
        let key = Arc::new(key);
        let id = self.groups.insert(Group { key: key.clone(), rules: 1, sets: BTreeMap::new() });
        self.by_scope.insert(&key.selection.scope, id);
        if key.port.is_none() {
            self.ensure(id, 0, work);
        }
        self.by_key.insert(key, id);
        (id, true)
    }

    /// Gives a group up that a rule has had. Returns its sets if no other rule has it.
    pub(super) fn release(&mut self, id: u32) -> Vec<u32> {
        let Some(group) = self.groups.get_mut(id) else { return Vec::new() };
        group.rules -= 1;
        if group.rules > 0 {
            return Vec::new();
        }
        let Some(group) = self.groups.remove(id) else { return Vec::new() };
        self.by_key.remove(&group.key);
        self.by_scope.remove(&group.key.selection.scope, id);
        group.sets.into_values().collect()
    }

    /// The set of a group with this number, which is made if it is not there.
    fn ensure(&mut self, group_id: u32, number: u16, work: &mut Work) -> Option<u32> {
        let group = self.groups.get_mut(group_id)?;
        if let Some(&id) = group.sets.get(&number) {
            return Some(id);
        }
        let name = SetName::new(&group.key, number);
        let set =
            AddressSet { name, group: group_id, number, profiles: Vec::new(), slices: vec![0], count: 0, counted: 0 };
        work.slices.extend(set.reference().slice_names());
        work.groups.insert(group_id);
        let id = self.sets.insert(set);
        group.sets.insert(number, id);
        self.by_name.insert(name, id);
        Some(id)
    }

    /// Removes a set without members. Its group may be gone.
    pub(super) fn remove(&mut self, id: u32, work: &mut Work) {
        let Some(set) = self.sets.remove(id) else { return };
        work.slices.extend(set.reference().slice_names());
        work.groups.insert(set.group);
        self.by_name.remove(&set.name);
        if let Some(group) = self.groups.get_mut(set.group) {
            group.sets.remove(&set.number);
        }
    }

    /// The set of a group that has pods with these labels and ports, in a namespace that the group's scope has.
    pub(super) fn of_pods(
        &mut self,
        group: u32,
        labels: &Labels,
        ports: &[ContainerPort],
        work: &mut Work,
    ) -> Option<u32> {
        let key = &self.groups.get(group)?.key;
        if !key.selection.pods.matches(|key| labels.get(key)) {
            return None;
        }
        let number = key.number(ports)?;
        self.ensure(group, number, work)
    }

    /// Groups whose scope has a namespace.
    pub(super) fn groups_in<'a>(
        &'a self,
        namespace: &str,
        labels: Option<&'a Labels>,
    ) -> impl Iterator<Item = u32> + 'a {
        self.by_scope.of(namespace, labels)
    }

    /// Adds a profile with its addresses to a set, or removes it.
    pub(super) fn change_profile(
        &mut self,
        id: u32,
        profile: u32,
        comes: bool,
        hashes: impl Iterator<Item = SliceHash>,
        work: &mut Work,
    ) {
        let Some(set) = self.sets.get_mut(id) else { return };
        sorted::change(&mut set.profiles, profile, comes);
        work.sets.insert(id);
        work.slices.extend(hashes.map(|hash| set.change(hash, comes)));
    }

    /// Adds an address to a set, or removes it.
    pub(super) fn change_address(&mut self, id: u32, hash: SliceHash, comes: bool, work: &mut Work) {
        let Some(set) = self.sets.get_mut(id) else { return };
        work.sets.insert(id);
        work.slices.insert(set.change(hash, comes));
    }
}
