//! How stale what is known may be.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use cproxy_core::ResourceKind;
use tokio::time::Instant;

/// When the API server has told something of each kind for the last time: an event, a bookmark, the end of a list. A
/// refusal tells nothing. Bookmarks come every minute, so a silence that lasts means that what is known grows stale.
#[derive(Clone, Debug, Default)]
pub struct LastHeard(Arc<Mutex<BTreeMap<ResourceKind, Instant>>>);

impl LastHeard {
    pub(super) fn record(&self, kind: ResourceKind) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(kind, Instant::now());
    }

    /// For how many seconds it has said nothing of one of the kinds; `None` if it never has said anything of any.
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
