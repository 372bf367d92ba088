//! Failures of one server, and the time for which they put it on hold.

use std::time::{Duration, Instant};

use cproxy_core::sort_few_by;

/// Time after a failure before the client goes back to a preferred server. It doubles if that server fails again soon.
pub(super) const FAILOVER_HOLD: Duration = Duration::from_secs(60);
pub(super) const FAILOVER_HOLD_MAX: Duration = Duration::from_secs(3600);

/// Last failure of a server, and the time for which it is on hold since then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Health {
    failed_at: Option<Instant>,
    hold: Duration,
}

impl Health {
    /// Records a failure of a server that has served for this long.
    pub(super) fn record_failure(&mut self, now: Instant, served: Duration) {
        let is_fresh = self.hold.is_zero() || served > self.hold;
        self.hold = if is_fresh { FAILOVER_HOLD } else { (self.hold * 2).min(FAILOVER_HOLD_MAX) };
        self.failed_at = Some(now);
    }

    /// Whether the server may be preferred: it is not on hold.
    pub(super) fn is_good(&self, now: Instant) -> bool {
        self.failed_at.is_none_or(|at| now.saturating_duration_since(at) >= self.hold)
    }
}

/// Order in which servers are tried: good ones by preference, then those on hold, the one that failed first to begin
/// with.
pub(super) fn order(health: &[Health], now: Instant) -> Vec<usize> {
    let mut order: Vec<usize> = (0..health.len()).collect();
    let failed = |index: usize| health.get(index).filter(|health| !health.is_good(now))?.failed_at;
    sort_few_by(&mut order, |&a, &b| failed(a).cmp(&failed(b)));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn servers_that_failed_are_tried_last_and_preferred_again_after_a_while() {
        let start = Instant::now();
        let mut health = [Health::default(); 3];
        assert_eq!(order(&health, start), [0, 1, 2]);
        health[0].record_failure(start, seconds(0));
        health[1].record_failure(start + seconds(1), seconds(0));
        assert_eq!(order(&health, start + seconds(2)), [2, 0, 1], "the first failure is the oldest");
        assert_eq!(order(&health, start + FAILOVER_HOLD), [0, 2, 1]);
        assert_eq!(order(&health, start + FAILOVER_HOLD + seconds(1)), [0, 1, 2]);
    }

    #[test]
    fn a_server_that_fails_again_soon_is_left_alone_for_longer() {
        let (start, mut health) = (Instant::now(), Health::default());
        health.record_failure(start, seconds(10_000));
        assert_eq!(health.hold, FAILOVER_HOLD);
        health.record_failure(start, seconds(30));
        assert_eq!(health.hold, FAILOVER_HOLD * 2);
        (0..20).for_each(|_| health.record_failure(start, seconds(30)));
        assert_eq!(health.hold, FAILOVER_HOLD_MAX);
        health.record_failure(start, FAILOVER_HOLD_MAX + seconds(1));
        assert_eq!(health.hold, FAILOVER_HOLD);
    }
}
