//! Pauses between requests that fail.

use std::time::Duration;

use tokio::time::Instant;

/// Longest pause, without its jitter.
const LONGEST: Duration = Duration::from_secs(30);

/// Time without a failure after which pauses are short again, as in client-go. A success does not reset them, because
/// lists may succeed while the server calls every watch too old.
const RESET: Duration = Duration::from_secs(120);

/// Exponential back-off with jitter.
#[derive(Debug)]
pub(super) struct Backoff {
    first: Duration,
    next: Duration,
    last: Option<Instant>,
}

impl Backoff {
    /// A back-off whose first pause is from `first` to twice that.
    pub(super) fn new(first: Duration) -> Self {
        Self { first, next: first, last: None }
    }

    /// The next pause. Up to half of it is jitter, so that many agents that fail together do not retry together.
    pub(super) fn next(&mut self) -> Duration {
        let now = Instant::now();
        if self.last.is_some_and(|last| now.saturating_duration_since(last) > RESET) {
            self.next = self.first;
        }
        let pause = self.next;
        self.next = (pause * 2).min(LONGEST);
        let pause = pause + jitter(pause);
        self.last = Some(now + pause);
        pause
    }
}

/// Random duration of less than `longest`.
#[must_use]
pub fn jitter(longest: Duration) -> Duration {
    let mut bytes = [0; 2];
    // Early in a boot there may be no random numbers, hence no jitter.
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK).ok();
    longest * u32::from(u16::from_ne_bytes(bytes)) / (1 << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pauses_double_up_to_a_bound_until_nothing_has_failed_for_a_while() {
        let mut backoff = Backoff::new(Duration::from_millis(800));
        for _ in 0..2 {
            for millis in [800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000] {
                let (least, pause) = (Duration::from_millis(millis), backoff.next());
                assert!((least..least * 2).contains(&pause), "{pause:?} is not from {least:?} on");
                // Attempts that fail late still count as failures in a row.
                tokio::time::sleep(pause + RESET - Duration::from_millis(10)).await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
