//! The most recently changed Services, and when.

use std::{collections::BTreeMap, sync::Arc};

use cproxy_core::{CHANGES_MAX, ServiceName, SetChange};
use tokio::time::Instant;

use crate::report::ChangeRow;

/// Last changes, of [`CHANGES_MAX`] Services at most, since the first complete table.
#[derive(Debug, Default)]
pub(super) struct LastChanges {
    /// Time of the first complete table.
    synced: Option<Instant>,
    changes: BTreeMap<Arc<ServiceName>, Change>,
}

#[derive(Clone, Copy, Debug)]
struct Change {
    at: Instant,
    before: Option<u32>,
    after: u32,
}

impl Change {
    fn size(&self) -> u32 {
        self.before.unwrap_or_default().max(self.after)
    }
}

impl LastChanges {
    /// Records the changes of a write. Those of the first complete table are none: everything is new then.
    pub(super) fn record(&mut self, now: Instant, changes: Vec<SetChange>) {
        if self.synced.is_none() {
            self.synced = Some(now);
            return;
        }
        for SetChange { service, before, after } in changes {
            if self.changes.len() >= CHANGES_MAX && !self.changes.contains_key(&service) {
                let oldest = self.changes.iter().min_by_key(|(_, change)| change.at).map(|(name, _)| name.clone());
                oldest.map(|oldest| self.changes.remove(&oldest));
            }
            let change = Change { at: now, before, after };
            let last = self.changes.entry(service).or_insert(change);
            // Of a Service's sets that change together, the largest counts.
            if last.at != now || last.size() < change.size() {
                *last = change;
            }
        }
    }

    /// Last change of a Service, if it is known.
    pub(super) fn of(&self, service: &ServiceName) -> Option<ChangeRow> {
        let Change { at, before, after } = *self.changes.get(service)?;
        Some(ChangeRow { seconds_ago: at.elapsed().as_secs(), before, after })
    }

    /// Seconds since the last change of any Service.
    pub(super) fn last_seconds(&self) -> Option<u64> {
        self.changes.values().map(|change| change.at).max().map(|at| at.elapsed().as_secs())
    }

    /// Seconds since the first complete table.
    pub(super) fn synced_seconds(&self) -> Option<u64> {
        self.synced.map(|at| at.elapsed().as_secs())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn change(name: &str, before: Option<u32>, after: u32) -> SetChange {
        SetChange { service: Arc::new(ServiceName::new("a", name)), before, after }
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_change_of_a_service_is_known_until_many_others_have_changed() {
        let (mut changes, first) = (LastChanges::default(), ServiceName::new("a", "first"));
        changes.record(Instant::now(), vec![change("first", None, 3)]);
        assert_eq!(changes.of(&first), None, "the first table is no change");
        let ports = [(1, 0), (3, 2), (0, 0)].map(|(before, after)| change("first", Some(before), after));
        changes.record(Instant::now(), ports.into());
        tokio::time::advance(Duration::from_secs(5)).await;
        let expected = ChangeRow { seconds_ago: 5, before: Some(3), after: 2 };
        for index in 0..CHANGES_MAX {
            assert_eq!(changes.of(&first), Some(expected), "{index}");
            changes.record(Instant::now(), vec![change(&index.to_string(), None, 1)]);
        }
        assert_eq!((changes.of(&first), changes.changes.len()), (None, CHANGES_MAX));
        assert_eq!(changes.synced_seconds(), Some(5));
    }
}
