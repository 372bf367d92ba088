//! How much room the maps have: half as much again as they need. They grow when something does not fit, and shrink when more
//! than half has been empty for a while.
//!
//! A map is replaced by another one as a whole, by one write, after which no program uses the old one. So whatever waits for a
//! grace period has had one.

use std::{collections::BTreeSet, sync::Arc};

use super::{Extent, Op, Plan, SlotAllocator, Store, TablePlanner, Write, collected};
use crate::{Limits, Room, SERVICE_FRONTENDS_MAX, ServiceName};

/// A kind of room that a Service waits for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Lack {
    /// Places of frontends.
    Frontends,
    /// Ids of sets, or backend slots.
    Backends,
}

/// Any of the above.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lacks {
    frontends: bool,
    backends: bool,
}

impl Lacks {
    pub(super) fn add(&mut self, lack: Lack) {
        match lack {
            Lack::Frontends => self.frontends = true,
            Lack::Backends => self.backends = true,
        }
    }

    fn has_any_of(self, other: Self) -> bool {
        self.frontends && other.frontends || self.backends && other.backends
    }
}

/// What comes in extents.
#[derive(Clone, Copy)]
pub(super) enum Map {
    /// Ids of sets.
    Sets,
    /// Backend slots.
    Backends,
}

/// The Service that takes room.
#[derive(Clone, Copy)]
pub(super) struct Taker {
    pub(super) is_protected: bool,
    /// How much is given back for it.
    pub(super) returned: u32,
}

/// A map shrinks if it then is at most such a part of what it was.
const SHRINKS_TO: u32 = 2;
/// Such a part of what is in use must be spare, or every other change has to wait for programs.
const SPARE: u32 = 8;

impl TablePlanner {
    /// Takes from an allocator; if it has run dry, waits for what was given back, and then makes it larger. What is
    /// reserved for the API server's Service is not for others to keep: who gives as much back may use it for a moment.
    pub(super) fn take(&mut self, map: Map, count: u32, by: Taker, plan: &mut Plan<'_>) -> Option<Extent> {
        let more = count.saturating_sub(by.returned);
        if more != 0 && !by.is_protected && self.allocator(map).used().saturating_add(more) > self.open_room(map) {
            return None;
        }
        if let Some(extent) = self.allocator(map).take(count) {
            return Some(extent);
        }
        let slots = self.allocator(map);
        let is_crowded = slots.end() - slots.used() < slots.used() / SPARE;
        if is_crowded && self.grow(map, count, plan) {
            return self.allocator(map).take(count);
        }
        if self.allocator(map).has_given_back() {
            self.drain(&mut plan.ops);
            if let Some(extent) = self.allocator(map).take(count) {
                return Some(extent);
            }
        }
        self.grow(map, count, plan);
        self.allocator(map).take(count)
    }

    /// Room outside of the reserve.
    fn open_room(&self, map: Map) -> u32 {
        let (most, reserved) = match map {
            Map::Sets => (self.limits.sets.saturating_add(1), self.limits.reserved.sets),
            Map::Backends => (self.limits.slots, self.limits.reserved.slots),
        };
        most.saturating_sub(reserved)
    }

    fn allocator(&mut self, map: Map) -> &mut SlotAllocator {
        match map {
            Map::Sets => &mut self.ids,
            Map::Backends => &mut self.slots,
        }
    }

    /// Makes the map larger, so that `count` more fit in one piece; false if it may not grow.
    fn grow(&mut self, map: Map, count: u32, plan: &mut Plan<'_>) -> bool {
        let (least, most) = match map {
            // Ids start at 1.
            Map::Sets => (self.limits.least.sets, self.limits.sets.saturating_add(1)),
            Map::Backends => (self.limits.least.slots, self.limits.slots),
        };
        let slots = self.allocator(map);
        let room = array_room(slots.end_for(count), least, most);
        let grows = room > slots.end();
        if grows {
            self.resize(map, room, plan);
        }
        grows
    }

    fn resize(&mut self, map: Map, room: u32, plan: &mut Plan<'_>) {
        plan.ops.push(match map {
            Map::Sets => Op::ResizeSets(room),
            Map::Backends => Op::ResizeBackends(room),
        });
        self.drained();
        self.allocator(map).set_end(room);
    }

