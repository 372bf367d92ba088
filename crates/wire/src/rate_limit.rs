//! A bound on how often the API server is asked, whatever it answers.
//!
//! There are pauses after errors, but none after a watch that ends in good order or a list that never does: a server,
//! or a proxy before it, that closes each watch at once would be asked thousands of times a second.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::Instant;
use tower::Service;

/// Enough for all kinds to be listed by pages, and more than a healthy server is ever asked for.
const BURST: u32 = 20;
const INTERVAL: Duration = Duration::from_millis(500);

/// Lets requests through at a bounded rate.
#[derive(Clone)]
pub(super) struct RateLimited<S> {
    inner: S,
    pace: Arc<Mutex<Pace>>,
}

struct Pace {
    /// When the next request would be due if there were no burst.
    due: Instant,
    is_slowed: bool,
}

impl<S> RateLimited<S> {
    pub(super) fn new(inner: S) -> Self {
        let pace = Pace { due: Instant::now(), is_slowed: false };
        Self { inner, pace: Arc::new(Mutex::new(pace)) }
    }
}

impl Pace {
    /// How long the next request has to wait.
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
        let mut pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        let pause = pace.pause(Instant::now());
        if !pause.is_zero() && !pace.is_slowed {
            tracing::warn!(
                "the API server ends each request at once; it is asked every {INTERVAL:?} until it does not"
            );
        }
        pace.is_slowed = !pause.is_zero();
        // The one that was polled ready is the one to call.
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
    fn a_burst_passes_and_then_one_at_a_time() {
        let start = Instant::now();
        let mut pace = Pace { due: start, is_slowed: false };
        let free = (0..BURST).filter(|_| pace.pause(start).is_zero()).count();
        assert_eq!(free, BURST as usize, "from the first moment on");
        assert_eq!(pace.pause(start), INTERVAL);
        assert_eq!(pace.pause(start), INTERVAL * 2);
        assert!(pace.pause(start + INTERVAL * 30).is_zero());
    }
}
