//! The intervals of maps: each run is there once, and stays as long as the maps do.

use std::collections::BTreeMap;

use super::operation::{INTERVALS_MAX, Operation, Run};
use crate::{
    compile::{Decision, Interval, Reason, Verdict},
    model::Protocol,
};

/// Intervals of all slots.
#[derive(Debug)]
pub(super) struct Intervals {
    slots: Vec<Interval>,
    runs: BTreeMap<Box<[Interval]>, Run>,
    room: u32,
}

impl Intervals {
    /// Intervals with as much room as the kernel can have.
    pub(super) fn unbounded() -> Self {
        Self { slots: Vec::new(), runs: BTreeMap::new(), room: INTERVALS_MAX }
    }

    pub(super) fn bound(&mut self, room: u32) {
        self.room = room;
    }

    /// Number of slots that are taken.
    pub(super) fn len(&self) -> u32 {
        self.slots.len() as u32
    }

    /// The run with these intervals; `None` if there is no room for them.
    pub(super) fn run(&mut self, intervals: &[Interval]) -> Option<Run> {
        if let Some(run) = self.runs.get(intervals) {
            return Some(*run);
        }
        if intervals.is_empty() {
            return Some(Run::default());
        }
        let length = u16::try_from(intervals.len()).ok()?;
        let run = Run { first: self.len(), length };
        if self.len() + u32::from(length) > self.room {
            return None;
        }
        self.slots.extend_from_slice(intervals);
        self.runs.insert(intervals.into(), run);
        Some(run)
    }

    /// Writes of all slots from this one on.
    pub(super) fn since(&self, slot: u32) -> impl Iterator<Item = Operation> {
        let intervals = (slot..).zip(self.slots.iter().skip(slot as usize));
        intervals.map(|(slot, interval)| Operation::Interval(slot, *interval))
    }
}

/// Intervals between which and beside which all is allowed.
pub(super) fn with_all_else_allowed(intervals: &[Interval]) -> Vec<Interval> {
    let mut all = Vec::new();
    for protocol in Protocol::ALL {
        let mut next = Some(0);
        for interval in intervals.iter().filter(|interval| interval.protocol == protocol) {
            let before = next.zip(interval.first.checked_sub(1)).filter(|(first, last)| first <= last);
            all.extend(before.map(|(first, last)| allowed(protocol, first, last)));
            all.push(*interval);
            next = interval.last.checked_add(1);
        }
        all.extend(next.map(|first| allowed(protocol, first, u16::MAX)));
    }
    all
}

fn allowed(protocol: Protocol, first: u16, last: u16) -> Interval {
    Interval { protocol, first, last, decision: Decision { verdict: Verdict::Allow, reason: Reason::NoRule } }
}
