//! Doubt about the first lists of an agent, if they would take most of its predecessor's table away. They are written
//! once second ones agree, as the store has it for later lists ([`cproxy_core::ListVerdict`]).

use std::{collections::BTreeSet, sync::Arc, time::Instant};

use cproxy_core::{Address, ListSource, Loss, ResourceKind};

/// Judge of the first lists.
#[derive(Debug)]
pub(super) struct FirstLists {
    /// Addresses that the predecessor's table serves.
    serving: BTreeSet<Address>,
    /// Server of the last list.
    server: Arc<str>,
    has_list: bool,
    doubt: Option<Doubt>,
}

/// First lists that were not believed.
#[derive(Debug)]
struct Doubt {
    server: Arc<str>,
    since: Instant,
    /// Servers of the second lists of Services and EndpointSlices.
    second: [Option<Arc<str>>; 2],
}

/// Whether the table may be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    Write,
    /// The lists of this server are not believed.
    Doubt(Arc<str>, Loss),
    /// Second lists are still to come.
    Wait,
    /// Second lists of this server agree.
    Agreed(Arc<str>, Loss),
    /// Lists of this server do not take most of the table away.
    Disagreed(Arc<str>),
}

impl FirstLists {
    /// Judge for an agent that takes over a table which serves these addresses.
    pub(super) fn new(serving: BTreeSet<Address>) -> Self {
        Self { serving, server: "".into(), has_list: false, doubt: None }
    }

    /// Takes note of a complete list.
    pub(super) fn record_list(&mut self, kind: ResourceKind, source: &ListSource) {
        let index = match kind {
            ResourceKind::Services => 0,
            ResourceKind::EndpointSlices => 1,
            ResourceKind::Nodes => return,
        };
        (self.has_list, self.server) = (true, source.server.clone());
        let Some(doubt) = &mut self.doubt else { return };
        if source.is_second(&doubt.server, doubt.since)
            && let Some(second) = doubt.second.get_mut(index)
        {
            *second = Some(source.server.clone());
        }
    }

    /// Judges the lists that have ended since the last time, once all are there.
    pub(super) fn judge(&mut self, loss: impl FnOnce(&BTreeSet<Address>) -> Loss, now: Instant) -> Judgement {
        let has_list = std::mem::take(&mut self.has_list);
        if !has_list && self.doubt.is_some() {
            return Judgement::Wait;
        }
        let (loss, server) = (loss(&self.serving), self.server.clone());
        let Some(doubt) = &self.doubt else {
            if !loss.is_most() {
                return Judgement::Write;
            }
            self.doubt = Some(Doubt { server: server.clone(), since: now, second: [None, None] });
            return Judgement::Doubt(server, loss);
        };
        let is_second = matches!(&doubt.second, [Some(first), Some(second)] if first == second);
        if loss.is_most() && !is_second {
            return Judgement::Wait;
        }
        self.doubt = None;
        if loss.is_most() { Judgement::Agreed(server, loss) } else { Judgement::Disagreed(server) }
    }

    pub(super) fn is_in_doubt(&self) -> bool {
        self.doubt.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MOST: Loss = Loss { serving: 10, lost: 6 };
    const LITTLE: Loss = Loss { serving: 10, lost: 5 };

    fn record(first: &mut FirstLists, kind: ResourceKind, server: &str, requested: Instant) {
        first.record_list(kind, &ListSource { server: server.into(), view: None, requested, ended: requested });
    }

    fn both(first: &mut FirstLists, server: &str, requested: Instant) {
        record(first, ResourceKind::Services, server, requested);
        record(first, ResourceKind::EndpointSlices, server, requested);
    }

    /// Judge in doubt about the lists of the server `a`.
    fn in_doubt(now: Instant) -> FirstLists {
        let mut first = FirstLists::new(BTreeSet::new());
        both(&mut first, "a", now);
        assert_eq!(first.judge(|_| MOST, now), Judgement::Doubt("a".into(), MOST));
        first
    }

    #[test]
    fn lists_that_take_little_away_are_written() {
        let (mut first, now) = (FirstLists::new(BTreeSet::new()), Instant::now());
        both(&mut first, "a", now);
        assert_eq!((first.judge(|_| LITTLE, now), first.is_in_doubt()), (Judgement::Write, false));
    }

    #[test]
    fn both_lists_of_another_server_or_later_ones_agree() {
        let now = Instant::now();
        for (server, seconds, agrees) in [("a", 9, false), ("a", 10, true), ("b", 0, true)] {
            let mut first = in_doubt(now);
            assert_eq!(first.judge(|_| panic!("no list has ended"), now), Judgement::Wait);
            both(&mut first, server, now + Duration::from_secs(seconds));
            let expected = if agrees { Judgement::Agreed(server.into(), MOST) } else { Judgement::Wait };
            assert_eq!((first.judge(|_| MOST, now), first.is_in_doubt()), (expected, !agrees), "{server} {seconds}");
        }
    }

    #[test]
    fn lists_of_two_servers_or_from_before_are_no_second_ones() {
        let now = Instant::now();
        let mut first = in_doubt(now);
        both(&mut first, "b", now - Duration::from_millis(1));
        assert_eq!(first.judge(|_| MOST, now), Judgement::Wait);
        record(&mut first, ResourceKind::Services, "b", now);
        record(&mut first, ResourceKind::EndpointSlices, "c", now);
        record(&mut first, ResourceKind::Nodes, "b", now);
        assert_eq!(first.judge(|_| MOST, now), Judgement::Wait);
        record(&mut first, ResourceKind::EndpointSlices, "b", now);
        assert_eq!(first.judge(|_| MOST, now), Judgement::Agreed("b".into(), MOST));
    }

    #[test]
    fn lists_that_have_the_objects_end_the_doubt_at_once() {
        let now = Instant::now();
        let mut first = in_doubt(now);
        record(&mut first, ResourceKind::Services, "a", now);
        assert_eq!(first.judge(|_| LITTLE, now), Judgement::Disagreed("a".into()));
    }
}
