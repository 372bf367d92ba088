//! Capacity of the maps: half as much again as they need. They grow when something does not fit, and shrink when more
//! than half has been empty for a while.
//!
//! One write replaces a map as a whole, after which no program uses the old one. It therefore also counts as the grace
//! period of everything that waits for one.

use super::{Batch, Op, Phase, Store, TablePlanner, Write, collected};
use crate::{
    Capacity, Limits, SERVICE_FRONTENDS_MAX,
    slot_allocator::{Extent, SlotAllocator},
};

/// Map whose elements are allocated in extents.
#[derive(Clone, Copy)]
pub(super) enum ExtentMap {
    /// Ids of sets.
    Sets,
    /// Backend slots.
    Backends,
}

/// Service that needs room.
#[derive(Clone, Copy)]
pub(super) struct Requester {
    pub(super) is_protected: bool,
    /// Room that the same change returns.
    pub(super) returned: u32,
}

/// A map shrinks only to this fraction of its size, or less.
const SHRINKS_TO: u32 = 2;
/// Fraction of the used room that must be spare. With less, every other change would wait for programs.
const SPARE: u32 = 8;

impl TablePlanner {
    /// Allocates an extent; if none is free, waits for returned ones, then grows the map. Room reserved for the API
    /// server's Service is closed to others, except for a moment to one that returns as much.
    pub(super) fn allocate(
        &mut self,
        map: ExtentMap,
        count: u32,
        by: Requester,
        batch: &mut Batch<'_>,
    ) -> Option<Extent> {
        let more = count.saturating_sub(by.returned);
        if more != 0
            && !by.is_protected
            && self.allocator(map).used().saturating_add(more) > self.unreserved_capacity(map)
        {
            return None;
        }
        if let Some(extent) = self.allocator(map).allocate(count) {
            return Some(extent);
        }
        let slots = self.allocator(map);
        let is_crowded = slots.end() - slots.used() < slots.used() / SPARE;
        if is_crowded && self.grow(map, count, batch) {
            return self.allocator(map).allocate(count);
        }
        if self.allocator(map).has_released() {
            self.drain(batch);
            if let Some(extent) = self.allocator(map).allocate(count) {
                return Some(extent);
            }
        }
        self.grow(map, count, batch);
        self.allocator(map).allocate(count)
    }

    /// Capacity outside the reserve.
    fn unreserved_capacity(&self, map: ExtentMap) -> u32 {
        let (most, reserved) = match map {
            ExtentMap::Sets => (self.limits.sets.saturating_add(1), self.limits.reserved.sets),
            ExtentMap::Backends => (self.limits.slots, self.limits.reserved.slots),
        };
        most.saturating_sub(reserved)
    }

    fn allocator(&mut self, map: ExtentMap) -> &mut SlotAllocator {
        match map {
            ExtentMap::Sets => &mut self.sets.ids,
            ExtentMap::Backends => &mut self.sets.slots,
        }
    }

    /// Grows the map so that `count` more fit in one piece; false if it may not grow.
    fn grow(&mut self, map: ExtentMap, count: u32, batch: &mut Batch<'_>) -> bool {
        let (least, most) = match map {
            // Ids start at 1.
            ExtentMap::Sets => (self.limits.least.sets, self.limits.sets.saturating_add(1)),
            ExtentMap::Backends => (self.limits.least.slots, self.limits.slots),
        };
        let slots = self.allocator(map);
        let capacity = array_capacity(slots.end_for(count), least, most);
        let grows = capacity > slots.end();
        if grows {
            self.resize(map, capacity, batch);
        }
        grows
    }

    fn resize(&mut self, map: ExtentMap, capacity: u32, batch: &mut Batch<'_>) {
        batch.ops.push(match map {
            ExtentMap::Sets => Op::ResizeSets(capacity),
            ExtentMap::Backends => Op::ResizeBackends(capacity),
        });
        self.drained();
        self.allocator(map).set_end(capacity);
    }

    /// Makes room at once for about the whole first list.
    pub(super) fn grow_for(&mut self, store: &Store, batch: &mut Batch<'_>) {
        if self.sets.is_empty() {
            let Capacity { frontends, sets, slots } = estimate(store, &self.limits);
            self.grow(ExtentMap::Sets, sets, batch);
            self.grow(ExtentMap::Backends, slots, batch);
            self.grow_frontends(frontends, batch);
        }
    }

    /// Makes room for all insertions of a batch before it begins, so that the map is replaced at most once.
    pub(super) fn grow_for_insertions(&mut self, new: usize, batch: &mut Batch<'_>) {
        let needed = self.elements() + new;
        self.grow_frontends(u32::try_from(needed).unwrap_or(u32::MAX), batch);
    }

    fn grow_frontends(&mut self, needed: u32, batch: &mut Batch<'_>) {
        let capacity = hash_capacity(needed, self.limits.least.frontends, self.limits.frontends);
        if needed > self.frontends_capacity && capacity > self.frontends_capacity {
            self.replace_frontends(capacity, batch);
        }
    }

