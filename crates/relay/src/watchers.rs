//! Clients that wait for the next event of a collection.

use std::{collections::HashMap, task::Waker};

/// Clients that wait.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Slots of clients that watch some topics, such as one object by its name: a change of another wakes none of them.
    by_topic: HashMap<Box<str>, Vec<usize>>,
    /// Slots of all others.
    of_all: Vec<usize>,
    due: Due,
}

/// Topics that a client watches; `None`: all.
pub(crate) type Topics = Option<Vec<Box<str>>>;

/// Clients that have to be woken.
#[derive(Debug, Default)]
struct Due {
    /// Slots of those that watch some topics.
    by_topic: Vec<usize>,
    of_all: bool,
    all: bool,
}

/// One client.
#[derive(Debug, Default)]
struct Slot {
    waker: Option<Waker>,
    places: Places,
    /// Sequence number of the first event since the client has waited that is about one of its topics.
    first_event: Option<u64>,
}

/// Places of a slot in lists.
#[derive(Debug)]
enum Places {
    /// Index in the list of those that watch all.
    OfAll(usize),
    /// Index in the list of each topic.
    ByTopic(Box<[(Box<str>, usize)]>),
}

impl Default for Places {
    fn default() -> Self {
        Self::ByTopic(Box::default())
    }
}

impl Watchers {
    /// Adds a client. Returns its slot.
    pub(crate) fn add(&mut self, topics: Topics) -> usize {
        let id = self.free.pop().unwrap_or(self.slots.len());
        if id == self.slots.len() {
            self.slots.push(Slot::default());
        }
        let push = |list: &mut Vec<usize>| {
            list.push(id);
            list.len() - 1
        };
        let places = match topics {
            Some(topics) => {
                let place = |topic: Box<str>| {
                    // Hardly any object's name is that of two clients.
                    let list = self.by_topic.entry(topic.clone()).or_insert_with(|| Vec::with_capacity(1));
                    (topic, push(list))
                };
                Places::ByTopic(topics.into_iter().map(place).collect())
            }
            None => Places::OfAll(push(&mut self.of_all)),
        };
        if let Some(slot) = self.slots.get_mut(id) {
            *slot = Slot { waker: None, places, first_event: None };
        }
        id
    }

    pub(crate) fn remove(&mut self, id: usize) {
        let Some(slot) = self.slots.get_mut(id).map(std::mem::take) else { return };
        self.free.push(id);
        match slot.places {
            Places::OfAll(index) => {
                let moved = swap_out(&mut self.of_all, index).and_then(|moved| self.slots.get_mut(moved));
                if let Some(moved) = moved {
                    moved.places = Places::OfAll(index);
                }
            }
            Places::ByTopic(places) => {
                for (topic, index) in places {
                    let Some(list) = self.by_topic.get_mut(&topic) else { continue };
                    let moved = swap_out(list, index).and_then(|moved| self.slots.get_mut(moved));
                    if list.is_empty() {
                        self.by_topic.remove(&topic);
                    }
                    if let Some(moved) = moved {
                        moved.set_index(&topic, index);
                    }
                }
            }
        }
    }

    /// Lets a client wait.
    pub(crate) fn wait(&mut self, id: usize, waker: &Waker) {
        let Some(slot) = self.slots.get_mut(id) else { return };
        if !slot.waker.as_ref().is_some_and(|old| old.will_wake(waker)) {
            slot.waker = Some(waker.clone());
        }
    }

    /// First event about one of a client's topics, since the last call.
    pub(crate) fn take_first_event(&mut self, id: usize) -> Option<u64> {
        self.slots.get_mut(id)?.first_event.take()
    }

    /// Lets the next call give this sequence number, or that of an earlier event.
    pub(crate) fn set_first_event(&mut self, id: usize, sequence: u64) {
        if let Some(slot) = self.slots.get_mut(id) {
            slot.first_event = Some(sequence);
        }
    }

