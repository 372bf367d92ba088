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

    /// Removes the Services for which there may be room now.
    pub(super) fn relieve(&mut self) -> BTreeSet<Arc<ServiceName>> {
        let freed = std::mem::take(&mut self.freed);
        self.services.extract_if(.., |_, lacks| lacks.has_any_of(freed)).map(|(service, _)| service).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.services.len()
    }
}
