//! Facts about a resource that outlive the phases of its watch.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    comparison::{BOOKMARK_WATCH_TIME, Comparison},
    confirmation::Confirmation,
};
use crate::{
    backoff::{Backoff, jitter},
    watch::io::{Log, Next},
};

/// First pause after an error, as in client-go.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(800);
/// First pause after a watch that was too old. That is no error in itself, but a server may answer every watch like
/// that.
pub(super) const EXPIRED_PAUSE: Duration = Duration::from_millis(250);

/// Time after which the server ends a watch: this and up to as much again, as in client-go, so that the watches of many
/// agents do not end together.
const WATCH_MIN: Duration = Duration::from_secs(300);

/// Watches that last less and show nothing end at once (client-go/tools/cache/reflector.go 1.36).
const SHORT_WATCH: Duration = Duration::from_secs(1);

/// First pause after the refusal of an optional resource. It doubles with each refusal.
pub(super) const REFUSED_PAUSE: Duration = Duration::from_secs(1);
pub(super) const REFUSED_PAUSE_MAX: Duration = Duration::from_secs(300);
pub(super) const REFUSED_JITTER_MAX: Duration = Duration::from_millis(500);

/// Time over which many agents that list anew spread, for each object of the list and at most. A list costs the API
/// server some 6 us of CPU time for each object, so that it can serve more than a hundred agents with one core.
const SPREAD_PER_OBJECT: Duration = Duration::from_millis(1);
const SPREAD_MAX: Duration = Duration::from_secs(30);

/// Lists that a subscriber needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListPolicy {
    /// Many clients like this one may list at once.
    pub(crate) spreads: bool,
    /// A watch that broke is not resumed: the objects are listed anew.
    pub(crate) after_failure: bool,
    /// The watch expires often, and each time a list follows soon.
    pub(crate) expires_often: bool,
}

/// History of one resource's requests.
pub(crate) struct History {
    /// A list was published: a real one, or an empty one in place of a resource that is not available.
    has_list: bool,
    /// Objects of the resource are known.
    pub(super) has_objects: bool,
    /// Number of objects of the last list.
    pub(super) object_count: u32,
    pub(super) policy: ListPolicy,
    /// Version from which the last bad watch began: one that ended with an error event or unreadable data.
    bad_version: Option<String>,
    pub(super) confirmation: Confirmation,
    pub(super) comparison: Comparison,
    /// The next request, if it is for a watch, is for its bookmark.
    pub(super) wants_bookmark: bool,
    /// Begin of a watch that has shown nothing yet.
    pub(super) watch_since: Option<Instant>,
    /// Pauses after watches that ended at once.
    short: Backoff,
    pub(super) retry: Backoff,
    pub(super) expired: Backoff,
    pub(super) refused_pause: Duration,
    /// Last warning about an optional resource.
    pub(super) warning: Option<String>,
}

impl History {
    pub(crate) fn new(policy: ListPolicy) -> Self {
        Self {
            has_list: false,
            has_objects: false,
            object_count: 0,
            policy,
            bad_version: None,
            confirmation: Confirmation::new(),
            comparison: Comparison::new(),
            wants_bookmark: false,
            watch_since: None,
            short: Backoff::new(RETRY_PAUSE),
            retry: Backoff::new(RETRY_PAUSE),
            expired: Backoff::new(EXPIRED_PAUSE),
            refused_pause: REFUSED_PAUSE,
            warning: None,
        }
    }

    /// Records a complete list. It does not show that the server permits watches, too.
    pub(super) fn record_list(&mut self, object_count: u32) {
        (self.has_list, self.has_objects, self.object_count) = (true, object_count > 0, object_count);
        self.confirmation.record_list();
    }

    /// Time after which the server is asked to end the next watch.
    pub(super) fn watch_time(&self) -> Duration {
        let is_short = self.wants_bookmark || self.comparison.is_requested();
        if is_short { BOOKMARK_WATCH_TIME } else { WATCH_MIN + jitter(WATCH_MIN) }
    }

    /// Records a watch that the server has accepted.
    pub(super) fn begin_watch(&mut self) {
        self.watch_since = Some(Instant::now());
        self.confirmation.record_watch();
    }

    /// Ends a watch in an orderly way. Returns the next request: at once, or after a growing pause if the watch has
    /// lasted less than a second and shown nothing, as in client-go. A server or proxy may end each watch like that.
    pub(super) fn end_watch(&mut self) -> Next {
        match self.watch_since.take() {
            Some(since) if since.elapsed() < SHORT_WATCH => Next::request_after(self.short.next()),
            _ => Next::Request,
        }
    }

    /// Time before the list after a watch that has expired, which grows with each of them.
    pub(super) fn next_expired_pause(&mut self) -> Duration {
        let pause = if self.policy.expires_often { EXPIRED_PAUSE } else { self.expired.next() };
        pause + self.spread()
    }

    /// Random time before a new list, which many agents may need at once.
    pub(super) fn spread(&self) -> Duration {
        if !self.policy.spreads {
            return Duration::ZERO;
        }
        jitter((SPREAD_PER_OBJECT * self.object_count).min(SPREAD_MAX))
    }

    /// Records a change that came in a watch.
    pub(super) fn record_change(&mut self, has_objects: bool) {
        self.has_objects = has_objects;
        self.end_refusals();
    }

    /// Ends a series of refusals. The next refusal is a warning again, unless no object of the resource is known.
    pub(super) fn end_refusals(&mut self) {
        self.refused_pause = REFUSED_PAUSE;
        if self.has_objects {
            self.warning = None;
        }
    }

    /// Records a bad watch. Returns true if the last bad watch began at the same version.
    pub(super) fn record_bad_watch(&mut self, version: &str) -> bool {
        let is_again = self.bad_version.as_deref() == Some(version);
        self.bad_version = Some(version.to_owned());
        is_again
    }

    /// Records that an optional resource is not available. Returns true if no list was published before.
    pub(super) fn record_unavailable(&mut self) -> bool {
        !std::mem::replace(&mut self.has_list, true)
    }

    /// The pause after a refusal of an optional resource.
    pub(super) fn next_refused_pause(&mut self) -> Duration {
        let pause = self.refused_pause + jitter(REFUSED_JITTER_MAX);
        self.refused_pause = (self.refused_pause * 2).min(REFUSED_PAUSE_MAX);
        pause
    }

    /// Warning about an optional resource. The same warning again becomes a debug message.
    pub(super) fn warn_once(&mut self, message: String) -> Log {
        if self.warning.as_ref() == Some(&message) {
            return Log::Debug(format!("still {message}"));
        }
        self.warning = Some(message.clone());
        Log::Warn(message)
    }
}
