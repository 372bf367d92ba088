//! Counts of what the workload has done, and of faults by kind.

use std::{
    collections::BTreeMap,
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

use cproxy_tests::storm::Storm;

/// Counts that threads share.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Connections that live long, the answers on them, and those that ended with their backends.
    pub(crate) long: AtomicU64,
    pub(crate) long_answers: AtomicU64,
    pub(crate) long_closed: AtomicU64,
    /// Answers to resolvers.
    pub(crate) names: AtomicU64,
}

/// Counts of all episodes.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    counts: Counts,
    episodes: u64,
    connects: u64,
    flows: u64,
    faults: BTreeMap<String, u64>,
}

impl Tally {
    pub(crate) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Adds an episode.
    pub(crate) fn add(&mut self, storm: &Storm, faults: &BTreeMap<String, u64>) {
        self.episodes += 1;
        self.connects += storm.connects();
        self.flows += storm.flow_answers();
        for (fault, count) in faults {
            *self.faults.entry(fault.clone()).or_default() += count;
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { counts, episodes, connects, flows, faults } = self;
        let Counts { long, long_answers, long_closed, names } = counts;
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        write!(f, "{episodes} episodes, {connects} connects, {flows} answers in flows, ")?;
        write!(f, "{} long connections with {} answers, ", load(long), load(long_answers))?;
        write!(f, "{} of them closed with their backends, ", load(long_closed))?;
        write!(f, "{} names resolved; faults and changes: {}", load(names), faults.values().sum::<u64>())?;
        faults.iter().try_for_each(|(fault, count)| write!(f, ", {fault} {count}"))
    }
}
