//! Orders to the load generator, each a line of JSON, and its answers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::receipts::{Change, Histograms};

/// Order to the load generator.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Order {
    /// Starts further clients.
    Start(Start),
    /// Waits until all clients have all lists.
    WaitForLists { time_max_s: u64 },
    /// Begins to record receipts.
    Record,
    /// Waits until all clients have all Services and slices up to these versions.
    Settle { versions: [u64; 2], time_max_s: u64 },
    /// Ends the recording.
    Latencies(Vec<Change>),
    /// Compares what checking clients have with what they should have.
    Check(Expected),
    /// Starts clients that decode nothing.
    StartReaders { count: u32, server: String, versions: [u64; 2], spread_ms: u64 },
    /// Waits until so many of them have all lists.
    WaitForReaders { count: usize, time_max_s: u64 },
    /// Starts clients that read one byte a second.
    StartSlow { count: u32, server: String, version: u64 },
    /// Counters so far.
    Count,
}

/// Clients to start.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Start {
    pub(crate) count: u32,
    /// The first of all clients that decode and keep everything.
    pub(crate) checked: u32,
    /// The first of all clients that follow their Node, too.
    pub(crate) nodes: u32,
    /// They follow the policy of their pod and the slices that it names, instead of Services.
    pub(crate) has_policies: bool,
    /// Milliseconds over which they start.
    pub(crate) spread_ms: u64,
    pub(crate) kubeconfig: String,
    /// Addresses in order of preference.
    pub(crate) servers: Vec<String>,
}

/// Objects that clients should have.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Expected {
    pub(crate) services: usize,
    pub(crate) slices: usize,
    /// Version and first address of slices that have changed.
    pub(crate) changed: BTreeMap<String, (u64, String)>,
}

/// Answer of the load generator.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) enum Answer {
    Done,
    /// Number of clients that have what was waited for, of how many, and the moment at which the last had it.
    Reached {
        count: usize,
        of: usize,
        at_ns: u64,
    },
    Histograms(Histograms),
    /// Number of clients that were compared, and differences.
    Differences(usize, Vec<String>),
    Counts(Counts),
}

/// Counters of the load generator.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Counts {
    /// Lists that clients began.
    pub(crate) lists: u64,
    /// Events that clients got.
    pub(crate) events: u64,
    /// Bytes that slow clients have read.
    pub(crate) slow_bytes: u64,
    /// Slow clients whose connection has ended.
    pub(crate) slow_ended: u64,
}
