//! Backend sets: their ids and slots, and the sets of an earlier agent.

use std::collections::BTreeMap;

use super::{claims::Claims, frontends::Frontends, packed_set::PackedSet, set_key::BackendSetKey, starved::Shortage};
use crate::{
    Affinity, Capacity, Frontend, KernelSet, Limits, Members, Op,
    slot_allocator::{Extent, SlotAllocator},
    store::refill,
};

/// A set as the kernel has it.
#[derive(Debug)]
pub(super) struct BackendSet {
    pub(super) id: u32,
    pub(super) extent: Extent,
    pub(super) members: PackedSet,
    pub(super) affinity: Affinity,
    /// Whether an earlier agent wrote the set, perhaps for another Service, and it is neither confirmed nor replaced
    /// yet. It serves the frontends that have it and no others.
    pub(super) is_inherited: bool,
}

/// A set of an earlier agent that no Service port has taken over, and the frontends that lead to it.
#[derive(Debug)]
struct Orphan {
    set: BackendSet,
    frontends: Vec<Frontend>,
    /// Whether a Service port may take the set over. One that cannot be read, or whose backends another set has too, is
    /// only kept from being overwritten while frontends lead to it.
    is_sound: bool,
}

/// All sets, and the free ids and slots.
#[derive(Debug)]
pub(super) struct BackendSets {
    by_key: BTreeMap<BackendSetKey, BackendSet>,
    orphans: BTreeMap<u32, Orphan>,
    pub(super) slots: SlotAllocator,
    pub(super) ids: SlotAllocator,
}

/// Desired content of a set.
pub(super) struct SetContent {
    pub(super) members: Members,
    pub(super) affinity_seconds: Option<u32>,
}

impl SetContent {
    /// Whether one set can hold the members.
    pub(super) fn fits(&self, limits: &Limits) -> Result<(), PublicationError> {
        let count = self.members.eligible().len().max(self.members.kept().len());
        if count <= limits.run_backends {
            return Ok(());
        }
        let message = format!("{count} backends are more than the {} of one set", limits.run_backends);
        Err(PublicationError { message, shortage: None })
    }
}

/// Reason why a set was not published.
pub(super) struct PublicationError {
    pub(super) message: String,
    /// Kind of room that is missing, if that is the reason.
    pub(super) shortage: Option<Shortage>,
}

impl PublicationError {
    pub(super) fn no_room(message: String) -> Self {
        Self { message, shortage: Some(Shortage::Backends) }
    }

    /// Adds the consequence to the message.
    pub(super) fn and(self, consequence: &str) -> Self {
        Self { message: format!("{}; {consequence}", self.message), ..self }
    }
}

impl BackendSets {
    /// Sets that the kernel has, and the frontends that lead to them; no Service port has taken them over yet.
    pub(super) fn from_kernel(sets: BTreeMap<u32, KernelSet>, frontends: &Frontends, capacity: Capacity) -> Self {
        let mut by_slot: Vec<_> = sets.into_iter().collect();
        by_slot.sort_unstable_by_key(|(_, set)| set.first_slot);
        let mut orphans = BTreeMap::new();
        let mut end = 0;
        for (id, KernelSet { first_slot, members, affinity }) in by_slot {
            let count = members.backends.len() as u32;
            // The slots that no set before it has.
            let first = first_slot.max(end);
            let extent = Extent { first, count: (first_slot + count).saturating_sub(first) };
            end = end.max(first_slot + count);
            let set = BackendSet { id, extent, members: PackedSet::of(&members), affinity, is_inherited: true };
            orphans.insert(id, Orphan { set, frontends: Vec::new(), is_sound: extent.count == count });
        }
        for (frontend, id) in frontends.each_written().filter(|(_, id)| *id != 0) {
            orphans.entry(id).or_insert_with(|| Orphan::unreadable(id)).frontends.push(frontend);
        }
        let slots = SlotAllocator::new(0, capacity.slots, orphans.values().map(|orphan| orphan.set.extent).collect());
        let ids = orphans.keys().map(|&id| Extent { first: id, count: 1 }).collect();
        Self { by_key: BTreeMap::new(), orphans, slots, ids: SlotAllocator::new(1, capacity.sets, ids) }
    }

    pub(super) fn get(&self, key: &BackendSetKey) -> Option<&BackendSet> {
        self.by_key.get(key)
    }

    /// Whether a Service port has a set. A first table is filled in ascending order: mostly nothing is searched for.
    pub(super) fn has(&self, key: &BackendSetKey) -> bool {
        self.by_key.last_key_value().is_some_and(|(last, _)| key <= last) && self.by_key.contains_key(key)
    }

    pub(super) fn get_mut(&mut self, key: &BackendSetKey) -> Option<&mut BackendSet> {
        self.by_key.get_mut(key)
    }

    pub(super) fn insert(&mut self, key: BackendSetKey, set: BackendSet) {
        self.by_key.insert(key, set);
    }

    /// Whether there are no sets, and there were none when the agent started.
    pub(super) fn is_empty(&self) -> bool {
        self.by_key.is_empty() && self.orphans.is_empty()
    }

