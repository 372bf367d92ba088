//! Services that wait for room.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::ServiceName;

/// Kind of room that a Service waits for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shortage {
    /// Places of frontends.
    Frontends,
    /// Ids of sets, or backend slots.
    Backends,
}

/// Kinds of room.
#[derive(Clone, Copy, Debug, Default)]
struct Shortages {
    frontends: bool,
    backends: bool,
}

impl Shortages {
    fn add(&mut self, shortage: Shortage) {
        match shortage {
            Shortage::Frontends => self.frontends = true,
            Shortage::Backends => self.backends = true,
        }
    }

    fn has_any_of(self, other: Self) -> bool {
        self.frontends && other.frontends || self.backends && other.backends
    }
}

/// Services without room, and the room that was freed since their last attempt.
#[derive(Debug, Default)]
pub(super) struct StarvedServices {
    services: BTreeMap<Arc<ServiceName>, Shortages>,
    freed: Shortages,
}

impl StarvedServices {
    /// Records that a Service lacks room.
    pub(super) fn add(&mut self, service: &Arc<ServiceName>, shortage: Shortage) {
        self.services.entry(service.clone()).or_default().add(shortage);
    }

    /// Records that room of a kind was freed.
    pub(super) fn free(&mut self, shortage: Shortage) {
        self.freed.add(shortage);
    }

    /// Forgets a Service that is about to be planned again.
    pub(super) fn remove(&mut self, service: &Arc<ServiceName>) {
        self.services.remove(service);
    }

    /// Services that lack a kind of room that was freed since the last call.
    pub(super) fn retriable(&mut self) -> BTreeSet<Arc<ServiceName>> {
        let freed = std::mem::take(&mut self.freed);
        let retriable = self.services.iter().filter(|(_, shortages)| shortages.has_any_of(freed));
        retriable.map(|(service, _)| service.clone()).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.services.len()
    }
}
