//! Rate limit for requests to the API server.
//!
//! There are pauses after errors, but not after the regular end of a watch. Without a limit, a server or proxy that
//! ends each watch at once would get thousands of requests per second.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Requests that pass without a delay: enough for a start, and for watches that move to another connection.
const BURST: u32 = 20;
/// Interval between requests after the burst.
const INTERVAL: Duration = Duration::from_millis(500);

/// Rate limit.
#[derive(Debug)]
pub(crate) struct RateLimit(Mutex<Schedule>);

#[derive(Debug)]
struct Schedule {
    /// Time at which the next request would be due without a burst.
    due: Instant,
    /// The last request was delayed.
    is_slowed: bool,
}

impl RateLimit {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Schedule { due: Instant::now(), is_slowed: false }))
    }

    /// Waits until the next request is due.
    pub(crate) async fn pause(&self) {
        let pause = self.0.lock().unwrap_or_else(PoisonError::into_inner).next();
        tokio::time::sleep(pause).await;
    }
}

impl Schedule {
    /// Delay of the next request. The first delay of a series is logged.
    fn next(&mut self) -> Duration {
        let pause = self.pause(Instant::now());
        if !pause.is_zero() && !self.is_slowed {
            tracing::warn!("the API server ends each request at once: slowing down to one request every {INTERVAL:?}");
        }
        self.is_slowed = !pause.is_zero();
        pause
    }

    /// Delay of a request at this time.
    fn pause(&mut self, now: Instant) -> Duration {
        self.due = self.due.max(now) + INTERVAL;
        self.due.saturating_duration_since(now).saturating_sub(INTERVAL * BURST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_burst_requests_pass_one_at_a_time() {
        let start = Instant::now();
        let mut schedule = Schedule { due: start, is_slowed: false };
        let free = (0..BURST).filter(|_| schedule.pause(start).is_zero()).count();
        assert_eq!(free, BURST as usize, "from the first moment on");
        assert_eq!(schedule.pause(start), INTERVAL);
        assert_eq!(schedule.pause(start), INTERVAL * 2);
        assert!(schedule.pause(start + INTERVAL * 30).is_zero());
    }
}
