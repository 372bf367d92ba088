//! Bound on the requests of a connection, or of a client.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Requests of one guest that pass at once, and the time after which one more does.
pub(crate) const REQUESTS_BURST: u32 = 200;
pub(crate) const REQUEST_INTERVAL: Duration = Duration::from_millis(50);

/// Time of a burst.
const BURST: Duration = Duration::from_millis(50 * REQUESTS_BURST as u64);

/// Requests so far, of as many guests as share the bound.
#[derive(Debug)]
pub(crate) struct RequestLimit {
    guests: u32,
    /// Time at which the next request would be due if there were no burst.
    due: Mutex<Instant>,
}

impl RequestLimit {
    pub(crate) fn new(guests: u32) -> Self {
        Self { guests, due: Mutex::new(Instant::now()) }
    }

    pub(crate) fn guests(&self) -> u32 {
        self.guests
    }

    /// Counts a request that costs as much as some others. Returns false if there were too many.
    pub(crate) fn admits(&self, cost: u32) -> bool {
        let (mut due, now) = (self.due.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
        let next = (*due).max(now);
        let is_admitted = next.saturating_duration_since(now) < BURST;
        if is_admitted {
            *due = next + REQUEST_INTERVAL * cost / self.guests;
        }
        is_admitted
    }

    /// Whether a whole burst would pass now.
    pub(crate) fn is_whole(&self, now: Instant) -> bool {
        *self.due.lock().unwrap_or_else(PoisonError::into_inner) <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn requests_pass_up_to_a_burst_and_then_at_a_rate_by_their_cost() {
        let limit = RequestLimit::new(1);
        let admitted = |cost| (0..1_000).take_while(|_| limit.admits(cost)).count();
        assert_eq!(admitted(1), REQUESTS_BURST as usize);
        tokio::time::advance(REQUEST_INTERVAL * 20).await;
        assert_eq!(admitted(10), 2);
        // A request that costs more than the whole burst passes, too, and all others wait for it.
        tokio::time::advance(REQUEST_INTERVAL * REQUESTS_BURST).await;
        assert_eq!(admitted(2 * REQUESTS_BURST), 1);
        tokio::time::advance(REQUEST_INTERVAL * REQUESTS_BURST).await;
        assert_eq!(admitted(1), 0);
        assert!(!limit.is_whole(Instant::now()));
        tokio::time::advance(REQUEST_INTERVAL).await;
        assert_eq!(admitted(1), 1);
    }
}
