//! Time since the API server last confirmed the known state.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use cproxy_core::ResourceKind;
use tokio::time::Instant;

/// Last time at which the API server confirmed the known state of each kind: an event, a bookmark, the end of a list. A
/// refusal does not count. Bookmarks come every minute, so after a longer silence the known state may be stale.
#[derive(Clone, Debug, Default)]
pub struct LastHeard(Arc<Mutex<BTreeMap<ResourceKind, Instant>>>);

impl LastHeard {
    /// Records that the server has confirmed the state of this kind.
    pub(super) fn record(&self, kind: ResourceKind) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(kind, Instant::now());
    }

    /// Seconds since the server confirmed the kind that has been silent longest; `None` before the first confirmation.
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
        let heard = LastHeard::default();
        assert_eq!(heard.silent_seconds(), None);
        heard.record(ResourceKind::Services);
        tokio::time::sleep(Duration::from_secs(30)).await;
        heard.record(ResourceKind::EndpointSlices);
        assert_eq!(heard.silent_seconds(), Some(30));
        heard.record(ResourceKind::Services);
        assert_eq!(heard.silent_seconds(), Some(0));
    }
}
