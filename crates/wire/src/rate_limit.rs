//! Rate limit for requests to the API server.
//!
//! There are pauses after errors, but not after the regular end of a watch or between the pages of a list. Without a
//! limit, a server or proxy that ends each watch at once would get thousands of requests per second.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::Instant;
use tower::Service;

/// Requests that pass without a delay: enough for a start with lists by pages.
const BURST: u32 = 20;
/// Interval between requests after the burst.
const INTERVAL: Duration = Duration::from_millis(500);

/// Service that passes requests on at a bounded rate.
#[derive(Clone)]
pub(super) struct RateLimited<S> {
    inner: S,
    schedule: Arc<Mutex<Schedule>>,
}

struct Schedule {
    /// Time at which the next request would be due without a burst.
    due: Instant,
    /// The last request was delayed.
    is_slowed: bool,
}

impl<S> RateLimited<S> {
    pub(super) fn new(inner: S) -> Self {
        let schedule = Schedule { due: Instant::now(), is_slowed: false };
        Self { inner, schedule: Arc::new(Mutex::new(schedule)) }
    }
}

impl Schedule {
    /// Delay of the next request.
    fn pause(&mut self, now: Instant) -> Duration {
        self.due = self.due.max(now) + INTERVAL;
        self.due.saturating_duration_since(now).saturating_sub(INTERVAL * BURST)
    }
}

impl<S, Request> Service<Request> for RateLimited<S>
where
    S: Service<Request> + Clone + Send + 'static,
    S::Future: Send,
    Request: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let mut schedule = self.schedule.lock().unwrap_or_else(PoisonError::into_inner);
        let pause = schedule.pause(Instant::now());
        if !pause.is_zero() && !schedule.is_slowed {
            tracing::warn!("the API server ends each request at once: slowing down to one request every {INTERVAL:?}");
        }
        schedule.is_slowed = !pause.is_zero();
        // Only the instance that has returned ready may be called.
        let next = self.inner.clone();
        let mut ready = std::mem::replace(&mut self.inner, next);
        Box::pin(async move {
            tokio::time::sleep(pause).await;
            ready.call(request).await
        })
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
