//! Sets of each Service with the times when they were in force, and the checks whether they explain the outcome of a
//! call.

use std::{sync::RwLock, time::Instant};

use super::addresses::{Backend, SERVICES, Set};

/// Outcome of a call that leads to a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A backend answered.
    Reached(Backend),
    /// The call failed as if there were no Service, or one that is not yet in force.
    NoService,
    /// The agent closed the socket.
    Closed,
}

/// The times before and after a call.
#[derive(Clone, Copy, Debug)]
pub struct Period {
    /// Before the call.
    pub from: Instant,
    /// After it.
    pub to: Instant,
}

/// A set in force: from just before it is written to the source until its successor is seen in the kernel.
#[derive(Debug)]
struct Epoch {
    /// `None`: there is no such Service.
    set: Option<Set>,
    from: Instant,
    to: Option<Instant>,
}

impl Epoch {
    fn serves(&self, backend: Backend) -> bool {
        self.set.is_some_and(|set| set.serves(backend))
    }
}

/// The history of all Services.
#[derive(Debug, Default)]
pub struct History([RwLock<Vec<Epoch>>; SERVICES]);

impl History {
    /// Records a set that is about to be written to the source.
    pub fn announce(&self, service: usize, set: Option<Set>) {
        self.0[service].write().unwrap().push(Epoch { set, from: Instant::now(), to: None });
    }

    /// Records that the kernel has the set announced last.
    pub fn confirm(&self, service: usize) {
        let now = Instant::now();
        if let [before @ .., _] = self.0[service].write().unwrap().as_mut_slice() {
            before.iter_mut().rev().take_while(|epoch| epoch.to.is_none()).for_each(|epoch| epoch.to = Some(now));
        }
    }

    /// The set that was announced last.
    pub fn latest(&self, service: usize) -> Option<Set> {
        self.0[service].read().unwrap().last()?.set
    }

    /// The current set, or the last one before the Service was deleted.
    pub fn latest_set(&self, service: usize) -> Option<Set> {
        self.0[service].read().unwrap().iter().rev().find_map(|epoch| epoch.set)
    }

    /// The number of sets so far.
    pub fn sets(&self) -> usize {
        self.0.iter().map(|epochs| epochs.read().unwrap().iter().filter(|epoch| epoch.set.is_some()).count()).sum()
    }

    /// Fails if no set in force during the call explains the outcome of a call by a new client.
    pub fn check_new(&self, service: usize, period: Period, outcome: Outcome) -> Result<(), String> {
        self.in_force(service, period, |epochs| {
            let is_explained = match outcome {
                Outcome::Reached(backend) => epochs.iter().any(|epoch| epoch.set.is_some_and(|set| set.has(backend))),
                Outcome::NoService => epochs.iter().any(|epoch| epoch.set.is_none()),
                Outcome::Closed => epochs.array_windows().any(|[before, after]| {
                    before.set.is_some_and(|before| !after.set.is_some_and(|after| after.serves_all_of(before)))
                }),
            };
            if is_explained { Ok(()) } else { Err(format!("{outcome:?}, in force were {epochs:?}")) }
        })
    }

    /// Whether each set in force during this time served the backend.
    pub fn has_served(&self, service: usize, backend: Backend, period: Period) -> bool {
        self.in_force(service, period, |epochs| epochs.iter().all(|epoch| epoch.serves(backend)))
    }

    /// Whether a set in force during the call still serves the backend of flows from before.
    pub(crate) fn may_stay(&self, service: usize, period: Period, outcome: Outcome) -> bool {
        let serves = |epoch: &Epoch| matches!(outcome, Outcome::Reached(backend) if epoch.serves(backend));
        self.in_force(service, period, |epochs| epochs.iter().any(serves))
    }

