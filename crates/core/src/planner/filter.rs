//! The filter: which of its bits some key needs.

use crate::{Address, Family, Filter};

/// How many keys need each bit, and what the kernel was told last.
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