    /// Records an event about a topic: those whom it concerns have to be woken.
    pub(crate) fn record(&mut self, topic: &str, sequence: u64) {
        for &id in self.by_topic.get(topic).into_iter().flatten() {
            if let Some(slot) = self.slots.get_mut(id) {
                slot.first_event.get_or_insert(sequence);
                self.due.by_topic.push(id);
            }
        }
        self.due.of_all = true;
    }

    /// Records something that concerns all.
    pub(crate) fn record_for_all(&mut self) {
        self.due.all = true;
    }

    /// Wakes those whom the records since the last call concern.
    pub(crate) fn wake_due(&mut self) {
        let Due { by_topic, of_all, all } = std::mem::take(&mut self.due);
        if all {
            return self.slots.iter_mut().for_each(wake);
        }
        let of_all = self.of_all.iter().filter(|_| of_all);
        for &id in by_topic.iter().chain(of_all) {
            if let Some(slot) = self.slots.get_mut(id) {
                wake(slot);
            }
        }
    }

    /// Number of clients.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

impl Slot {
    /// Records that the slot has another index in the list of one of its topics.
    fn set_index(&mut self, topic: &str, index: usize) {
        let Places::ByTopic(places) = &mut self.places else { return };
        if let Some((_, place)) = places.iter_mut().find(|(other, _)| **other == *topic) {
            *place = index;
        }
    }
}

fn wake(slot: &mut Slot) {
    if let Some(waker) = slot.waker.take() {
        waker.wake();
    }
}

/// Removes the element at `index`. Returns the element that takes its place.
fn swap_out(list: &mut Vec<usize>, index: usize) -> Option<usize> {
    if index < list.len() {
        list.swap_remove(index);
    }
    list.get(index).copied()
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    struct Count(AtomicUsize);

    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn an_event_wakes_those_whom_it_concerns() {
        let mut watchers = Watchers::default();
        let counts: Vec<_> = (0..4).map(|_| Arc::new(Count(AtomicUsize::new(0)))).collect();
        let topics = |topics: &[&str]| -> Topics { Some(topics.iter().map(|&topic| topic.into()).collect()) };
        let ids =
            [None, Some(&["a"][..]), Some(&["b", "c"]), Some(&["c", "a"])].map(|of| watchers.add(of.and_then(topics)));
        let wait = |watchers: &mut Watchers| {
            for (id, count) in ids.into_iter().zip(&counts) {
                watchers.wait(id, &Waker::from(count.clone()));
            }
        };
        let counted = || counts.iter().map(|count| count.0.load(Ordering::Relaxed)).collect::<Vec<_>>();
        wait(&mut watchers);
        watchers.record("a", 7);
        watchers.record("a", 8);
        assert_eq!(counted(), [0; 4]);
        watchers.wake_due();
        assert_eq!(counted(), [1, 1, 0, 1]);
        assert_eq!(ids.map(|id| watchers.take_first_event(id)), [None, Some(7), None, Some(7)]);
        assert_eq!(watchers.take_first_event(ids[1]), None);
        wait(&mut watchers);
        watchers.remove(ids[1]);
        watchers.record("a", 9);
        watchers.wake_due();
        assert_eq!(counted(), [2, 1, 0, 2]);
        ids.into_iter().zip(&counts).filter(|(id, _)| *id != ids[1]).for_each(|(id, count)| {
            watchers.wait(id, &Waker::from(count.clone()));
        });
        watchers.record_for_all();
        watchers.wake_due();
        assert_eq!(counted(), [3, 1, 1, 3]);
        assert_eq!(watchers.len(), 3);
        wait(&mut watchers);
        watchers.record("c", 10);
        watchers.wake_due();
        assert_eq!(counted(), [4, 1, 2, 4]);
        [ids[0], ids[2], ids[3]].into_iter().for_each(|id| watchers.remove(id));
        assert_eq!((watchers.by_topic.len(), watchers.of_all.len()), (0, 0));
    }
}
