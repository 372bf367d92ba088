//! Order of writes: the filter widens before the keys that need it and narrows after them; memory that a program may
//! still read waits for a grace period before it is used again.

use crate::{Address, Family, Filter, Op};

/// State of the order of writes between batches.
#[derive(Debug)]
pub(super) struct WriteOrder {
    pub(super) filter: FilterCounts,
    /// Nothing is written yet: a program may still read memory that an earlier agent has freed.
    is_after_another: bool,
    /// Elements of `FRONTENDS` were freed since the last grace period. The kernel may give their memory to the next
    /// insertion (kernel/bpf/hashtab.c).
    has_freed: bool,
}

impl WriteOrder {
    /// Order before the first write. `is_new`: there was no earlier agent.
    pub(super) fn new(filter: FilterCounts, is_new: bool) -> Self {
        Self { filter, is_after_another: !is_new, has_freed: false }
    }

    /// First of all operations: after it, memory that an earlier agent has freed may be used.
    pub(super) fn begin(&mut self) -> Option<Op> {
        std::mem::take(&mut self.is_after_another).then_some(Op::Drain)
    }

    /// Records that an element of `FRONTENDS` was freed.
    pub(super) fn free(&mut self) {
        self.has_freed = true;
    }

    /// Whether an insertion must wait for a grace period.
    pub(super) fn must_drain(&self) -> bool {
        self.has_freed
    }

    /// Records that a grace period has ended.
    pub(super) fn drained(&mut self) {
        self.has_freed = false;
    }
}

/// Number of keys that need each bit of the filter, and the filter that the kernel has.
#[derive(Debug)]
pub(super) struct FilterCounts {
    bit_of: fn(Address) -> u64,
    v4: [u32; 64],
    v6: [u32; 64],
    written: Filter,
}

impl FilterCounts {
    /// Counts without keys; the kernel has `written`.
    pub(super) fn new(bit_of: fn(Address) -> u64, written: Filter) -> Self {
        Self { bit_of, v4: [0; 64], v6: [0; 64], written }
    }

    /// Adds a key with this address.
    pub(super) fn add(&mut self, address: Address) {
        if let Some(count) = self.count(address) {
            *count += 1;
        }
    }

    /// Adds a key with this address. Returns the filter to write before it, if it must change.
    pub(super) fn widen_for(&mut self, address: Address) -> Option<Filter> {
        self.add(address);
        let bit = (self.bit_of)(address);
        let written = match address.family() {
            Family::V4 => self.written.v4,
            Family::V6 => self.written.v6,
        };
        if written & bit == 0 { self.widen() } else { None }
    }

    /// Removes a key with this address.
    pub(super) fn remove(&mut self, address: Address) {
        if let Some(count) = self.count(address) {
            *count = count.saturating_sub(1);
        }
    }

    /// Filter to write before new keys, if it must change.
    pub(super) fn widen(&mut self) -> Option<Filter> {
        let needed = self.needed();
        self.write(Filter { v4: self.written.v4 | needed.v4, v6: self.written.v6 | needed.v6 })
    }

    /// Filter to write after deleted keys, if it may narrow.
    pub(super) fn narrow(&mut self) -> Option<Filter> {
        self.write(self.needed())
    }

    fn write(&mut self, filter: Filter) -> Option<Filter> {
        let changes = self.written != filter;
        self.written = filter;
        changes.then_some(filter)
    }

    fn needed(&self) -> Filter {
        let bits = |counts: &[u32; 64]| {
            counts.iter().enumerate().filter(|(_, count)| **count > 0).fold(0, |bits, (bit, _)| bits | 1 << bit)
        };
        Filter { v4: bits(&self.v4), v6: bits(&self.v6) }
    }

    fn count(&mut self, address: Address) -> Option<&mut u32> {
        let bit = (self.bit_of)(address).trailing_zeros() as usize;
        match address.family() {
            Family::V4 => self.v4.get_mut(bit),
            Family::V6 => self.v6.get_mut(bit),
        }
    }
}
