//! Versions of policies and slices.
//!
//! ```text
//! revision of the API server (40 bits) | changes at that revision (16 bits) | tag of the process (8 bits)
//! ```
//!
//! Versions of one process are ordered. Those of two are not: each gathers changes in its own way. But both know how
//! far a version reaches in the history of the API server, so a client that comes from another replica is not shown an
//! older state than it has seen.

const TAG_BITS: u32 = 8;
const REVISION_SHIFT: u32 = 24;

/// Revision of the API server that a version is about.
pub(super) fn revision(version: u64) -> u64 {
    version >> REVISION_SHIFT
}

/// Largest version that is about a revision.
pub(super) fn last_of(revision: u64) -> u64 {
    revision.saturating_mul(1 << REVISION_SHIFT) | ((1 << REVISION_SHIFT) - 1)
}

/// Versions of this process.
#[derive(Debug)]
pub(super) struct Versions {
    epoch: u64,
    first: u64,
    last: u64,
}

impl Versions {
    pub(super) fn new(epoch: u64) -> Self {
        let last = epoch & ((1 << TAG_BITS) - 1);
        Self { epoch, first: u64::MAX, last }
    }

    /// Random number of this process.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The next version, about a revision. Later versions are larger whatever the revision is.
    pub(super) fn next(&mut self, revision: u64) -> u64 {
        let tag = self.epoch & ((1 << TAG_BITS) - 1);
        let least = revision.saturating_mul(1 << REVISION_SHIFT) | tag;
        self.last = least.max(self.last.saturating_add(1 << TAG_BITS));
        self.first = self.first.min(self.last);
        self.last
    }

    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// Whether a version is, as far as its number shows, one of this process.
    pub(super) fn has_issued(&self, version: u64) -> bool {
        let is_tagged = (version ^ self.epoch) & ((1 << TAG_BITS) - 1) == 0;
        is_tagged && (self.first..=self.last).contains(&version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_grow_and_tell_revision_and_process() {
        let (mut versions, other) = (Versions::new(0x1_07), Versions::new(0x1_08));
        let mut last = 0;
        for wanted in [5, 5, 5, 9, 7, 7, 10] {
            let version = versions.next(wanted);
            assert!(version > last && revision(version) >= wanted, "{wanted} {version:x}");
            assert!(versions.has_issued(version) && !other.has_issued(version));
            last = version;
        }
        assert_eq!((revision(last), last & 0xff), (10, 7));
        assert!(!versions.has_issued(last + (1 << TAG_BITS)) && !versions.has_issued(7));
        // So many changes at one revision reach into the next.
        for _ in 0..1 << 16 {
            versions.next(10);
        }
        assert_eq!(revision(versions.next(10)), 11);
    }
}
