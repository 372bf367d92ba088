//! Time that a connection may take: a pure state that counts responses under way and lists that are not read yet.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

/// Time for the first request, and for the head of each.
pub(crate) const HEAD_TIME_MAX: Duration = Duration::from_secs(10);
/// Time without a request under way.
const IDLE_TIME_MAX: Duration = Duration::from_secs(60);
/// Time for a client to read a list.
const LIST_TIME_MAX: Duration = Duration::from_secs(60);

/// Responses under way on one connection, and since when the client owes the next step.
#[derive(Debug)]
pub(crate) struct TimeBudget {
    responses: usize,
    /// Time at which there was last no response.
    idle_since: Instant,
    /// The client has asked for objects that it may see.
    has_requested: bool,
    /// Begin of each list that is not read yet.
    lists: BTreeMap<u64, Instant>,
    lists_begun: u64,
}

/// Limit that a connection has exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Excess {
    /// A list takes too long.
    #[error("it reads a list too slowly")]
    SlowList,
    /// There was no request for long.
    #[error("it is idle")]
    Idle,
    /// It came and did not ask for anything that it may see.
    #[error("it asks for no objects")]
    NoRequest,
}

impl TimeBudget {
    pub(crate) fn new(now: Instant) -> Self {
        Self { responses: 0, idle_since: now, has_requested: false, lists: BTreeMap::new(), lists_begun: 0 }
    }

    /// Begins a response without a bound on its time. By itself it does not keep the connection: clients without
    /// credentials may ask for the health.
    pub(crate) fn begin_response(&mut self) {
        self.responses += 1;
    }

    /// Ends a response.
    pub(crate) fn end_response(&mut self, now: Instant) {
        self.responses = self.responses.saturating_sub(1);
        if self.has_requested {
            self.idle_since = now;
        }
    }

    /// The client may see objects.
    pub(crate) fn accept_client(&mut self, now: Instant) {
        self.has_requested = true;
        self.idle_since = now;
    }

    /// Begins a list, which has to be read in time. Returns its number.
    pub(crate) fn begin_list(&mut self, now: Instant) -> u64 {
        self.lists_begun += 1;
        self.lists.insert(self.lists_begun, now);
        self.lists_begun
    }

    /// The list has been read.
    pub(crate) fn end_list(&mut self, number: u64) {
        self.lists.remove(&number);
    }

    /// Limit that the connection exceeds now.
    pub(crate) fn excess(&self, now: Instant) -> Option<Excess> {
        let is_slow = |begin: &Instant| now.saturating_duration_since(*begin) > LIST_TIME_MAX;
        if self.lists.values().any(is_slow) {
            return Some(Excess::SlowList);
        }
        let (bound, excess) = match self.has_requested {
            true => (IDLE_TIME_MAX, Excess::Idle),
            false => (HEAD_TIME_MAX, Excess::NoRequest),
        };
        let is_idle = self.responses == 0 && now.saturating_duration_since(self.idle_since) > bound;
        is_idle.then_some(excess)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MOMENT: Duration = Duration::from_millis(1);

    #[test]
    fn a_connection_without_requests_for_objects_is_cut_sooner_than_an_idle_one() {
        let start = Instant::now();
        let mut budget = TimeBudget::new(start);
        budget.begin_response();
        budget.end_response(start);
        assert_eq!(budget.excess(start + HEAD_TIME_MAX), None);
        // A request for the health does not prolong it.
        budget.begin_response();
        budget.end_response(start + HEAD_TIME_MAX / 2);
        assert_eq!(budget.excess(start + HEAD_TIME_MAX + MOMENT), Some(Excess::NoRequest));
        budget.accept_client(start);
        budget.begin_response();
        assert_eq!(budget.excess(start + IDLE_TIME_MAX * 100), None);
        let end = start + IDLE_TIME_MAX * 100;
        budget.end_response(end);
        assert_eq!(budget.excess(end + IDLE_TIME_MAX), None);
        assert_eq!(budget.excess(end + IDLE_TIME_MAX + MOMENT), Some(Excess::Idle));
    }

    #[test]
    fn a_list_has_to_be_read_in_time_and_what_follows_it_has_not() {
        let start = Instant::now();
        let mut budget = TimeBudget::new(start);
        budget.accept_client(start);
        budget.begin_response();
        let lists = [budget.begin_list(start), budget.begin_list(start)];
        let late = start + LIST_TIME_MAX + MOMENT;
        assert_eq!(budget.excess(late - MOMENT), None);
        budget.end_list(lists[0]);
        assert_eq!(budget.excess(late), Some(Excess::SlowList));
        budget.end_list(lists[1]);
        assert_eq!(budget.excess(late), None);
    }

    proptest! {
        #[test]
        fn a_connection_ends_without_responses_and_stays_with_one_that_has_no_list(
            steps in proptest::collection::vec((0..5_u8, 0..30_u64), 0..50),
        ) {
            let mut now = Instant::now();
            let (mut budget, mut responses, mut lists) = (TimeBudget::new(now), 0, Vec::new());
            for (action, seconds) in steps {
                now += Duration::from_secs(seconds);
                match action {
                    0 => {
                        budget.begin_response();
                        responses += 1;
                    }
                    1 if responses > 0 => {
                        budget.end_response(now);
                        responses -= 1;
                    }
                    2 => lists.push(budget.begin_list(now)),
                    3 => lists.pop().into_iter().for_each(|number| budget.end_list(number)),
                    _ => budget.accept_client(now),
                }
                let later = now + IDLE_TIME_MAX.max(LIST_TIME_MAX) + MOMENT;
                prop_assert!(budget.excess(now).is_none() || budget.excess(later).is_some());
                prop_assert_eq!(budget.excess(later).is_none(), responses > 0 && lists.is_empty());
            }
        }
    }
}
