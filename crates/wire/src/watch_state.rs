//! How one kind has been doing.

use std::time::Duration;

use super::{
    backoff::{Backoff, jitter},
    decode::Decoded,
    failure::{Again, Step},
    selectors::Selectors,
};

/// The server itself ends each watch after this; what is alive says something before.
pub(super) const WATCH_SECONDS: &str = "290";
const WATCH_SILENCE_MAX: Duration = Duration::from_secs(310);
/// In the middle of a list, a server that is alive hardly pauses at all.
pub(super) const LIST_SILENCE_MAX: Duration = Duration::from_secs(60);

/// After an error; client-go's.
const RETRY_PAUSE: Duration = Duration::from_millis(800);
/// After a watch that was too old, which is no error, but may be one that repeats itself.
const EXPIRED_PAUSE: Duration = Duration::from_millis(250);

/// First pause after a refusal of a kind that the agent can do without; it doubles.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);
const REFUSED_PAUSE_MAX: Duration = Duration::from_secs(300);
const REFUSED_JITTER_MAX: Duration = Duration::from_millis(500);

/// How one kind has been doing.
pub(super) struct WatchState {
    /// From where a watch can go on; nothing: there is no complete list yet.
    pub(super) version: Option<String>,
    pub(super) asks: Asks,
    /// Where a watch has ended in what makes no sense.
    senseless_at: Option<String>,
    is_listed: bool,
    /// Something is in the list so far.
    has_listed_any: bool,
    /// There are objects.
    pub(super) knows: bool,
    retry: Backoff,
    expired: Backoff,
    refused_pause: Duration,
    /// Last warning about a kind that the agent can do without.
    said: Option<String>,
}

/// Features asked of the server. One that it lacks is left out until a list is complete and has been watched; the next
/// list is tried with all of them again, as client-go does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asks {
    /// The list as the start of a watch.
    pub(super) is_streamed: bool,
    /// By fields that spare something.
    pub(super) is_sparing: bool,
}

impl Asks {
    const ALL: Self = Self { is_streamed: true, is_sparing: true };
}

/// One item of a list or watch.
pub(super) enum WatchEvent<K> {
    ListStarted,
    Listed(Decoded<K>),
    /// It has gone while the list was under way.
    Unlisted(Decoded<K>),
    ListDone,
    Applied(Decoded<K>),
    Deleted(Decoded<K>),
}

impl WatchState {
    pub(super) fn new() -> Self {
        Self {
            version: None,
            asks: Asks::ALL,
            senseless_at: None,
            is_listed: false,
            has_listed_any: false,
            knows: false,
            retry: Backoff::new(RETRY_PAUSE),
            expired: Backoff::new(EXPIRED_PAUSE),
            refused_pause: REFUSED_PAUSE,
            said: None,
        }
    }

    /// The present step, or the next one.
    pub(super) fn step(&self) -> Step {
        match (&self.version, self.asks.is_streamed) {
            (Some(_), _) => Step::Watch,
            (None, true) => Step::Stream,
            (None, false) => Step::List,
        }
    }

