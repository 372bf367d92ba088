//! Tokens, reviewed by the API server and remembered for a while.
//!
//! Each token has one review under way at most. Reviews run to their end even if the client leaves, so that a client
//! that returns finds the answer. All is bounded: reviews at once and for each second, those that wait, those for each
//! origin, and the answers that are kept. Refused tokens are kept apart, so that no number of them displaces an answer
//! for a client in good standing.

mod origins;
mod outcome;
mod settings;
mod state;
mod table;

use std::{
    fmt, iter,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use cproxy_secrets::{PIECE_BYTES, hidden_with};
use tokio::{
    sync::{Semaphore, SemaphorePermit, watch},
    time::{Instant, sleep_until, timeout},
};

use self::{
    outcome::{Answer, Flight, Outcome, refused, unavailable},
    state::{Begun, State},
};
pub use self::{settings::ReviewSettings, state::ReviewCounts};
use crate::{
    Origin, PeerAddress, Review,
    review::{ReviewError, parse_review, review_body, short},
    token::{Token, TokenKey},
};

/// The way to the API server.
pub trait ReviewTransport: Send + Sync + 'static {
    /// Reason why there is no response, without the request's body.
    type Error: fmt::Display + Send;

    /// Posts a TokenReview as JSON to `/apis/authentication.k8s.io/v1/tokenreviews`. Returns status and body of the
    /// response.
    fn review(&self, body: Bytes) -> impl Future<Output = Result<(u16, Bytes), Self::Error>> + Send;
}

/// Turns tokens into identities.
pub struct TokenReviewer<R> {
    shared: Arc<Shared<R>>,
}

struct Shared<R> {
    transport: R,
    settings: ReviewSettings,
    permits: Semaphore,
    state: Mutex<State>,
}

/// Shortest part of a token between dots that is removed from texts of its own.
const PART_BYTES_MIN: usize = 8;

impl<R: ReviewTransport> TokenReviewer<R> {
    /// Reviewer that knows no token yet.
    pub fn new(transport: R, settings: ReviewSettings) -> Self {
        let (permits, state) = (Semaphore::new(settings.reviews_max), Mutex::new(State::new(&settings)));
        Self { shared: Arc::new(Shared { transport, settings, permits, state }) }
    }

    /// Identity of a token that a client has sent from `peer`.
    ///
    /// # Errors
    /// The token is refused, or cannot be reviewed now.
    pub async fn authenticate(&self, token: &str, peer: &PeerAddress) -> Outcome {
        let token = Token::new(token)?;
        let key = token.key();
        match self.begin(token, key, peer) {
            Begun::Done(outcome) => outcome,
            Begun::Wait { flight, stale: None } => wait(flight).await,
            Begun::Wait { flight, stale: Some(identity) } => {
                match timeout(self.shared.settings.stale_wait, wait(flight)).await {
                    Ok(outcome) => outcome,
                    Err(_) => Ok(self.shared.state().use_stale(identity)),
                }
            }
        }
    }

    /// Numbers so far.
    #[must_use]
    pub fn counts(&self) -> ReviewCounts {
        self.shared.state().counts()
    }

    /// Looks a token up, and starts its review if there is none.
    fn begin(&self, token: Token<'_>, key: TokenKey, peer: &PeerAddress) -> Begun {
        let shared = &self.shared;
        let mut state = shared.state();
        if let Some(begun) = state.find(key, &shared.settings) {
            return begun;
        }
        let stale = state.stale(key);
        // A token that was good is not one of a flood.
        let origin = stale.is_none().then(|| Origin::from(peer));
        let (sender, flight) = watch::channel(None);
        let length = token.text().len();
        let running = match state.admit(key, origin.as_ref(), length, flight.clone(), &shared.settings) {
            Ok(running) => running,
            Err(refusal) => return Begun::Done(Err(refusal)),
        };
        drop(state);
        let body = review_body(token.text(), &shared.settings.audiences);
        let under_way = UnderWay { shared: shared.clone(), key, origin, running, length, sender };
        tokio::spawn(under_way.run(body, SecretText(token.text().into()), token.remaining()));
        Begun::Wait { flight, stale }
    }
}

