//! Services that wait for room.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::ServiceName;

/// Kind of room that a Service waits for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Lack {
    /// Places of frontends.
    Frontends,
    /// Ids of sets, or backend slots.
    Backends,
}

/// Kinds of room.
#[derive(Clone, Copy, Debug, Default)]
struct Lacks {
    frontends: bool,
    backends: bool,
}

impl Lacks {
    fn add(&mut self, lack: Lack) {
        match lack {
            Lack::Frontends => self.frontends = true,
            Lack::Backends => self.backends = true,
        }
    }

    fn has_any_of(self, other: Self) -> bool {
        self.frontends && other.frontends || self.backends && other.backends
    }
}

/// Services without room, and the room that was freed since their last attempt.
#[derive(Debug, Default)]
pub(super) struct Starved {
    services: BTreeMap<Arc<ServiceName>, Lacks>,
    freed: Lacks,
}

impl Starved {
    /// Records that a Service lacks room.
    pub(super) fn add(&mut self, service: &Arc<ServiceName>, lack: Lack) {
        self.services.entry(service.clone()).or_default().add(lack);
    }

    /// Records that room of a kind was freed.
    pub(super) fn free(&mut self, lack: Lack) {
        self.freed.add(lack);
    }

    /// Forgets a Service that is about to be planned again.
    pub(super) fn remove(&mut self, service: &Arc<ServiceName>) {
        self.services.remove(service);
    }

    /// Services that lack a kind of room that was freed since the last call.
    pub(super) fn with_freed_room(&mut self) -> BTreeSet<Arc<ServiceName>> {
        let freed = std::mem::take(&mut self.freed);
        let lacking = self.services.iter().filter(|(_, lacks)| lacks.has_any_of(freed));
        lacking.map(|(service, _)| service.clone()).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.services.len()
    }
}
