//! The order in which tests start: a queue without clock or threads, which is told what ends and what is built.

use super::suites::Class;

/// A test that waits, and how it may run.
pub(super) struct Entry<T> {
    pub(super) test: T,
    pub(super) class: Class,
    /// Time that it takes, as far as known.
    pub(super) seconds: f64,
}

/// Tests that wait, the longest first, and the places of those that run.
pub(super) struct Queue<T> {
    waiting: Vec<Entry<T>>,
    /// Places of tests that run at the same time.
    places: u32,
    taken: u32,
    /// Whether an exclusive test runs.
    is_closed: bool,
}

/// Whether a test can start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Readiness {
    Ready,
    /// Something that it needs is not built yet.
    Pending,
}

impl<T> Queue<T> {
    /// A queue for this number of places.
    pub(super) fn new(mut waiting: Vec<Entry<T>>, places: u32) -> Self {
        waiting.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        Self { waiting, places, taken: 0, is_closed: false }
    }

    /// The tests that wait.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &T> {
        self.waiting.iter().map(|entry| &entry.test)
    }

    fn is_idle(&self) -> bool {
        self.taken == 0 && !self.is_closed
    }

    /// The next test that can start now, which takes its places until [`Queue::end`]. Exclusive tests start last, when
    /// nothing runs and nothing is built any more.
    ///
    /// A test that is ready and has not enough places keeps shorter ones behind it waiting: otherwise they would take
    /// each place that becomes free.
    pub(super) fn next(&mut self, readiness: impl Fn(&T) -> Readiness, is_all_built: bool) -> Option<(T, Class)> {
        if self.is_closed {
            return None;
        }
        let is_ready = |entry: &Entry<T>| readiness(&entry.test) == Readiness::Ready;
        let is_free = |entry: &Entry<T>| matches!(entry.class, Class::Free(_));
        let index = match self.waiting.iter().position(|entry| is_free(entry) && is_ready(entry)) {
            Some(index) => index,
            None if !self.is_idle() || !is_all_built || self.waiting.iter().any(is_free) => return None,
            None => self.waiting.iter().position(is_ready)?,
        };
        let class = self.waiting.get(index)?.class;
        match class {
            Class::Free(places) => {
                let places = places.min(self.places);
                if self.taken + places > self.places {
                    return None;
                }
                self.taken += places;
            }
            Class::Exclusive => self.is_closed = true,
        }
        Some((self.waiting.remove(index).test, class))
    }

    /// Gives back the places of a test that has ended.
    pub(super) fn end(&mut self, class: Class) {
        match class {
            Class::Free(places) => self.taken -= places.min(self.places),
            Class::Exclusive => self.is_closed = false,
        }
    }

    /// Takes out all tests for which `is_lost`: what they need could not be built.
    pub(super) fn remove(&mut self, is_lost: impl Fn(&T) -> bool) -> Vec<T> {
        let (lost, kept) = std::mem::take(&mut self.waiting).into_iter().partition(|entry| is_lost(&entry.test));
        self.waiting = kept;
        let lost: Vec<Entry<T>> = lost;
        lost.into_iter().map(|entry| entry.test).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Class = Class::Free(1);

    fn queue(entries: &[(&'static str, Class, f64)]) -> Queue<&'static str> {
        let entries = entries.iter().map(|&(test, class, seconds)| Entry { test, class, seconds });
        Queue::new(entries.collect(), 2)
    }

    fn ready(_: &&str) -> Readiness {
        Readiness::Ready
    }

    #[test]
    fn the_longest_starts_first_and_no_more_than_there_are_places() {
        let mut queue = queue(&[("short", ONE, 1.0), ("long", ONE, 9.0), ("middle", ONE, 5.0)]);
        assert_eq!(queue.next(ready, true), Some(("long", ONE)));
        assert_eq!(queue.next(ready, true), Some(("middle", ONE)));
        assert_eq!(queue.next(ready, true), None);
        queue.end(ONE);
        assert_eq!(queue.next(ready, true), Some(("short", ONE)));
        assert_eq!(queue.next(ready, true), None);
        assert_eq!(queue.waiting().count(), 0);
    }

    #[test]
    fn a_test_whose_needs_are_not_built_lets_others_pass() {
        let mut queue = queue(&[("early", ONE, 9.0), ("late", ONE, 1.0)]);
        let readiness = |test: &&str| if *test == "early" { Readiness::Pending } else { Readiness::Ready };
        assert_eq!(queue.next(readiness, false), Some(("late", ONE)));
        assert_eq!(queue.next(readiness, false), None);
        assert_eq!(queue.next(ready, false), Some(("early", ONE)));
    }

    #[test]
    fn a_test_of_two_places_is_not_passed_by_shorter_ones() {
        let mut queue = queue(&[("a", ONE, 9.0), ("wide", Class::Free(2), 5.0), ("b", ONE, 1.0)]);
        assert_eq!(queue.next(ready, true), Some(("a", ONE)));
        assert_eq!(queue.next(ready, true), None);
        queue.end(ONE);
        assert_eq!(queue.next(ready, true), Some(("wide", Class::Free(2))));
        assert_eq!(queue.next(ready, true), None);
        queue.end(Class::Free(2));
        assert_eq!(queue.next(ready, true), Some(("b", ONE)));
    }

    #[test]
    fn a_test_wider_than_the_machine_runs_all_the_same() {
        let mut queue = queue(&[("wide", Class::Free(8), 5.0), ("b", ONE, 1.0)]);
        assert_eq!(queue.next(ready, true), Some(("wide", Class::Free(8))));
        assert_eq!(queue.next(ready, true), None);
        queue.end(Class::Free(8));
        assert_eq!(queue.next(ready, true), Some(("b", ONE)));
    }

    #[test]
    fn exclusive_tests_are_alone_and_last() {
        let mut queue = queue(&[("alone", Class::Exclusive, 9.0), ("a", ONE, 1.0), ("quiet", Class::Exclusive, 3.0)]);
        assert_eq!(queue.next(ready, true), Some(("a", ONE)));
        assert_eq!(queue.next(ready, true), None);
        queue.end(ONE);
        assert_eq!(queue.next(ready, false), None, "something is built");
        assert_eq!(queue.next(ready, true), Some(("alone", Class::Exclusive)));
        assert_eq!(queue.next(ready, true), None);
        queue.end(Class::Exclusive);
        assert_eq!(queue.next(ready, true), Some(("quiet", Class::Exclusive)));
    }

    #[test]
    fn tests_that_cannot_run_are_taken_out() {
        let mut queue = queue(&[("a", ONE, 9.0), ("b", ONE, 5.0)]);
        assert_eq!(queue.remove(|test| *test == "a"), ["a"]);
        assert_eq!(queue.next(ready, true), Some(("b", ONE)));
    }
}
