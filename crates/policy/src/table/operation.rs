//! Changes of the kernel's maps, and the runs of addresses in them.

use cproxy_core::{Address, AddressRange};

use crate::{compile::Interval, model::Directions};

/// Peers that maps have room for, at most.
pub const PEERS_MAX: u32 = 1 << 17;
/// Intervals that maps have room for, at most: a slot has 20 bits in the kernel.
pub const INTERVALS_MAX: u32 = 1 << 20;

/// Intervals of a direction, one after another in the map of intervals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// Slot of the first interval.
    pub first: u32,
    /// Number of intervals. Where none has a port, the port is denied.
    pub length: u16,
}

/// Runs of a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Runs {
    /// Run for traffic to the pod.
    pub ingress: Run,
    /// Run for traffic from the pod.
    pub egress: Run,
}

/// Change of the kernel's maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Makes empty maps beside those in force. All that follows is about them.
    NewMaps {
        /// Room for peers.
        peers: u32,
        /// Room for intervals.
        intervals: u32,
    },
    /// Writes an interval to a slot that has had none.
    Interval(u32, Interval),
    /// Gives a single address its runs.
    SetPeer(Address, Runs),
    /// Leaves a single address to the ranges.
    RemovePeer(Address),
    /// Gives a range its runs.
    SetRange(AddressRange, Runs),
    /// Leaves a range to the wider ones.
    RemoveRange(AddressRange),
    /// Enforces verdicts in these directions alone, by the maps that were made last.
    Enforce(Directions),
}
