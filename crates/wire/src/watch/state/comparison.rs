//! Comparison of the known objects with the server's, after a restore of the VM.
//!
//! A response that the server has accepted after the comparison was asked for completes it: a list by its end, a watch
//! by a bookmark. The watch begins before the last known version. If a change has brought that, the API server shows
//! the change and no bookmark of the same version: then the watch's orderly end without another event completes it,
//! too. A watch that shows nothing does not: the server may have gone back to an older state, whose watches from later
//! versions are silent.
//!
//! A proxy may end each watch too early, and a server without bookmarks may have changes all the time. After some such
//! watches, a list completes the comparison.

use std::time::Duration;

use tokio::time::Instant;

/// Time of a watch that is opened for its bookmark, which the server sends two seconds before the end
/// (apiserver/pkg/storage/cacher/cache_watcher.go 1.36).
pub const BOOKMARK_WATCH_TIME: Duration = Duration::from_secs(3);

/// Shortest time of a watch whose end shows that no event is left. A server that goes away ends watches earlier.
pub(super) const COMPARISON_MIN: Duration = BOOKMARK_WATCH_TIME.saturating_sub(Duration::from_secs(1));

/// Number of watches without a result after which a list completes the comparison.
pub(super) const WATCHES_MAX: u32 = 3;

/// Comparison of one resource's objects.
#[derive(Debug)]
pub(crate) struct Comparison {
    phase: Phase,
    /// Number of the comparison, or of the last one.
    number: u64,
    /// Number of watches that have ended without a result.
    watches: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// None is wanted.
    Idle,
    /// The server has not accepted a response for it yet. Until then, all events come from the time before.
    Requested,
    /// A response that was accepted at this time may complete it.
    UnderWay { since: Instant, shown: Shown },
}

/// Events that a watch has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Nothing,
    /// The last version that was known before, and nothing else.
    LastVersion,
    /// Changes after it. Others may follow.
    Changes,
}

/// Meaning of a watch's orderly end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WatchEnd {
    /// No comparison is wanted, or none is complete yet. In that case the next watch is for the comparison again.
    Incomplete,
    /// It completes the comparison with this number.
    Complete(u64),
    /// The server may not have the last version.
    Doubtful,
    /// A list has to complete the comparison.
    NeedsList,
}

impl Comparison {
    pub(super) fn new() -> Self {
        Self { phase: Phase::Idle, number: 0, watches: 0 }
    }

    /// Begins the comparison with this number, in place of one that is not complete.
    pub(super) fn want(&mut self, number: u64) {
        *self = Self { phase: Phase::Requested, number, watches: 0 };
    }

    /// True if the next watch is opened for the comparison: it is short and begins before the last version.
    pub(super) fn is_requested(&self) -> bool {
        self.phase == Phase::Requested
    }

    /// Records a response that the server has accepted.
    pub(super) fn accept(&mut self) {
        if self.phase != Phase::Idle {
            self.phase = Phase::UnderWay { since: Instant::now(), shown: Shown::Nothing };
        }
    }

    /// Records a change that a watch has shown. `is_last_version`: its version was the last known one.
    pub(super) fn record_change(&mut self, is_last_version: bool) {
        if let Phase::UnderWay { shown, .. } = &mut self.phase {
            let is_last = is_last_version && *shown != Shown::Changes;
            *shown = if is_last { Shown::LastVersion } else { Shown::Changes };
        }
    }

    /// Records a bookmark or the end of a list. Returns the number of the comparison that it completes.
    pub(super) fn complete(&mut self) -> Option<u64> {
        let Phase::UnderWay { .. } = self.phase else { return None };
        self.phase = Phase::Idle;
        Some(self.number)
    }

    /// Records that the server has ended a watch in an orderly way.
    pub(super) fn end_watch(&mut self) -> WatchEnd {
        let Phase::UnderWay { since, shown } = self.phase else { return WatchEnd::Incomplete };
        match shown {
            Shown::Nothing if since.elapsed() >= COMPARISON_MIN => WatchEnd::Doubtful,
            Shown::LastVersion if since.elapsed() >= COMPARISON_MIN => {
                self.complete().map_or(WatchEnd::Incomplete, WatchEnd::Complete)
            }
            _ if self.fail_watch() => WatchEnd::NeedsList,
            _ => WatchEnd::Incomplete,
        }
    }

    /// Records that a watch has ended without a result. Returns true if a list has to complete the comparison.
    pub(super) fn fail_watch(&mut self) -> bool {
        let Phase::UnderWay { .. } = self.phase else { return false };
        self.watches += 1;
        self.watches >= WATCHES_MAX
    }

    /// Records that the response is not read further. It can complete nothing any more.
    pub(super) fn leave_response(&mut self) {
        if let Phase::UnderWay { .. } = self.phase {
            self.phase = Phase::Requested;
        }
    }
}
