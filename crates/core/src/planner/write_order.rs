//! The order of writes: the filter widens before the keys that need it and narrows after them; memory that a program may
//! still read waits for a grace period before it is used again.

use crate::{Address, Family, Filter, Op};

/// State of the order of writes between batches.
#[derive(Debug)]
pub(super) struct WriteOrder {
    pub(super) filter: FilterCounts,
    /// Nothing is written yet: a program may still read what an earlier agent has given up.
    is_after_another: bool,
    /// Elements of `FRONTENDS` were freed since the last grace period. The kernel may give their memory to the next
    /// insertion (kernel/bpf/hashtab.c).
    has_freed: bool,
}

impl WriteOrder {
    /// Nothing is written yet. `is_new`: there was no earlier agent.
    pub(super) fn new(filter: FilterCounts, is_new: bool) -> Self {
        Self { filter, is_after_another: !is_new, has_freed: false }
    }

    /// The operation before all others: after it, everything that an earlier agent has freed may be used.
    pub(super) fn begin(&mut self) -> Option<Op> {
        std::mem::take(&mut self.is_after_another).then_some(Op::Drain)
    }

    /// A key with this address is deleted or replaced.
    pub(super) fn free(&mut self) {
        self.has_freed = true;
    }

    /// Whether an insertion must wait for a grace period.
    pub(super) fn must_drain(&self) -> bool {
        self.has_freed
    }

    /// A grace period has ended.
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
    /// No keys; the kernel has `written`.
    pub(super) fn new(bit_of: fn(Address) -> u64, written: Filter) -> Self {
        Self { bit_of, v4: [0; 64], v6: [0; 64], written }
    }

    /// A key with this address comes.
    pub(super) fn add(&mut self, address: Address) {
        if let Some(count) = self.count(address) {
            *count += 1;
        }
    }

    /// A key with this address has gone.
    pub(super) fn remove(&mut self, address: Address) {
        if let Some(count) = self.count(address) {
            *count = count.saturating_sub(1);
        }
    }

    /// What must be written before the keys that have come, if anything.
    pub(super) fn widen(&mut self) -> Option<Filter> {
        let needed = self.needed();
        self.write(Filter { v4: self.written.v4 | needed.v4, v6: self.written.v6 | needed.v6 })
    }

    /// What may be written after the keys that have gone, if anything.
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
