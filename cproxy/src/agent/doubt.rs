//! Doubt about lists that would take most of the table away. A server that has lost its objects, or cannot read them,
//! sends lists that are short or empty. Such a list is written only once a second one agrees.

use std::{sync::Arc, time::Duration};

use cproxy_core::{Loss, ResourceKind};
use tokio::time::Instant;

/// Time after which a list of the same server counts as a second one.
pub(super) const SECOND_LIST_AFTER: Duration = Duration::from_secs(10);

/// Judge of the lists of API servers.
#[derive(Debug, Default)]
pub(super) struct ListJudge {
    /// A list has ended since the last judgement.
    has_list: bool,
    doubt: Option<Doubt>,
    /// Number of doubts.
    doubts: u64,
}

/// Lists that were not believed.
#[derive(Debug)]
struct Doubt {
    server: Arc<str>,
    since: Instant,
    /// The server was asked again after [`SECOND_LIST_AFTER`].
    has_asked: bool,
    /// Kinds that were listed a second time.
    services_again: bool,
    slices_again: bool,
}

/// Whether the table may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    Write,
    /// The lists that have just ended are not believed.
    Doubt(Loss),
    /// Second lists are still to come.
    Wait,
    /// Second lists agree: the table may be written.
    Agreed(Loss),
    /// Second lists do not take most of the table away: it may be written.
    Disagreed,
}

impl ListJudge {
    /// Takes note of a complete list of this server.
    pub(super) fn record_list(&mut self, kind: ResourceKind, server: &str, now: Instant) {
        self.has_list = true;
        let Some(doubt) = &mut self.doubt else { return };
        if *doubt.server == *server && now < doubt.since + SECOND_LIST_AFTER {
            return;
        }
        match kind {
            ResourceKind::Services => doubt.services_again = true,
            ResourceKind::EndpointSlices => doubt.slices_again = true,
            ResourceKind::Nodes => {}
        }
    }

    /// Judges the lists that have ended since the last time, by the loss that writing would bring.
    pub(super) fn judge(&mut self, loss: impl FnOnce() -> Loss, server: &Arc<str>, now: Instant) -> Judgement {
        let has_list = std::mem::take(&mut self.has_list);
        let Some(doubt) = &self.doubt else {
            let loss = if has_list { loss() } else { Loss::default() };
            if !loss.is_most() {
                return Judgement::Write;
            }
            self.doubts += 1;
            self.doubt = Some(Doubt {
                server: server.clone(),
                since: now,
                has_asked: false,
                services_again: false,
                slices_again: false,
            });
            return Judgement::Doubt(loss);
        };
        if !has_list {
            return Judgement::Wait;
        }
        let (loss, is_second) = (loss(), doubt.services_again && doubt.slices_again);
        if loss.is_most() && !is_second {
            return Judgement::Wait;
        }
        self.doubt = None;
        if loss.is_most() { Judgement::Agreed(loss) } else { Judgement::Disagreed }
    }

    /// Whether the table waits for second lists.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.doubt.is_some()
    }

    /// Time at which the server is to be asked again.
    pub(super) fn due(&self) -> Option<Instant> {
        self.doubt.as_ref().filter(|doubt| !doubt.has_asked).map(|doubt| doubt.since + SECOND_LIST_AFTER)
    }

    /// Returns once whether the server is to be asked again now.
    pub(super) fn take_due(&mut self, now: Instant) -> bool {
        let due = self.due().is_some_and(|due| due <= now);
        if let Some(doubt) = self.doubt.as_mut().filter(|_| due) {
            doubt.has_asked = true;
        }
        due
    }

    /// Number of times that lists were not believed.
    pub(super) fn doubts(&self) -> u64 {
        self.doubts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Loss = Loss { serving: 10, lost: 6 };
    const LITTLE: Loss = Loss { serving: 10, lost: 5 };

    /// Judge in doubt about the lists of the server `a`.
    fn in_doubt(now: Instant) -> ListJudge {
        let mut judge = ListJudge::default();
        list(&mut judge, "a", now);
        assert_eq!(judge.judge(|| MOST, &"a".into(), now), Judgement::Doubt(MOST));
        judge
    }

    fn list(judge: &mut ListJudge, server: &str, now: Instant) {
        judge.record_list(ResourceKind::Services, server, now);
        judge.record_list(ResourceKind::EndpointSlices, server, now);
    }

    #[test]
    fn only_a_list_that_takes_most_away_is_doubted() {
        let (mut judge, now) = (ListJudge::default(), Instant::now());
        assert_eq!(judge.judge(|| panic!("no list has ended"), &"a".into(), now), Judgement::Write);
        list(&mut judge, "a", now);
        assert_eq!(judge.judge(|| LITTLE, &"a".into(), now), Judgement::Write);
        assert_eq!(judge.judge(|| MOST, &"a".into(), now), Judgement::Write, "changes may take all away");
        assert_eq!((judge.doubts(), judge.due(), judge.is_in_doubt()), (0, None, false));
    }

    #[test]
    fn lists_of_another_server_or_later_ones_agree() {
        let now = Instant::now();
        for (server, after, expected) in [
            ("a", SECOND_LIST_AFTER / 2, Judgement::Wait),
            ("a", SECOND_LIST_AFTER, Judgement::Agreed(MOST)),
            ("b", Duration::ZERO, Judgement::Agreed(MOST)),
        ] {
            let mut judge = in_doubt(now);
            assert_eq!(judge.judge(|| panic!("no list has ended"), &"a".into(), now), Judgement::Wait);
            list(&mut judge, server, now + after);
            assert_eq!(judge.judge(|| MOST, &"b".into(), now + after), expected, "{server} {after:?}");
            assert_eq!(judge.is_in_doubt(), expected == Judgement::Wait);
        }
    }

    #[test]
    fn both_kinds_are_listed_again() {
        let (now, later) = (Instant::now(), Instant::now() + SECOND_LIST_AFTER * 2);
        let mut judge = in_doubt(now);
        judge.record_list(ResourceKind::Services, "b", later);
        judge.record_list(ResourceKind::Nodes, "b", later);
        assert_eq!(judge.judge(|| MOST, &"b".into(), later), Judgement::Wait);
        judge.record_list(ResourceKind::EndpointSlices, "b", later);
        assert_eq!(judge.judge(|| MOST, &"b".into(), later), Judgement::Agreed(MOST));
        assert_eq!(judge.doubts(), 1);
    }

    #[test]
    fn a_list_that_has_the_objects_again_ends_the_doubt_at_once() {
        let now = Instant::now();
        let mut judge = in_doubt(now);
        judge.record_list(ResourceKind::Services, "a", now);
        assert_eq!(judge.judge(|| LITTLE, &"a".into(), now), Judgement::Disagreed);
        assert_eq!(judge.judge(|| MOST, &"a".into(), now), Judgement::Write);
    }

    #[test]
    fn the_server_is_asked_again_once() {
        let now = Instant::now();
        let mut judge = in_doubt(now);
        assert_eq!((judge.due(), judge.take_due(now)), (Some(now + SECOND_LIST_AFTER), false));
        assert!(judge.take_due(now + SECOND_LIST_AFTER));
        assert_eq!((judge.due(), judge.take_due(now + SECOND_LIST_AFTER)), (None, false));
    }
}