    /// For the first list, makes room at once for about as much as there is.
    pub(super) fn with_room_for<'a>(&mut self, store: &Store, mut plan: Plan<'a>) -> Plan<'a> {
        if self.sets.is_empty() && self.orphans.is_empty() {
            let Room { frontends, sets, slots } = estimate(store, &self.limits);
            self.grow(Map::Sets, sets, &mut plan);
            self.grow(Map::Backends, slots, &mut plan);
            self.grow_frontends(frontends, &mut plan);
        }
        plan
    }

    /// All that a batch inserts is counted before it begins, so that the map is replaced at most once.
    pub(super) fn make_room_for_frontends(&mut self, new: usize, plan: &mut Plan<'_>) {
        let needed = self.frontends.written() + self.cluster_ips_written + new;
        self.grow_frontends(u32::try_from(needed).unwrap_or(u32::MAX), plan);
    }

    fn grow_frontends(&mut self, needed: u32, plan: &mut Plan<'_>) {
        let room = hash_room(needed, self.limits.least.frontends, self.limits.frontends);
        if needed > self.frontends_room && room > self.frontends_room {
            self.replace_frontends(room, plan);
        }
    }

    pub(super) fn replace_frontends(&mut self, room: u32, plan: &mut Plan<'_>) {
        let frontends = self.frontends.each_written().collect();
        let written = self.cluster_ips.iter().filter(|(_, ip)| ip.is_written);
        let addresses = written.map(|(&address, _)| address).collect();
        plan.ops.push(Op::ReplaceFrontends { room, frontends, addresses });
        self.drained();
        self.frontends_room = room;
    }

    /// The Services for which there may be room now.
    pub(super) fn take_relieved(&mut self) -> BTreeSet<Arc<ServiceName>> {
        let new_room = std::mem::take(&mut self.new_room);
        self.starved.extract_if(.., |_, lacks| lacks.has_any_of(new_room)).map(|(service, _)| service).collect()
    }

    /// How much of the maps is in use.
    #[must_use]
    pub fn used(&self) -> Room {
        let frontends = u32::try_from(self.frontends.written() + self.cluster_ips_written).unwrap_or(u32::MAX);
        Room { frontends, sets: self.ids.used(), slots: self.slots.used() }
    }

    /// How many Services and ClusterIPs wait for room.
    #[must_use]
    pub fn without_room(&self) -> usize {
        self.starved.len() + self.unplaced.len()
    }

    /// Whether [`TablePlanner::compact`] would give memory back.
    #[must_use]
    pub fn is_sparse(&self) -> bool {
        let Room { frontends, sets, slots } = self.compact_room();
        self.is_synced
            && self.orphans.is_empty()
            && (frontends < self.frontends_room || sets < self.ids.end() || slots < self.slots.end())
    }

    /// What the maps should have room for after [`TablePlanner::compact`].
    fn compact_room(&self) -> Room {
        let Room { frontends, sets, slots } = self.limits.least;
        let shrunk = |now: u32, room: u32| if room <= now / SHRINKS_TO { room } else { now };
        let used = self.used();
        Room {
            frontends: shrunk(self.frontends_room, hash_room(used.frontends, frontends, self.limits.frontends)),
            sets: shrunk(self.ids.end(), array_room(used.sets, sets, self.limits.sets.saturating_add(1))),
            slots: shrunk(self.slots.end(), array_room(used.slots, slots, self.limits.slots)),
        }
    }

    /// Gives memory back that has not been needed: moves what lies far behind to the front, then replaces maps by smaller
    /// ones. Where what lies in between leaves no gap that is large enough, a map stays as it is.
    pub fn compact(&mut self) -> Vec<Op> {
        if !self.is_sparse() {
            return Vec::new();
        }
        collected(|write| self.compact_by(write))
    }

    fn compact_by(&mut self, write: Write<'_>) {
        let mut plan = Plan::new(write);
        let room = self.compact_room();
        self.drain(&mut plan.ops);
        let moved_slots = room.slots < self.slots.end() && self.move_backends(room.slots, &mut plan);
        let moved_ids = room.sets < self.ids.end() && self.move_sets(room.sets, &mut plan);
        if room.sets < self.ids.end() || room.frontends < self.frontends_room {
            self.replace_frontends(room.frontends, &mut plan);
        }
        self.drain(&mut plan.ops);
        if moved_slots {
            self.resize(Map::Backends, room.slots, &mut plan);
        }
        if moved_ids {
            self.resize(Map::Sets, room.sets, &mut plan);
        }
        self.flush(&mut plan, 1);
    }

    /// Whether no set has a slot from `end` on any more.
    fn move_backends(&mut self, end: u32, plan: &mut Plan<'_>) -> bool {
        for set in self.sets.values_mut().filter(|set| set.extent.first + set.extent.count > end) {
            let Some(extent) = self.slots.take_below(set.extent.count, end) else { return false };
            self.slots.give_back(std::mem::replace(&mut set.extent, extent));
            plan.ops.push(Op::WriteBackends { first_slot: extent.first, members: set.members.unpack() });
            plan.ops.push(set.publication());
        }
        true
    }

    /// Whether no set has an id from `end` on any more, once the frontends have been replaced.
    fn move_sets(&mut self, end: u32, plan: &mut Plan<'_>) -> bool {
        let mut ids = std::collections::HashMap::new();
        for set in self.sets.values_mut().filter(|set| set.id >= end) {
            let Some(extent) = self.ids.take_below(1, end) else { continue };
            ids.insert(set.id, extent.first);
            self.ids.give_back(Extent { first: std::mem::replace(&mut set.id, extent.first), count: 1 });
            plan.ops.extend([Op::SetAffinity { set: set.id, affinity: set.affinity }, set.publication()]);
        }
        self.frontends.renumber(&ids);
        !self.sets.values().any(|set| set.id >= end)
    }
}

/// About what the rows of a store will take.
fn estimate(store: &Store, limits: &Limits) -> Room {
    let (mut frontends, mut sets, mut slots) = (0_usize, 0_usize, 0_usize);
    for (name, row) in store.services() {
        let addresses = row.cluster_ips.len() + row.external_ips.len() + row.load_balancer_ips.len();
        let backends = store.slices(name).map(|(_, slice)| slice.endpoints.len().saturating_mul(slice.ports.len()));
        frontends += row.ports.len().saturating_mul(addresses).min(SERVICE_FRONTENDS_MAX) + row.cluster_ips.len();
        sets += row.ports.len() * addresses.min(2);
        slots += backends.fold(0, usize::saturating_add).min(limits.service_slots as usize);
    }
    let [frontends, sets, slots] = [frontends, sets, slots].map(|sum| u32::try_from(sum).unwrap_or(u32::MAX));
    Room { frontends, sets, slots }
}

/// Half as much again, within bounds.
fn array_room(needed: u32, least: u32, most: u32) -> u32 {
    needed.saturating_add(needed / 2).max(least).min(most)
}

/// A hash has a power of two of buckets (kernel/bpf/hashtab.c, `htab_map_alloc`).
fn hash_room(needed: u32, least: u32, most: u32) -> u32 {
    needed.checked_next_power_of_two().unwrap_or(u32::MAX).max(least).min(most)
}
