//! Sets of each Service with the times when they were in force, and the check whether they explain a connect's backend.

use std::{
    sync::RwLock,
    time::{Duration, Instant},
};

use crate::world::{Backend, SERVICES, Set};

/// Time for which a connect may meet a set after its successor was seen in the kernel.
pub(crate) const GRACE: Duration = Duration::from_millis(100);

/// The outcome of a connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meeting {
    /// A backend answered.
    Reached(Backend),
    /// The call failed as if there were no Service, or one that is not yet in force.
    Turned,
}

/// A set in force: from just before it is written to the source until its successor is seen in the kernel.
#[derive(Debug)]
struct Epoch {
    /// `None`: there is no such Service.
    set: Option<Set>,
    from: Instant,
    to: Option<Instant>,
    is_met: bool,
}

impl Epoch {
    fn is_over_before(&self, moment: Instant) -> bool {
        self.to.is_some_and(|to| to + GRACE < moment)
    }

    fn explains(&self, meeting: Meeting) -> bool {
        match (self.set, meeting) {
            (Some(set), Meeting::Reached(backend)) => set.has(backend),
            (None, Meeting::Turned) => true,
            _ => false,
        }
    }
}

/// The history of all Services.
#[derive(Debug, Default)]
pub(crate) struct History([RwLock<Vec<Epoch>>; SERVICES]);

impl History {
    /// Records a set that is about to be written to the source.
    pub(crate) fn announce(&self, service: usize, set: Option<Set>) {
        self.0[service].write().unwrap().push(Epoch { set, from: Instant::now(), to: None, is_met: false });
    }

    /// Records that the kernel has the set announced last.
    pub(crate) fn confirm(&self, service: usize) {
        let now = Instant::now();
        if let [before @ .., _] = self.0[service].write().unwrap().as_mut_slice() {
            before.iter_mut().rev().take_while(|epoch| epoch.to.is_none()).for_each(|epoch| epoch.to = Some(now));
        }
    }

    /// The set that was announced last.
    pub(crate) fn latest(&self, service: usize) -> Option<Set> {
        self.0[service].read().unwrap().last()?.set
    }

    /// The current set, or the last one before the Service was deleted.
    pub(crate) fn latest_set(&self, service: usize) -> Option<Set> {
        self.0[service].read().unwrap().iter().rev().find_map(|epoch| epoch.set)
    }

    /// Fails if no set in force between the two moments explains the meeting.
    pub(crate) fn judge(&self, service: usize, from: Instant, to: Instant, meeting: Meeting) -> Result<(), String> {
        if self.explain(service, from, to, meeting) {
            return Ok(());
        }
        let epochs = self.0[service].read().unwrap();
        let in_force = epochs.iter().rev().take_while(|epoch| !epoch.is_over_before(from)).collect::<Vec<_>>();
        let before = epochs.iter().rev().skip(in_force.len()).find(|epoch| epoch.explains(meeting));
        let before = before.and_then(|epoch| Some(from - epoch.to?));
        Err(format!("{meeting:?}, in force were {in_force:?}; it would have been right {before:?} earlier"))
    }

    fn explain(&self, service: usize, from: Instant, to: Instant, meeting: Meeting) -> bool {
        let is_known = |epochs: &[Epoch]| {
            let mut in_force = epochs.iter().enumerate().rev().take_while(|(_, epoch)| !epoch.is_over_before(from));
            in_force.find(|(_, epoch)| epoch.from <= to && epoch.explains(meeting)).map(|(index, e)| (index, e.is_met))
        };
        let Some((index, is_met)) = is_known(&self.0[service].read().unwrap()) else { return false };
        if !is_met {
            self.0[service].write().unwrap()[index].is_met = true;
        }
        true
    }

    /// Whether the Service had this backend during the whole interval.
    pub(crate) fn always_has(&self, service: usize, from: Instant, to: Instant, backend: Backend) -> bool {
        let epochs = self.0[service].read().unwrap();
        let mut in_force = epochs.iter().rev().take_while(|epoch| !epoch.is_over_before(from));
        in_force.all(|epoch| epoch.from > to || epoch.explains(Meeting::Reached(backend)))
    }

    /// The number of sets so far, and of those that a connect has met.
    pub(crate) fn sets(&self) -> (usize, usize) {
        let count = |condition: fn(&Epoch) -> bool| {
            self.0.iter().map(|epochs| epochs.read().unwrap().iter().filter(|epoch| condition(epoch)).count()).sum()
        };
        (count(|epoch| epoch.set.is_some()), count(|epoch| epoch.set.is_some() && epoch.is_met))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Set = Set { first: 0, count: 2, port: 0 };
    const NEW: Set = Set { first: 1, count: 2, port: 0 };

    fn reached(number: u32) -> Meeting {
        Meeting::Reached(Backend { number, port: 0 })
    }

    #[test]
    fn a_meeting_is_explained_by_what_was_in_force() {
        let history = History::default();
        let judge = |from, to, meeting| history.judge(0, from, to, meeting).is_ok();
        history.announce(0, Some(OLD));
        let early = Instant::now();
        assert!(judge(early, early, reached(0)) && !judge(early, early, reached(2)), "not yet announced");
        assert!(!judge(early, early, Meeting::Turned), "the Service is there");
        assert!(!judge(early, early, Meeting::Reached(Backend { number: 0, port: 1 })), "another port");
        history.announce(0, Some(NEW));
        let between = Instant::now();
        assert!(judge(between, between, reached(0)) && judge(between, between, reached(2)), "either");
        history.confirm(0);
        std::thread::sleep(GRACE * 2);
        let late = Instant::now();
        assert!(!judge(late, late, reached(0)) && judge(late, late, reached(2)), "only the new one");
        assert!(judge(between, late, reached(0)), "it began before");
        assert_eq!(history.sets(), (2, 2));
    }

    #[test]
    fn a_backend_that_was_gone_for_a_moment_was_not_there_always() {
        let history = History::default();
        history.announce(0, Some(OLD));
        let start = Instant::now();
        history.announce(0, Some(NEW));
        history.confirm(0);
        let has = |number| history.always_has(0, start, Instant::now(), Backend { number, port: 0 });
        assert!(has(1) && !has(0) && !has(2));
        history.announce(0, None);
        assert!(!has(1));
    }
}