    /// Whether sets of an earlier agent remain that no Service port has taken over.
    pub(super) fn has_orphans(&self) -> bool {
        !self.orphans.is_empty()
    }

    /// Takes over the set that a frontend has had since before the restart, if every frontend that leads to it belongs
    /// to this Service port: its new content must not serve another port's frontend. Returns whether it was taken over.
    pub(super) fn adopt(&mut self, key: &BackendSetKey, frontend: Frontend, claims: &Claims) -> bool {
        if self.orphans.is_empty() {
            return false;
        }
        let Some(id) = claims.frontends.set(frontend) else { return false };
        let is_own = |&frontend: &Frontend| claims.owner(frontend).as_ref() == Some(key);
        if self.orphans.get(&id).is_some_and(|orphan| orphan.is_sound && orphan.frontends.iter().all(is_own))
            && let Some(orphan) = self.orphans.remove(&id)
        {
            self.by_key.insert(key.clone(), orphan.set);
            return true;
        }
        false
    }

    /// Puts written members in force; the slots of the previous ones wait for a grace period.
    pub(super) fn switch(&mut self, key: &BackendSetKey, members: PackedSet, extent: Extent) -> Option<Op> {
        let set = self.by_key.get_mut(key)?;
        self.slots.release(std::mem::replace(&mut set.extent, extent));
        set.members = members;
        Some(set.publication())
    }

    /// Moves the set of one Service port to another.
    pub(super) fn inherit(&mut self, key: &BackendSetKey, predecessor: &BackendSetKey) {
        if let Some(set) = self.by_key.remove(predecessor) {
            self.by_key.insert(key.clone(), BackendSet { is_inherited: true, ..set });
        }
    }

    /// Frees a set; its id and slots wait for a grace period.
    pub(super) fn free(&mut self, key: &BackendSetKey) -> bool {
        let set = self.by_key.remove(key);
        let is_freed = set.is_some();
        set.into_iter().for_each(|set| self.release(&set));
        is_freed
    }

    /// Frees the sets that no Service port has taken over.
    pub(super) fn free_orphans(&mut self) -> bool {
        let orphans = std::mem::take(&mut self.orphans);
        orphans.values().for_each(|orphan| self.release(&orphan.set));
        !orphans.is_empty()
    }

    fn release(&mut self, set: &BackendSet) {
        self.slots.release(set.extent);
        self.ids.release(Extent { first: set.id, count: 1 });
    }

    /// Frees the returned ids and slots: a grace period has ended.
    pub(super) fn reclaim(&mut self) {
        self.slots.reclaim();
        self.ids.reclaim();
    }

    /// Moves backends to slots below `end`. Returns whether no set has a slot at or after `end` any more.
    pub(super) fn move_backends(&mut self, end: u32, ops: &mut Vec<Op>) -> bool {
        for (key, set) in self.by_key.iter_mut().filter(|(_, set)| set.extent.first + set.extent.count > end) {
            let Some(extent) = self.slots.allocate_below(set.extent.count, end) else { return false };
            self.slots.release(std::mem::replace(&mut set.extent, extent));
            let (members, are_counted) = (set.members.unpack(), key.is_counted());
            ops.push(Op::WriteBackends { first_slot: extent.first, members, are_counted });
            ops.push(set.publication());
        }
        true
    }

    /// Moves sets to ids below `end`. Returns the new id of each by its old one, and whether no set has an id at or
    /// after `end` once the frontends have been replaced.
    pub(super) fn move_ids(&mut self, end: u32, ops: &mut Vec<Op>) -> (BTreeMap<u32, u32>, bool) {
        let mut moved = BTreeMap::new();
        for set in self.by_key.values_mut().filter(|set| set.id >= end) {
            let Some(extent) = self.ids.allocate_below(1, end) else { continue };
            moved.insert(set.id, extent.first);
            self.ids.release(Extent { first: std::mem::replace(&mut set.id, extent.first), count: 1 });
            ops.extend([Op::SetAffinity { set: set.id, affinity: set.affinity }, set.publication()]);
        }
        (moved, !self.by_key.values().any(|set| set.id >= end))
    }

    /// Rebuilds the tree: insertion in ascending order leaves its nodes half empty.
    pub(super) fn refill(&mut self) {
        refill(&mut self.by_key);
    }

    /// Sets of Service ports and sets that none has taken over.
    pub(super) fn each_in_kernel(&self) -> impl Iterator<Item = &BackendSet> {
        self.by_key.values().chain(self.orphans.values().map(|orphan| &orphan.set))
    }
}

impl Orphan {
    /// A set that frontends lead to, and that no agent has written so.
    fn unreadable(id: u32) -> Self {
        let (members, affinity) = (PackedSet::of(&Members::default()), Affinity::default());
        let set = BackendSet { id, extent: Extent::default(), members, affinity, is_inherited: true };
        Self { set, frontends: Vec::new(), is_sound: false }
    }
}

impl BackendSet {
    /// Single store that puts the set's members in force.
    pub(super) fn publication(&self) -> Op {
        Op::PublishSet {
            set: self.id,
            first_slot: self.extent.first,
            eligible: self.members.eligible() as u16,
            serving: (self.members.count() - self.members.eligible()) as u16,
            drops: self.members.drops(),
        }
    }
}
