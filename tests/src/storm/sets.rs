//! Random changes of the backends of a Service. They are recorded before they are written to the source.

use super::{
    addresses::{BACKENDS_OF_SERVICE, Set},
    history::History,
};
use crate::random::Random;

/// Largest number of backends of a Service.
pub const MANY: u32 = 1_000;

/// Probability in percent that backends return.
const RETURN: usize = 30;

/// Changes, whose sets have sizes of these limits with these weights.
#[derive(Clone, Copy, Debug)]
pub struct Sets<'h> {
    /// Record of the changes.
    pub history: &'h History,
    /// Weight, and limit on the number of backends.
    pub sizes: &'static [(usize, u32)],
}

impl Sets<'_> {
    /// Replaces the set by one without common backends.
    pub fn replace(self, service: usize, random: &mut Random) {
        let before = self.latest(service);
        let (first, count) = (before.first + before.count, self.count(random));
        self.announce(service, Set { terminating: 0, first, count, port: before.port ^ 1 });
    }

    /// Replaces the set by one without common backends at the same ports.
    pub fn follow(self, service: usize) {
        let before = self.latest(service);
        self.announce(service, Set { terminating: 0, first: before.first + before.count, ..before });
    }

    /// Replaces the set by one with common backends, if there are any. The first ones leave, and some of them terminate
    /// before that; or the last ones leave, and earlier ones return.
    pub fn shift(self, service: usize, random: &mut Random) {
        let before = self.latest(service);
        let gone = 1 + random.below(before.count as usize) as u32;
        let come = self.count(random);
        let earlier = come.min(before.first - first_of(service));
        let set = if earlier > 0 && random.percent(RETURN) {
            Set { terminating: 0, first: before.first - earlier, count: before.count - gone + earlier, ..before }
        } else {
            let terminating = random.below(gone as usize + 1) as u32;
            Set { terminating, first: before.first + gone, count: before.count - gone + come, ..before }
        };
        self.announce(service, set);
    }

    /// Changes the number of backends.
    pub fn resize(self, service: usize, count: u32) {
        let before = self.latest(service);
        self.announce(service, Set { terminating: 0, count, ..before });
    }

    /// The current set, or the last one of a deleted Service, or an empty one.
    pub fn latest(self, service: usize) -> Set {
        let nothing = Set { terminating: 0, first: first_of(service), count: 1, port: 0 };
        self.history.latest_set(service).unwrap_or(nothing)
    }

    /// A random number of backends.
    fn count(self, random: &mut Random) -> u32 {
        let most = random.weighted(self.sizes);
        1 + random.below(most as usize) as u32
    }

    /// Records a set, within the backends of the Service.
    fn announce(self, service: usize, set: Set) {
        let base = first_of(service);
        let first = base + (set.first - base) % (BACKENDS_OF_SERVICE - MANY);
        let (terminating, count) = (set.terminating.min(first - base), set.count.min(MANY));
        self.history.announce(service, Some(Set { terminating, first, count, ..set }));
    }
}

/// First backend that is reserved for a Service.
fn first_of(service: usize) -> u32 {
    service as u32 * BACKENDS_OF_SERVICE
}
