//! Answers of the API server about tokens, and the results for clients.

use std::{sync::Arc, time::Duration};

use tokio::sync::watch;

use crate::{Identity, Reason, Refusal};

/// Result for a client.
pub(super) type Outcome = Result<Arc<Identity>, Refusal>;
/// Result of a review once there is one.
pub(super) type Flight = watch::Receiver<Option<Outcome>>;

/// Answer to a review.
pub(super) enum Answer {
    Accepted(Arc<Identity>),
    Refused(Refusal),
    /// No answer to this review.
    Failed(Refusal),
    /// The API server cannot be reached.
    Unreachable(Refusal),
    /// Its turn did not come.
    NoTurn,
}

pub(super) fn refused(why: &str) -> Refusal {
    let why = if why.is_empty() { String::new() } else { format!(" ({why})") };
    let message = format!(
        "the API server refuses the token{why}; it is wrong, has expired, or its account or pod is deleted: send the \
         current token"
    );
    Refusal::new(Reason::TokenRefused, message)
}

pub(super) fn unavailable(why: &str) -> Refusal {
    let why = if why.is_empty() { "the API server does not review tokens" } else { why };
    let message = format!("the token is not known yet and cannot be reviewed now: {why}; try again");
    Refusal::new(Reason::ReviewsUnavailable, message).retry_after(Duration::from_secs(1))
}

pub(super) fn too_many_reviews() -> Refusal {
    let message = "too many tokens wait for a review by the API server; try again";
    Refusal::new(Reason::TooManyReviews, message).retry_after(Duration::from_secs(5))
}

pub(super) fn too_many_tokens(time: Duration) -> Refusal {
    let message = "too many tokens from here are refused or wait for a review; send the current token, and try again";
    Refusal::new(Reason::TooManyTokens, message).retry_after(time)
}
