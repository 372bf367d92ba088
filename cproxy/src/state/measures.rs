//! Measures of the task that owns the table, for `status_http`. Without an address of that there are none.

use std::time::{Duration, Instant, SystemTime};

use cproxy_core::{Event, ResourceKind};
use cproxy_daemon::Histogram;

use super::RestoreSign;

/// Every other bound of kube-proxy's histogram of syncs, so that both can be added.
const SYNC_BOUNDS: [f64; 8] = [0.001, 0.004, 0.016, 0.064, 0.256, 1.024, 4.096, 16.384];

/// Longest time that changes may wait for a write: twice kube-proxy's default sync period, as there.
const PENDING_MAX: Duration = Duration::from_secs(60);

/// Changes of the objects of a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// All since the start.
    pub(crate) total: u64,
    /// Those that are not written yet.
    pub(crate) pending: u64,
}

/// Reason for which the agent resumed after a restore of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResumeReason {
    /// `cproxy reseed`.
    Reseed,
    /// A sign that the agent has seen itself.
    Sign(RestoreSign),
}

impl ResumeReason {
    /// All reasons.
    const ALL: [Self; 4] = [
        Self::Reseed,
        Self::Sign(RestoreSign::NewGeneration),
        Self::Sign(RestoreSign::ClockStep),
        Self::Sign(RestoreSign::ConnectionLost),
    ];

    /// Value of the metric's label.
    fn label(self) -> &'static str {
        match self {
            Self::Reseed => "reseed",
            Self::Sign(RestoreSign::NewGeneration) => "new_generation",
            Self::Sign(RestoreSign::ClockStep) => "clock_step",
            Self::Sign(RestoreSign::ConnectionLost) => "connection_lost",
        }
    }
}

/// Measures since the agent's start.
#[derive(Clone, Debug)]
pub(crate) struct Measures {
    /// Durations of all writes of the table, and of those of the whole table.
    pub(crate) syncs: Histogram<8>,
    pub(crate) full_syncs: Histogram<8>,
    pub(crate) services: Changes,
    pub(crate) endpoints: Changes,
    /// Times of the last change, and of the last write that succeeded.
    pub(crate) last_queued: Option<SystemTime>,
    pub(crate) last_sync: Option<SystemTime>,
    pub(crate) write_failures: u64,
    /// Time since which changes wait.
    waiting_since: Option<Instant>,
    resumes: [u64; ResumeReason::ALL.len()],
}

impl Default for Measures {
    fn default() -> Self {
        Self {
            syncs: Histogram::new(&SYNC_BOUNDS),
            full_syncs: Histogram::new(&SYNC_BOUNDS),
            services: Changes::default(),
            endpoints: Changes::default(),
            last_queued: None,
            last_sync: None,
            write_failures: 0,
            waiting_since: None,
            resumes: Default::default(),
        }
    }
}

impl Measures {
    /// Counts events that have arrived.
    pub(crate) fn queue(&mut self, events: &[Event]) {
        for event in events {
            let kind = event.changed_kind();
            let changes = match kind {
                Some(ResourceKind::Services) => &mut self.services,
                Some(ResourceKind::EndpointSlices) => &mut self.endpoints,
                Some(ResourceKind::Nodes) | None => continue,
            };
            changes.total += 1;
            changes.pending += 1;
            self.last_queued = Some(SystemTime::now());
            self.waiting_since.get_or_insert_with(Instant::now);
        }
    }

    /// Counts a write of the table that succeeded.
    pub(crate) fn end_sync(&mut self, took: Duration, is_full: bool) {
        self.syncs.observe(took.as_secs_f64());
        if is_full {
            self.full_syncs.observe(took.as_secs_f64());
        }
        (self.services.pending, self.endpoints.pending) = (0, 0);
        self.waiting_since = None;
        self.last_sync = Some(SystemTime::now());
    }

    /// Counts a resumption.
    pub(crate) fn resume(&mut self, reason: ResumeReason) {
        let counts = ResumeReason::ALL.into_iter().zip(&mut self.resumes);
        counts.filter(|(other, _)| *other == reason).for_each(|(_, count)| *count += 1);
    }

    /// Numbers of resumptions by the label of their reason.
    pub(crate) fn resumes(&self) -> impl Iterator<Item = (&'static str, u64)> {
        ResumeReason::ALL.into_iter().map(ResumeReason::label).zip(self.resumes)
    }

    /// Whether no change waits for too long. As in kube-proxy, that is so until the first write.
    pub(crate) fn is_healthy(&self) -> bool {
        self.last_sync.is_none() || self.waiting_since.is_none_or(|since| since.elapsed() < PENDING_MAX)
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::ObjectName;

    use super::*;

    fn deleted(kind: ResourceKind) -> Event {
        Event::Deleted(kind, ObjectName { namespace: "default".into(), name: "web".into() })
    }

    #[test]
    fn changes_wait_until_they_are_written() {
        let mut measures = Measures::default();
        measures.queue(&[
            Event::ListStarted(ResourceKind::Services),
            deleted(ResourceKind::Services),
            deleted(ResourceKind::EndpointSlices),
            deleted(ResourceKind::Services),
        ]);
        assert_eq!(measures.services, Changes { total: 2, pending: 2 });
        assert_eq!(measures.endpoints, Changes { total: 1, pending: 1 });
        measures.end_sync(Duration::from_millis(2), true);
        assert_eq!(measures.services, Changes { total: 2, pending: 0 });
        assert_eq!(measures.endpoints, Changes { total: 1, pending: 0 });
    }

    #[test]
    fn changes_that_wait_too_long_are_unhealthy_after_the_first_write() {
        let mut measures = Measures::default();
        measures.queue(&[deleted(ResourceKind::Services)]);
        let long_ago = Instant::now().checked_sub(PENDING_MAX);
        measures.waiting_since = long_ago;
        assert!(measures.is_healthy(), "it starts");
        measures.end_sync(Duration::ZERO, false);
        measures.queue(&[deleted(ResourceKind::Services)]);
        assert!(measures.is_healthy());
        measures.waiting_since = long_ago;
        measures.queue(&[deleted(ResourceKind::Services)]);
        assert!(!measures.is_healthy(), "the oldest change counts");
        measures.end_sync(Duration::ZERO, false);
        assert!(measures.is_healthy());
    }

    #[test]
    fn resumptions_are_counted_by_reason() {
        let mut measures = Measures::default();
        measures.resume(ResumeReason::Reseed);
        measures.resume(ResumeReason::Sign(RestoreSign::ClockStep));
        measures.resume(ResumeReason::Sign(RestoreSign::ClockStep));
        let expected = [("reseed", 1), ("new_generation", 0), ("clock_step", 2), ("connection_lost", 0)];
        assert_eq!(measures.resumes().collect::<Vec<_>>(), expected);
    }
}