    /// The selectors of the next request.
    pub(super) fn narrow<'a>(&self, selectors: Selectors<'a>) -> Selectors<'a> {
        if self.asks.is_sparing { selectors } else { selectors.with_all_fields() }
    }

    /// How long a server that is alive may say nothing.
    pub(super) fn silence_max(&self) -> Duration {
        if self.version.is_none() { LIST_SILENCE_MAX } else { WATCH_SILENCE_MAX }
    }

    fn list_anew(&mut self) {
        (self.version, self.asks) = (None, Asks::ALL);
    }

    /// Handles 410: the watch cannot be resumed. Returns the pause before the list.
    pub(super) fn expire(&mut self) -> Duration {
        self.list_anew();
        self.expired.next()
    }

    /// The pause before the next attempt, which is to begin at this place.
    pub(super) fn retry(&mut self, again: Again) -> Duration {
        let is_anew = match again {
            Again::Here => false,
            Again::HereOnce => {
                let is_second = self.senseless_at.is_some() && self.senseless_at == self.version;
                self.senseless_at.clone_from(&self.version);
                is_second
            }
            Again::List => true,
        };
        if is_anew && self.version.is_some() {
            self.list_anew();
        }
        self.retry.next()
    }

    /// The pause before what was refused is asked for again.
    pub(super) fn refused(&mut self) -> Duration {
        let pause = self.refused_pause + jitter(REFUSED_JITTER_MAX);
        self.refused_pause = (self.refused_pause * 2).min(REFUSED_PAUSE_MAX);
        pause
    }

    /// An empty list stands for what is not to be had. Whether it does so for the first time.
    pub(super) fn stand_in(&mut self) -> bool {
        !std::mem::replace(&mut self.is_listed, true)
    }

    pub(super) fn note<K>(&mut self, word: &WatchEvent<K>) {
        match word {
            // Of what the agent can do without there is one.
            WatchEvent::ListStarted | WatchEvent::Unlisted(_) => self.has_listed_any = false,
            WatchEvent::Listed(_) => self.has_listed_any = true,
            WatchEvent::ListDone => (self.is_listed, self.knows) = (true, self.has_listed_any),
            WatchEvent::Applied(_) => self.knows = true,
            WatchEvent::Deleted(_) => self.knows = false,
        }
        // After a list that was not streamed, the watch may still be refused.
        let is_watched = match word {
            WatchEvent::ListStarted | WatchEvent::Listed(_) | WatchEvent::Unlisted(_) => false,
            WatchEvent::ListDone => self.asks.is_streamed,
            WatchEvent::Applied(_) | WatchEvent::Deleted(_) => true,
        };
        if is_watched {
            self.refused_pause = REFUSED_PAUSE;
            self.said = self.said.take().filter(|_| !self.knows);
        }
    }

    /// Says the same once.
    pub(super) fn say(&mut self, message: String) {
        if self.said.as_ref() == Some(&message) {
            tracing::debug!("still {message}");
        } else {
            tracing::warn!("{message}");
            self.said = Some(message);
        }
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::api::Node;

    use super::*;

    fn node() -> Decoded<Node> {
        Decoded::Read(Box::default())
    }

    #[test]
    fn what_is_said_once_is_said_again_after_it_was_mended() {
        let mut state = WatchState::new();
        let mut after = |word| {
            state.said = Some("not permitted".to_owned());
            state.refused_pause = REFUSED_PAUSE_MAX;
            state.note::<Node>(&word);
            (state.said.is_none(), state.refused_pause == REFUSED_PAUSE)
        };
        assert_eq!(after(WatchEvent::ListStarted), (false, false));
        assert_eq!(after(WatchEvent::ListDone), (false, true), "there is no such Node");
        assert_eq!(after(WatchEvent::Applied(node())), (true, true));
        assert_eq!(after(WatchEvent::Listed(node())), (false, false));
        assert_eq!(after(WatchEvent::ListDone), (true, true));
        assert_eq!(after(WatchEvent::Listed(node())), (false, false));
        assert_eq!(after(WatchEvent::Unlisted(node())), (false, false));
        assert_eq!(after(WatchEvent::ListDone), (false, true), "it has gone before the list was complete");
        state.asks.is_streamed = false;
        state.refused_pause = REFUSED_PAUSE_MAX;
        state.note::<Node>(&WatchEvent::ListDone);
        assert_eq!(state.refused_pause, REFUSED_PAUSE_MAX, "the watch may still be refused");
    }

    #[test]
    fn a_list_may_be_silent_for_less_time_than_a_watch() {
        let mut state = WatchState::new();
        assert_eq!(state.silence_max(), LIST_SILENCE_MAX);
        state.version = Some("7".to_owned());
        assert_eq!(state.silence_max(), WATCH_SILENCE_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn the_second_time_at_the_same_place_it_is_listed_anew_and_all_is_asked_for() {
        let less = Asks { is_streamed: false, is_sparing: false };
        let at = |version: &str| Some(version.to_owned());
        let mut state = WatchState { version: at("7"), asks: less, ..WatchState::new() };
        state.retry(Again::HereOnce);
        assert_eq!((state.step(), state.asks), (Step::Watch, less));
        state.version = at("8");
        state.retry(Again::HereOnce);
        assert_eq!(state.version, at("8"), "it has come further");
        state.retry(Again::Here);
        state.retry(Again::HereOnce);
        assert_eq!((state.step(), state.asks), (Step::Stream, Asks::ALL));
        state.asks = less;
        state.retry(Again::HereOnce);
        state.retry(Again::HereOnce);
        state.retry(Again::List);
        assert_eq!(state.asks, less, "until a list is complete, what the server cannot do is not tried again");
    }

    #[tokio::test(start_paused = true)]
    async fn watches_that_are_always_too_old_are_listed_ever_more_seldom() {
        let mut state = WatchState::new();
        let pauses: Vec<_> = (0..9).map(|_| state.expire()).collect();
        assert!(pauses.first().is_some_and(|pause| *pause < EXPIRED_PAUSE * 2), "once is nothing unusual");
        assert!(pauses.last().is_some_and(|pause| *pause >= Duration::from_secs(30)), "{pauses:?}");
    }
}