    /// Fails if a flow, which reached `last` at the given time, has not stayed there although it could, or stays
    /// although it may not. Returns whether it has stayed.
    pub(crate) fn check_flow(
        &self,
        service: usize,
        (last, since): (Backend, Instant),
        period: Period,
        outcome: Outcome,
    ) -> Result<bool, String> {
        if outcome == Outcome::Reached(last) {
            return match self.may_stay(service, period, outcome) {
                true => Ok(true),
                false => self
                    .in_force(service, period, |epochs| Err(format!("stays with {last:?}, in force were {epochs:?}"))),
            };
        }
        self.check_new(service, period, outcome)?;
        self.in_force(service, Period { from: since, ..period }, |epochs| {
            let has_left = epochs.iter().any(|epoch| !epoch.serves(last));
            if has_left { Ok(false) } else { Err(format!("{outcome:?}, though {last:?} has served all the time")) }
        })
    }

    /// Passes on the epochs that overlap with the period, earliest first.
    fn in_force<R>(&self, service: usize, period: Period, check: impl FnOnce(&[Epoch]) -> R) -> R {
        let epochs = self.0[service].read().unwrap();
        let end = epochs.iter().rposition(|epoch| epoch.from <= period.to).map_or(0, |last| last + 1);
        let is_over = |epoch: &Epoch| epoch.to.is_some_and(|to| to < period.from);
        let start = epochs[..end].iter().rposition(is_over).map_or(0, |last| last + 1);
        check(&epochs[start..end])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Set = Set { terminating: 0, first: 0, count: 2, port: 0 };
    /// Backend 0 terminates, 1 stays and 2 is new.
    const NEW: Set = Set { terminating: 1, first: 1, count: 2, port: 0 };
    /// Backend 0 has left.
    const LATE: Set = Set { terminating: 0, ..NEW };

    fn backend(number: u32) -> Backend {
        Backend { number, port: 0 }
    }

    fn now() -> Period {
        Period { from: Instant::now(), to: Instant::now() }
    }

    #[test]
    fn a_set_in_force_explains_an_outcome() {
        let history = History::default();
        let is_explained = |period, outcome| history.check_new(0, period, outcome).is_ok();
        let reached = |number| Outcome::Reached(backend(number));
        history.announce(0, Some(OLD));
        let early = now();
        assert!(is_explained(early, reached(0)) && !is_explained(early, reached(2)), "not yet announced");
        assert!(!is_explained(early, Outcome::NoService), "the Service is there");
        assert!(!is_explained(early, Outcome::Reached(Backend { number: 0, port: 1 })), "another port");
        history.announce(0, Some(NEW));
        let between = now();
        assert!(is_explained(between, reached(0)) && is_explained(between, reached(2)), "either");
        assert!(!is_explained(between, Outcome::Closed), "all serve");
        history.confirm(0);
        let late = now();
        assert!(!is_explained(late, reached(0)) && is_explained(late, reached(2)), "only the new one");
        let long = Period { from: between.from, ..late };
        assert!(is_explained(long, reached(0)), "it began before");
        history.announce(0, Some(LATE));
        assert!(is_explained(now(), Outcome::Closed) && !is_explained(long, Outcome::Closed), "a backend has left");
        assert_eq!(history.sets(), 3);
    }

    #[test]
    fn a_flow_stays_exactly_while_its_backend_serves() {
        let history = History::default();
        history.announce(0, Some(OLD));
        let start = Instant::now();
        let flow = |from, to| history.check_flow(0, (backend(from), start), now(), Outcome::Reached(backend(to)));
        assert!(flow(0, 0) == Ok(true) && flow(0, 1).is_err(), "it serves");
        history.announce(0, Some(NEW));
        history.confirm(0);
        assert!(flow(0, 0) == Ok(true) && flow(0, 1).is_err(), "it serves while it terminates");
        assert!(flow(2, 1) == Ok(false) && flow(2, 0).is_err(), "a terminating backend gets no other flows");
        assert!(history.has_served(0, backend(1), Period { from: start, ..now() }));
        assert!(!history.has_served(0, backend(2), Period { from: start, ..now() }), "it is new");
        history.announce(0, Some(LATE));
        history.confirm(0);
        assert!(flow(0, 0).is_err() && flow(0, 1) == Ok(false), "it has left");
        history.announce(0, None);
        assert_eq!(history.check_flow(0, (backend(1), start), now(), Outcome::NoService), Ok(false));
    }
}
