//! Whether the server has confirmed the version from which a watch was resumed.
//!
//! If etcd was restored to an older state, the API server accepts a watch from a version that it does not have, and
//! sends nothing until it has it. By then it may have other objects, and no event will tell. So a watch that was
//! resumed is trusted only once it has shown a change or a bookmark.

use std::time::Duration;

use tokio::time::Instant;

/// Time in which a server confirms a watch: an interval of bookmarks and a little more, as in the API server's own
/// `DefaultEventFreshDuration` (apiserver/pkg/storage/cacher/cacher.go 1.36).
pub(super) const CONFIRMED_WITHIN: Duration = Duration::from_secs(75);

/// Longest time, for servers that send no bookmarks while nothing changes, or behind proxies that end watches before.
/// Each agent lists once an hour there.
pub(super) const PATIENCE_MAX: Duration = Duration::from_secs(3600);

/// Confirmation of one resource's watches.
#[derive(Debug)]
pub(crate) struct Confirmation {
    phase: Phase,
    /// Time in which a watch has to be confirmed. It doubles with each list that was needed for lack of that.
    patience: Duration,
}

#[derive(Debug)]
enum Phase {
    /// A list has just shown the version.
    Listed,
    /// The last watch began after a list, or was confirmed.
    Confirmed,
    /// Watches were resumed from this time on, and none was confirmed.
    Resumed(Instant),
}

impl Confirmation {
    pub(super) fn new() -> Self {
        Self { phase: Phase::Confirmed, patience: CONFIRMED_WITHIN }
    }

    /// Records a complete list.
    pub(super) fn record_list(&mut self) {
        self.phase = Phase::Listed;
    }

    /// Records a watch that the server has accepted.
    pub(super) fn record_watch(&mut self) {
        self.phase = match self.phase {
            Phase::Listed => Phase::Confirmed,
            Phase::Confirmed => Phase::Resumed(Instant::now()),
            Phase::Resumed(since) => Phase::Resumed(since),
        };
    }

    /// Records a change or bookmark.
    pub(super) fn confirm(&mut self) {
        if let Phase::Resumed(since) = self.phase
            && since.elapsed() <= CONFIRMED_WITHIN
        {
            self.patience = CONFIRMED_WITHIN;
        }
        self.phase = Phase::Confirmed;
    }

    /// Records that the server could not be reached or refused a request. It may come back with another state.
    pub(super) fn record_failure(&mut self) {
        *self = Self::new();
    }

    /// Records a list for lack of a confirmation.
    pub(super) fn record_doubt(&mut self) {
        self.patience = (self.patience * 2).min(PATIENCE_MAX);
    }

    /// Time until which a watch has to be confirmed; `None` if it need not be.
    pub(super) fn due(&self) -> Option<Instant> {
        let Phase::Resumed(since) = self.phase else { return None };
        Some(since + self.patience)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Time until a watch that begins now has to be confirmed.
    fn left(confirmation: &mut Confirmation) -> Option<Duration> {
        confirmation.record_watch();
        confirmation.due().map(|due| due - Instant::now())
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_is_trusted_after_a_list_and_has_to_be_confirmed_once_it_was_resumed() {
        let mut confirmation = Confirmation::new();
        confirmation.record_list();
        assert_eq!(left(&mut confirmation), None);
        assert_eq!(left(&mut confirmation), Some(CONFIRMED_WITHIN));
        sleep(SECOND).await;
        assert_eq!(left(&mut confirmation), Some(CONFIRMED_WITHIN - SECOND), "one that ended early confirms nothing");
        confirmation.confirm();
        assert_eq!(confirmation.due(), None);
        assert_eq!(left(&mut confirmation), Some(CONFIRMED_WITHIN));
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_without_bookmarks_is_listed_ever_more_rarely_until_it_fails_or_has_bookmarks() {
        let mut confirmation = Confirmation::new();
        let doubt = |confirmation: &mut Confirmation| {
            let left = left(confirmation).unwrap();
            confirmation.record_doubt();
            confirmation.record_list();
            confirmation.record_watch();
            left.as_secs()
        };
        let patience: Vec<_> = (0..8).map(|_| doubt(&mut confirmation)).collect();
        assert_eq!(patience, [75, 150, 300, 600, 1200, 2400, 3600, 3600]);
        assert!(left(&mut confirmation).is_some());
        sleep(CONFIRMED_WITHIN + SECOND).await;
        confirmation.confirm();
        assert_eq!(left(&mut confirmation), Some(PATIENCE_MAX), "a late change is no bookmark");
        confirmation.confirm();
        assert_eq!(left(&mut confirmation), Some(CONFIRMED_WITHIN));
        confirmation.record_doubt();
        confirmation.record_failure();
        assert_eq!(left(&mut confirmation), Some(CONFIRMED_WITHIN));
    }
}