/// The result of a review.
async fn wait(mut flight: Flight) -> Outcome {
    let outcome = flight.wait_for(Option::is_some).await.ok().and_then(|outcome| outcome.clone());
    outcome.unwrap_or_else(|| Err(unavailable("the review was aborted")))
}

impl<R> Shared<R> {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until another review may start, after those of its origin.
    async fn turn<'a>(
        &'a self,
        of_origin: Option<&'a Semaphore>,
    ) -> Option<(Option<SemaphorePermit<'a>>, SemaphorePermit<'a>)> {
        let own = match of_origin {
            Some(running) => Some(running.acquire().await.ok()?),
            None => None,
        };
        let permit = self.permits.acquire().await.ok()?;
        let start = self.state().next_start(&self.settings);
        if start > Instant::now() {
            sleep_until(start).await;
        }
        Some((own, permit))
    }
}

/// A review that waits or runs.
struct UnderWay<R> {
    shared: Arc<Shared<R>>,
    key: TokenKey,
    /// Origin of the client, if the token was not known.
    origin: Option<Origin>,
    /// Permits of its reviews.
    running: Option<Arc<Semaphore>>,
    /// Bytes of the token.
    length: usize,
    sender: watch::Sender<Option<Outcome>>,
}

/// Token as long as its review is under way.
struct SecretText(Box<str>);

impl<R> Drop for UnderWay<R> {
    fn drop(&mut self) {
        self.shared.state().end(self.key, self.origin.as_ref(), self.length);
    }
}

impl<R: ReviewTransport> UnderWay<R> {
    async fn run(self, body: Bytes, token: SecretText, remaining: Option<Duration>) {
        let settings = &self.shared.settings;
        let turn = timeout(settings.queue_wait, self.shared.turn(self.running.as_deref())).await;
        let answer = match &turn {
            Ok(Some(_)) => self.review(body, &token).await,
            Ok(None) | Err(_) => Answer::NoTurn,
        };
        let remaining = remaining.map(|time| Instant::now() + time);
        let outcome = self.shared.state().learn(self.key, self.origin.clone(), answer, remaining, settings);
        // Without a receiver, all clients have left.
        self.sender.send_replace(Some(outcome));
    }

    async fn review(&self, body: Bytes, token: &SecretText) -> Answer {
        let settings = &self.shared.settings;
        self.shared.state().count_review();
        let response = timeout(settings.review_timeout, self.shared.transport.review(body)).await;
        let review = match response {
            Ok(Ok((status, body))) => parse_review(status, &body, &settings.audiences),
            Ok(Err(error)) => {
                let error = format!("the API server does not review tokens: {}", short(&error.to_string()));
                return Answer::Unreachable(unavailable(&token.hidden_from(&error)));
            }
            Err(_) => Err(ReviewError::Silent),
        };
        match review {
            Ok(Review::Authenticated(identity)) => Answer::Accepted(Arc::new(identity)),
            Ok(Review::Refused(why)) => Answer::Refused(refused(&token.hidden_from(&why))),
            Err(error) => Answer::Failed(unavailable(&token.hidden_from(&error.to_string()))),
        }
    }
}

impl SecretText {
    /// The text without the token and its parts, in any encoding; empty if what is left still has a very short token.
    fn hidden_from(&self, text: &str) -> String {
        // Longer parts are pieces of the token.
        let parts = self.0.split('.').filter(|part| (PART_BYTES_MIN..PIECE_BYTES).contains(&part.len()));
        let clean = hidden_with(text, &iter::once(&*self.0).chain(parts).collect::<Vec<_>>());
        if clean.contains(&*self.0) { String::new() } else { clean }
    }
}

#[cfg(test)]
mod tests;
