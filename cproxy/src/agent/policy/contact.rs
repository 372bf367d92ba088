//! Time since the source last confirmed the pod's policy.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::time::Instant;

/// Last confirmation of each kind of a relay. Manifests confirm nothing.
#[derive(Clone, Debug, Default)]
pub(in crate::agent) struct SourceContact(Arc<Mutex<[Option<Instant>; 2]>>);

impl SourceContact {
    /// Takes a confirmation of one of the two kinds.
    pub(super) fn record(&self, kind: usize) {
        if let Some(last) = self.0.lock().unwrap_or_else(PoisonError::into_inner).get_mut(kind) {
            *last = Some(Instant::now());
        }
    }

    /// Seconds since the last confirmation of the kind that is silent longest; `None` until both have one.
    pub(super) fn silent_seconds(&self) -> Option<u64> {
        let [policies, slices] = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Some(policies?.min(slices?).elapsed().as_secs())
    }
}
