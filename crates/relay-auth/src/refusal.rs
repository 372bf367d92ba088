//! Refusals of clients.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// Reason of a refusal, as a counter's label has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The client shows no credentials, or none that the relay takes.
    NoCredentials,
    /// The client certificate names no user.
    Certificate,
    /// The token cannot be one.
    MalformedToken,
    /// The API server does not know the token, or no longer.
    TokenRefused,
    /// No view matches the client.
    NoView,
    /// The view shows the client's own namespace, and the client has none.
    NoNamespace,
    /// The view gives the client its own pod's network policy, or its node's, and the client has none.
    NoPod,
    /// The view gives the client no network policy.
    NoPolicy,
    /// Too many unknown tokens from where the client is.
    TooManyTokens,
    /// Too many tokens wait for a review.
    TooManyReviews,
    /// The API server does not review tokens.
    ReviewsUnavailable,
}

impl Reason {
    /// All reasons, so that a counter of each exists from the start.
    pub const ALL: [Self; 11] = [
        Self::NoCredentials,
        Self::Certificate,
        Self::MalformedToken,
        Self::TokenRefused,
        Self::NoView,
        Self::NoNamespace,
        Self::NoPod,
        Self::NoPolicy,
        Self::TooManyTokens,
        Self::TooManyReviews,
        Self::ReviewsUnavailable,
    ];

    /// Value of the label `reason`.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::NoCredentials => "no_credentials",
            Self::Certificate => "certificate",
            Self::MalformedToken => "malformed_token",
            Self::TokenRefused => "token_refused",
            Self::NoView => "no_view",
            Self::NoNamespace => "no_namespace",
            Self::NoPod => "no_pod",
            Self::NoPolicy => "no_policy",
            Self::TooManyTokens => "too_many_tokens",
            Self::TooManyReviews => "too_many_reviews",
            Self::ReviewsUnavailable => "reviews_unavailable",
        }
    }

    /// Status of the HTTP response.
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            Self::NoCredentials | Self::Certificate | Self::MalformedToken | Self::TokenRefused => 401,
            Self::NoView | Self::NoNamespace | Self::NoPod | Self::NoPolicy => 403,
            Self::TooManyTokens | Self::TooManyReviews => 429,
            Self::ReviewsUnavailable => 503,
        }
    }
}

/// Refusal of a client, explained. It never contains a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    reason: Reason,
    message: Arc<str>,
    retry_after: Option<Duration>,
}

impl Refusal {
    pub(crate) fn new(reason: Reason, message: impl Into<Arc<str>>) -> Self {
        Self { reason, message: message.into(), retry_after: None }
    }

    pub(crate) fn retry_after(self, retry_after: Duration) -> Self {
        Self { retry_after: Some(retry_after), ..self }
    }

    /// Reason, for counters.
    #[must_use]
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// Status of the HTTP response.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.reason.status()
    }

    /// Explanation in one line.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Time after which another attempt makes sense, in whole seconds for the header `Retry-After`; `None` if only a
    /// change of credentials or configuration helps.
    #[must_use]
    pub fn retry_after_seconds(&self) -> Option<u64> {
        self.retry_after.map(|time| time.as_secs().saturating_add(u64::from(time.subsec_nanos() > 0)).max(1))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Refusal {}

/// Number of refusals for each reason.
#[derive(Debug, Default)]
pub struct RefusalCounters([AtomicU64; Reason::ALL.len()]);

impl RefusalCounters {
    /// Counts a refusal.
    pub fn count(&self, refusal: &Refusal) {
        if let Some(counter) = self.0.get(refusal.reason as usize) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Each reason with its number.
    pub fn iter(&self) -> impl Iterator<Item = (Reason, u64)> {
        Reason::ALL.into_iter().zip(&self.0).map(|(reason, counter)| (reason, counter.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_reason_has_a_label_and_a_counter() {
        let counters = RefusalCounters::default();
        for (index, reason) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, index, "{reason:?}");
            counters.count(&Refusal::new(reason, "no"));
        }
        assert!(counters.iter().all(|(_, count)| count == 1));
        assert_eq!(counters.iter().map(|(reason, _)| reason.label()).collect::<BTreeSet<_>>().len(), 11);
    }

    #[test]
    fn the_time_for_another_attempt_is_rounded_up() {
        let refusal = Refusal::new(Reason::NoView, "no");
        assert_eq!(refusal.retry_after_seconds(), None);
        for (milliseconds, seconds) in [(0, 1), (1, 1), (1000, 1), (1001, 2)] {
            let refusal = refusal.clone().retry_after(Duration::from_millis(milliseconds));
            assert_eq!(refusal.retry_after_seconds(), Some(seconds), "{milliseconds} ms");
        }
    }
}
