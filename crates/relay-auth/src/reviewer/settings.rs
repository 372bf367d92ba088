//! Times and bounds of reviews.

use std::time::Duration;

/// Times and bounds of reviews.
#[derive(Clone, Debug)]
pub struct ReviewSettings {
    /// Audiences that tokens may be for; empty: those of the API server.
    pub audiences: Vec<String>,
    /// Time for which a good answer is used. The token's own expiry may shorten it.
    pub accepted_for: Duration,
    /// Time for which a refusal is used.
    pub refused_for: Duration,
    /// Time for which an older good answer is used while the API server cannot be reached.
    pub stale_for: Duration,
    /// Time until the next attempt for a token whose review has failed.
    pub stale_retry: Duration,
    /// Time that a client with an older good answer waits for a new one.
    pub stale_wait: Duration,
    /// Longest wait for the start of a review.
    pub queue_wait: Duration,
    /// Longest review.
    pub review_timeout: Duration,
    /// Most reviews at once.
    pub reviews_max: usize,
    /// Most reviews that start in a second.
    pub reviews_per_second: u32,
    /// Most tokens whose review waits or is under way.
    pub tokens_max: usize,
    /// Most bytes of these tokens.
    pub tokens_bytes_max: usize,
    /// Most good answers that are kept.
    pub accepted_max: usize,
    /// Most bytes of their identities.
    pub accepted_bytes_max: usize,
    /// Most refusals that are kept.
    pub refused_max: usize,
}

impl Default for ReviewSettings {
    fn default() -> Self {
        Self {
            audiences: Vec::new(),
            accepted_for: Duration::from_mins(2),
            refused_for: Duration::from_secs(10),
            stale_for: Duration::from_hours(1),
            stale_retry: Duration::from_secs(10),
            stale_wait: Duration::from_secs(2),
            queue_wait: Duration::from_secs(10),
            review_timeout: Duration::from_secs(10),
            reviews_max: 64,
            reviews_per_second: 1000,
            tokens_max: 16_384,
            tokens_bytes_max: 64 << 20,
            accepted_max: 65_536,
            accepted_bytes_max: 64 << 20,
            refused_max: 8192,
        }
    }
}
