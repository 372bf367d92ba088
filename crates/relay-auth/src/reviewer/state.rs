//! Answers about tokens, and reviews under way.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{sync::Semaphore, time::Instant};

use super::{
    origins::Origins,
    outcome::{Answer, Flight, Outcome, too_many_reviews, too_many_tokens, unavailable},
    settings::ReviewSettings,
    table::Table,
};
use crate::{Identity, Origin, Refusal, token::TokenKey};

/// Number of reviews in a row that did not reach the API server after which others are not tried for a while.
const FAILURES_MAX: u32 = 2;
/// Time for which no others are tried then.
const PAUSE: Duration = Duration::from_secs(1);
/// Time for which the API server counts as working after an answer: what fails then is the token's fault.
const WORKS: Duration = Duration::from_secs(10);

/// Numbers of reviews and of answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReviewCounts {
    /// Reviews that were asked for.
    pub reviews: u64,
    /// Reviews without an answer.
    pub errors: u64,
    /// Requests whose token was known to be good.
    pub known: u64,
    /// Requests whose token was known to be refused.
    pub known_refused: u64,
    /// Requests that an older good answer was used for, because there was no new one.
    pub stale: u64,
    /// Good answers that are kept.
    pub accepted_entries: usize,
    /// Refusals that are kept.
    pub refused_entries: usize,
    /// Tokens whose review waits or is under way.
    pub under_way: usize,
}

/// All that is known about tokens.
#[derive(Debug)]
pub(super) struct State {
    accepted: Table<TokenKey, Accepted>,
    refused: Table<TokenKey, Refused>,
    flights: HashMap<TokenKey, Flight>,
    /// Bytes of the tokens under way.
    flights_bytes: usize,
    origins: Origins,
    /// Earliest start of another review.
    next_start: Option<Instant>,
    failures_in_a_row: u32,
    last_answer: Option<Instant>,
    /// End of the pause after failures, and the last one.
    paused: Option<(Instant, Refusal)>,
    counts: ReviewCounts,
}

/// Good answer.
#[derive(Debug)]
struct Accepted {
    identity: Arc<Identity>,
    fresh_until: Instant,
    /// End of its use while the API server cannot be reached.
    stale_until: Instant,
    /// Time of the next attempt after a failed review.
    retry_at: Option<Instant>,
}

/// Bad answer.
#[derive(Debug)]
struct Refused {
    refusal: Refusal,
    until: Instant,
}

/// Start of a request, as the tables have it.
pub(super) enum Begun {
    /// The result.
    Done(Outcome),
    /// A review under way, and the identity if no result comes soon.
    Wait { flight: Flight, stale: Option<Arc<Identity>> },
}

impl State {
    pub(super) fn new(settings: &ReviewSettings) -> Self {
        Self {
            accepted: Table::new(settings.accepted_max, settings.accepted_bytes_max),
            refused: Table::new(settings.refused_max, usize::MAX),
            flights: HashMap::new(),
            flights_bytes: 0,
            origins: Origins::new(),
            next_start: None,
            failures_in_a_row: 0,
            last_answer: None,
            paused: None,
            counts: ReviewCounts::default(),
        }
    }

    pub(super) fn counts(&self) -> ReviewCounts {
        ReviewCounts {
            accepted_entries: self.accepted.len(),
            refused_entries: self.refused.len(),
            under_way: self.flights.len(),
            ..self.counts
        }
    }

    /// Result or review of a token that there already is, or what a pause leaves.
    pub(super) fn find(&mut self, key: TokenKey, settings: &ReviewSettings) -> Option<Begun> {
        let now = Instant::now();
        if let Some(accepted) = self.accepted.get(&key) {
            let identity = accepted.identity.clone();
            if now < accepted.fresh_until {
                self.counts.known += 1;
                return Some(Begun::Done(Ok(identity)));
            }
            if now < accepted.stale_until && accepted.retry_at.is_some_and(|retry_at| now < retry_at) {
                return Some(Begun::Done(Ok(self.use_stale(identity))));
            }
        }
        if let Some(Refused { refusal, .. }) = self.refused.get(&key).filter(|refused| now < refused.until) {
            self.counts.known_refused += 1;
            return Some(Begun::Done(Err(refusal.clone())));
        }
        if let Some(flight) = self.flights.get(&key) {
            return Some(Begun::Wait { flight: flight.clone(), stale: self.stale(key) });
        }
        let (_, refusal) = self.paused.clone().filter(|(until, _)| now < *until)?;
        Some(Begun::Done(self.failed(key, refusal, settings)))
    }

    /// Older good answer that may still be used.
    pub(super) fn stale(&self, key: TokenKey) -> Option<Arc<Identity>> {
        let accepted = self.accepted.get(&key).filter(|accepted| Instant::now() < accepted.stale_until);
        accepted.map(|accepted| accepted.identity.clone())
    }