    pub(super) fn replace_frontends(&mut self, capacity: u32, batch: &mut Batch<'_>) {
        let frontends = self.claims.frontends.each_written().collect();
        let addresses = self.claims.cluster_ips.each_written().collect();
        batch.ops.push(Op::ReplaceFrontends { capacity, frontends, addresses });
        self.drained();
        self.frontends_capacity = capacity;
    }

    /// Elements of `FRONTENDS` in use.
    pub(super) fn elements(&self) -> usize {
        self.claims.frontends.written() + self.claims.cluster_ips.written()
    }

    /// Used part of the capacity.
    #[must_use]
    pub fn used(&self) -> Capacity {
        let frontends = u32::try_from(self.elements()).unwrap_or(u32::MAX);
        Capacity { frontends, sets: self.sets.ids.used(), slots: self.sets.slots.used() }
    }

    /// Number of Services and ClusterIPs that wait for room.
    #[must_use]
    pub fn without_capacity(&self) -> usize {
        self.starved.len() + self.claims.cluster_ips.unplaced.len()
    }

    /// Whether [`TablePlanner::compact`] would free memory.
    #[must_use]
    pub fn is_sparse(&self) -> bool {
        let Capacity { frontends, sets, slots } = self.compact_capacity();
        self.phase == Phase::Synced
            && !self.sets.has_orphans()
            && (frontends < self.frontends_capacity || sets < self.sets.ids.end() || slots < self.sets.slots.end())
    }

    /// Capacity of the maps after [`TablePlanner::compact`].
    fn compact_capacity(&self) -> Capacity {
        let Capacity { frontends, sets, slots } = self.limits.least;
        let shrunk = |now: u32, capacity: u32| if capacity <= now / SHRINKS_TO { capacity } else { now };
        let used = self.used();
        Capacity {
            frontends: shrunk(self.frontends_capacity, hash_capacity(used.frontends, frontends, self.limits.frontends)),
            sets: shrunk(self.sets.ids.end(), array_capacity(used.sets, sets, self.limits.sets.saturating_add(1))),
            slots: shrunk(self.sets.slots.end(), array_capacity(used.slots, slots, self.limits.slots)),
        }
    }

    /// Frees unused memory: moves sets and backends to the front of their maps, then replaces maps by smaller ones. A
    /// map keeps its size where no gap is large enough.
    pub fn compact(&mut self) -> Vec<Op> {
        if !self.is_sparse() {
            return Vec::new();
        }
        collected(|write| self.compact_by(write))
    }

    fn compact_by(&mut self, write: Write<'_>) {
        let mut batch = Batch::new(write);
        let capacity = self.compact_capacity();
        let (slots_end, ids_end) = (self.sets.slots.end(), self.sets.ids.end());
        self.drain(&mut batch);
        let moved_slots = capacity.slots < slots_end && self.sets.move_backends(capacity.slots, &mut batch.ops);
        let mut moved_ids = false;
        if capacity.sets < ids_end {
            let (ids, all_moved) = self.sets.move_ids(capacity.sets, &mut batch.ops);
            self.claims.frontends.renumber(&ids);
            moved_ids = all_moved;
        }
        if capacity.sets < ids_end || capacity.frontends < self.frontends_capacity {
            self.replace_frontends(capacity.frontends, &mut batch);
        }
        self.drain(&mut batch);
        if moved_slots {
            self.resize(ExtentMap::Backends, capacity.slots, &mut batch);
        }
        if moved_ids {
            self.resize(ExtentMap::Sets, capacity.sets, &mut batch);
        }
        self.flush(&mut batch, 1);
    }
}

/// Estimated room that the rows of a store need.
fn estimate(store: &Store, limits: &Limits) -> Capacity {
    let (mut frontends, mut sets, mut slots) = (0_usize, 0_usize, 0_usize);
    for (row, backends) in store.services_with_backends() {
        let addresses = row.cluster_ips.len() + row.external_ips.len() + row.load_balancer_ips.len();
        frontends += row.ports.len().saturating_mul(addresses).min(SERVICE_FRONTENDS_MAX) + row.cluster_ips.len();
        sets += row.ports.len() * addresses.min(2);
        slots += backends.min(limits.service_slots as usize);
    }
    let [frontends, sets, slots] = [frontends, sets, slots].map(|sum| u32::try_from(sum).unwrap_or(u32::MAX));
    Capacity { frontends, sets, slots }
}

/// Half as much again as needed, within bounds.
fn array_capacity(needed: u32, least: u32, most: u32) -> u32 {
    needed.saturating_add(needed / 2).max(least).min(most)
}

/// Capacity of a hash, which has a power of two of buckets (kernel/bpf/hashtab.c, `htab_map_alloc`).
fn hash_capacity(needed: u32, least: u32, most: u32) -> u32 {
    needed.checked_next_power_of_two().unwrap_or(u32::MAX).max(least).min(most)
}
