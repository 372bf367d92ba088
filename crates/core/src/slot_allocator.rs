//! Allocator of the slots of `BACKENDS` and the ids of `SETS`.
//!
//! Returned slots stay unusable until [`SlotAllocator::reclaim`]: a program that read the old word a moment ago may
//! still be on its way to the slots behind it.

use std::collections::BTreeMap;

/// Run of successive slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct Extent {
    pub(super) first: u32,
    pub(super) count: u32,
}

/// First-fit allocator of extents below an end that can be moved.
#[derive(Debug)]
pub(super) struct SlotAllocator {
    free: BTreeMap<u32, u32>,
    released: Vec<Extent>,
    end: u32,
    used: u32,
}

impl SlotAllocator {
    /// Allocator in which everything in `first..end` is free, apart from `used`, whose extents may overlap.
    pub(super) fn new(first: u32, end: u32, mut used: Vec<Extent>) -> Self {
        used.retain(|extent| extent.count != 0);
        used.sort_unstable_by_key(|extent| extent.first);
        let mut free = BTreeMap::new();
        let mut next = first;
        for extent in used {
            if extent.first > next {
                free.insert(next, extent.first.min(end) - next);
            }
            next = next.max(extent.first.saturating_add(extent.count)).min(end);
        }
        if next < end {
            free.insert(next, end - next);
        }
        let end = end.max(first);
        let used = end - free.values().sum::<u32>();
        Self { free, released: Vec::new(), end, used }
    }

    /// End of the slots.
    pub(super) fn end(&self) -> u32 {
        self.end
    }

    /// Number of slots that are neither free nor returned.
    pub(super) fn used(&self) -> u32 {
        self.used
    }

    /// End that `count` more successive slots need.
    pub(super) fn end_for(&self, count: u32) -> u32 {
        let last = self.free.last_key_value().filter(|&(first, size)| first + size == self.end);
        last.map_or(self.end, |(&first, _)| first).saturating_add(count)
    }

    /// Moves the end; slots beyond it must be free.
    pub(super) fn set_end(&mut self, end: u32) {
        if end > self.end {
            self.free_now(Extent { first: self.end, count: end - self.end });
        } else {
            let beyond = self.free.split_off(&end);
            debug_assert!(beyond.iter().map(|(first, size)| first + size).max().is_none_or(|last| last <= self.end));
            if let Some((&first, size)) = self.free.iter_mut().next_back() {
                *size = (*size).min(end - first);
            }
        }
        self.end = end;
    }

    /// Allocates `count` successive slots; `None` if there are none.
    pub(super) fn allocate(&mut self, count: u32) -> Option<Extent> {
        self.allocate_below(count, self.end)
    }

    /// As [`SlotAllocator::allocate`], below `end`.
    pub(super) fn allocate_below(&mut self, count: u32, end: u32) -> Option<Extent> {
        if count == 0 {
            return Some(Extent::default());
        }
        let fits = |&(&first, &size): &(&u32, &u32)| size >= count && u64::from(first) + u64::from(count) <= end.into();
        let (first, size) = self.free.range(..end).find(fits).map(|(&first, &size)| (first, size))?;
        self.free.remove(&first);
        if size > count {
            self.free.insert(first + count, size - count);
        }
        self.used += count;
        Some(Extent { first, count })
    }

    /// Returns slots; they are free after the next [`SlotAllocator::reclaim`].
    pub(super) fn release(&mut self, extent: Extent) {
        if extent.count != 0 {
            // Extents that were read back from the kernel may overlap.
            self.used = self.used.saturating_sub(extent.count);
            self.released.push(extent);
        }
    }

    /// Whether [`SlotAllocator::reclaim`] would free anything.
    pub(super) fn has_released(&self) -> bool {
        !self.released.is_empty()
    }

    /// Frees the returned slots: no program can still be reading them.
    pub(super) fn reclaim(&mut self) {
        for extent in std::mem::take(&mut self.released) {
            self.free_now(extent);
        }
    }

    fn free_now(&mut self, mut extent: Extent) {
        if let Some((&first, &count)) = self.free.range(..extent.first).next_back()
            && first + count == extent.first
        {
            self.free.remove(&first);
            extent = Extent { first, count: count + extent.count };
        }
        if let Some(count) = self.free.remove(&(extent.first + extent.count)) {
            extent.count += count;
        }
        self.free.insert(extent.first, extent.count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_slots_are_not_reused_before_they_are_reclaimed() {
        let mut slots = SlotAllocator::new(0, 4, Vec::new());
        let all = slots.allocate(4).unwrap();
        slots.release(all);
        assert_eq!(slots.allocate(1), None);
        slots.reclaim();
        assert_eq!(slots.allocate(4), Some(all));
    }

    #[test]
    fn adjacent_free_slots_are_merged() {
        let mut slots = SlotAllocator::new(0, 6, Vec::new());
        let parts: Vec<_> = (0..3).map(|_| slots.allocate(2).unwrap()).collect();
        for part in [parts[0], parts[2], parts[1]] {
            slots.release(part);
            slots.reclaim();
        }
        assert_eq!(slots.allocate(6), Some(Extent { first: 0, count: 6 }));
    }

    #[test]
    fn used_slots_are_left_alone_even_if_they_overlap_or_lie_outside() {
        let extent = |first, count| Extent { first, count };
        let mut slots = SlotAllocator::new(1, 10, vec![extent(2, 3), extent(3, 1), extent(8, 100), extent(50, 1)]);
        assert_eq!(slots.allocate(3), Some(extent(5, 3)));
        assert_eq!(slots.allocate(1), Some(extent(1, 1)));
        assert_eq!(slots.allocate(1), None);
    }

    #[test]
    fn the_end_moves() {
        let mut slots = SlotAllocator::new(1, 1, Vec::new());
        assert_eq!((slots.allocate(1), slots.end_for(3)), (None, 4));
        slots.set_end(4);
        let all = slots.allocate(3).unwrap();
        assert_eq!((all, slots.used(), slots.end_for(2)), (Extent { first: 1, count: 3 }, 4, 6));
        slots.set_end(8);
        assert_eq!(slots.end_for(5), 9, "the last ones are free");
        assert_eq!(slots.allocate_below(2, 5), None);
        let two = slots.allocate_below(2, 6).unwrap();
        assert_eq!(two, Extent { first: 4, count: 2 });
        slots.release(two);
        assert_eq!(slots.used(), 4);
        slots.reclaim();
        slots.set_end(5);
        assert_eq!(
            (slots.allocate(2), slots.allocate(1), slots.allocate(1)),
            (None, Some(Extent { first: 4, count: 1 }), None)
        );
    }

    #[test]
    fn an_empty_set_needs_no_slots() {
        assert_eq!(SlotAllocator::new(0, 0, Vec::new()).allocate(0), Some(Extent::default()));
    }
}
