//! Time since the last contact with the API server.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use cproxy_core::ResourceKind;
use tokio::time::Instant;

/// Last contact with the API server for each kind: the last time that it confirmed the known state, by a change, a
/// bookmark or the end of a list. A refusal does not count. Bookmarks come every minute, so after a longer silence the
/// known state may be stale.
#[derive(Clone, Debug, Default)]
pub struct LastContact(Arc<Mutex<BTreeMap<ResourceKind, Instant>>>);

impl LastContact {
    /// Records a contact for this kind.
    pub(super) fn record(&self, kind: ResourceKind) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(kind, Instant::now());
    }

    /// Seconds since the last contact for the kind that has been silent longest; `None` before the first contact.
    #[must_use]
    pub fn silent_seconds(&self) -> Option<u64> {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.values().min().map(|first| first.elapsed().as_secs())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_kind_that_has_been_silent_longest_counts() {
        let contact = LastContact::default();
        assert_eq!(contact.silent_seconds(), None);
        contact.record(ResourceKind::Services);
        tokio::time::sleep(Duration::from_secs(30)).await;
        contact.record(ResourceKind::EndpointSlices);
        assert_eq!(contact.silent_seconds(), Some(30));
        contact.record(ResourceKind::Services);
        assert_eq!(contact.silent_seconds(), Some(0));
    }
}