    pub(super) fn use_stale(&mut self, identity: Arc<Identity>) -> Arc<Identity> {
        self.counts.stale += 1;
        identity
    }

    /// Lets a review begin, if the limits allow it. Returns the permits of the origin.
    pub(super) fn admit(
        &mut self,
        key: TokenKey,
        origin: Option<&Origin>,
        length: usize,
        flight: Flight,
        settings: &ReviewSettings,
    ) -> Result<Option<Arc<Semaphore>>, Refusal> {
        let is_full = self.flights.len() >= settings.tokens_max
            || self.flights_bytes.saturating_add(length) > settings.tokens_bytes_max;
        if is_full {
            return Err(too_many_reviews());
        }
        let running = origin.map(|origin| self.origins.begin(origin, Instant::now()).map_err(too_many_tokens));
        let running = running.transpose()?;
        self.flights_bytes += length;
        self.flights.insert(key, flight);
        Ok(running)
    }

    /// Forgets a review that has ended.
    pub(super) fn end(&mut self, key: TokenKey, origin: Option<&Origin>, length: usize) {
        self.flights.remove(&key);
        self.flights_bytes = self.flights_bytes.saturating_sub(length);
        if let Some(origin) = origin {
            self.origins.end(origin);
        }
    }

    /// Time at which another review may start.
    pub(super) fn next_start(&mut self, settings: &ReviewSettings) -> Instant {
        let now = Instant::now();
        let start = self.next_start.map_or(now, |start| now.max(start));
        self.next_start = Some(start + Duration::from_secs(1) / settings.reviews_per_second.max(1));
        start
    }

    pub(super) fn count_review(&mut self) {
        self.counts.reviews += 1;
    }

    /// Learns from an answer. Returns what the clients get that wait for it.
    pub(super) fn learn(
        &mut self,
        key: TokenKey,
        origin: Option<Origin>,
        answer: Answer,
        expires: Option<Instant>,
        settings: &ReviewSettings,
    ) -> Outcome {
        let now = Instant::now();
        match answer {
            Answer::Accepted(identity) => {
                self.answered();
                self.accept(key, identity.clone(), expires, settings);
                Ok(identity)
            }
            Answer::Refused(refusal) => {
                self.answered();
                self.accepted.remove(&key);
                self.refused.remove_oldest_while(|refused| refused.until <= now);
                let until = now + settings.refused_for;
                self.refused.insert(key, Refused { refusal: refusal.clone(), until }, 0);
                if let Some(origin) = origin {
                    self.origins.refused(origin, now);
                }
                Err(refusal)
            }
            Answer::Failed(refusal) => {
                self.counts.errors += 1;
                let works = self.last_answer.is_some_and(|at| now.saturating_duration_since(at) < WORKS);
                if let Some(origin) = origin.filter(|_| works) {
                    self.origins.refused(origin, now);
                }
                self.failed(key, refusal, settings)
            }
            Answer::Unreachable(refusal) => {
                self.counts.errors += 1;
                self.failures_in_a_row = self.failures_in_a_row.saturating_add(1);
                if self.failures_in_a_row >= FAILURES_MAX {
                    self.paused = Some((now + PAUSE, refusal.clone()));
                }
                self.failed(key, refusal, settings)
            }
            // Behind reviews that fail, a turn comes late.
            Answer::NoTurn if self.failures_in_a_row >= FAILURES_MAX => {
                self.failed(key, unavailable("the API server has not answered other reviews"), settings)
            }
            Answer::NoTurn => Err(too_many_reviews()),
        }
    }

    fn answered(&mut self) {
        self.failures_in_a_row = 0;
        self.last_answer = Some(Instant::now());
        self.paused = None;
    }

    fn accept(&mut self, key: TokenKey, identity: Arc<Identity>, expires: Option<Instant>, settings: &ReviewSettings) {
        let now = Instant::now();
        let capped = |time: Instant| expires.map_or(time, |expires| time.min(expires));
        let fresh_until = capped(now + settings.accepted_for);
        let stale_until = capped(now + settings.accepted_for + settings.stale_for);
        self.refused.remove(&key);
        self.accepted.remove_oldest_while(|accepted| accepted.stale_until <= now);
        if now < fresh_until {
            let cost = identity.size_bytes();
            self.accepted.insert(key, Accepted { identity, fresh_until, stale_until, retry_at: None }, cost);
        } else {
            self.accepted.remove(&key);
        }
    }

    /// Result without a review: an older good answer, which is then used for a while.
    fn failed(&mut self, key: TokenKey, refusal: Refusal, settings: &ReviewSettings) -> Outcome {
        let now = Instant::now();
        let accepted = self.accepted.get_mut(&key).filter(|accepted| now < accepted.stale_until);
        let Some(accepted) = accepted else { return Err(refusal) };
        accepted.retry_at = Some(now + settings.stale_retry);
        let identity = accepted.identity.clone();
        Ok(self.use_stale(identity))
    }
}
