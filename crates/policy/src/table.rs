//! A compiled policy in the kernel's maps, and the changes that turn one policy into another.
//!
//! ```text
//! PEERS (address) or RANGES (longest prefix) -> runs of both directions -> INTERVALS (sorted, each with a verdict)
//! ```
//!
//! Each pair of a peer and a port turns from the old to the new verdict at one instant: intervals are written before
//! they are referred to and are never changed, and the order of all other changes is such that no address is looked up
//! in a state between. When intervals or peers no longer fit, new maps are filled beside those in force, and put in
//! their place by one write.

mod diff;
mod intervals;
mod operation;
#[cfg(test)]
mod tests;

use cproxy_core::{Address, AddressRange};

pub use self::operation::{INTERVALS_MAX, Operation, PEERS_MAX, Run, Runs};
use self::{
    diff::{Change, changes},
    intervals::Intervals,
};
use crate::{
    compile::Compiled,
    model::{Direction, Directions},
};

/// The least room for peers and intervals.
const ROOM_MIN: u32 = 64;

/// The policy does not fit into the kernel's maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyTooLarge {
    /// It has more single addresses than the map takes.
    #[error("its sets have {0} addresses, more than {PEERS_MAX}")]
    Peers(usize),
    /// Its peers have more intervals of ports than the map takes.
    #[error("its peers have more than {INTERVALS_MAX} different ranges of ports together")]
    Intervals,
}

/// Policy in the kernel's maps.
#[derive(Debug, Default)]
pub struct PolicyTable {
    /// `None`: the maps in force are not this table's.
    written: Option<Written>,
}

/// Contents of the maps in force.
#[derive(Debug)]
struct Written {
    enforced: Directions,
    peers: Vec<(Address, Runs)>,
    ranges: Vec<(AddressRange, Runs)>,
    peers_room: u32,
    intervals: Intervals,
}

/// Contents of maps that are wanted.
struct Wanted {
    enforced: Directions,
    peers: Vec<(Address, Runs)>,
    ranges: Vec<(AddressRange, Runs)>,
}

impl PolicyTable {
    /// Changes that put a policy in force, in their order. The table takes them as done: after one that fails, call
    /// [`Self::forget`].
    ///
    /// # Errors
    /// The policy does not fit. The maps stay as they are.
    pub fn plan(&mut self, compiled: &Compiled) -> Result<Vec<Operation>, PolicyTooLarge> {
        if compiled.singles.len() > PEERS_MAX as usize {
            return Err(PolicyTooLarge::Peers(compiled.singles.len()));
        }
        if let Some(written) = &mut self.written
            && let Some(operations) = written.change(compiled)
        {
            return Ok(operations);
        }
        // Some of the intervals may have been planned, and are not written.
        self.forget();
        let (written, operations) = Written::anew(compiled).ok_or(PolicyTooLarge::Intervals)?;
        self.written = Some(written);
        Ok(operations)
    }

    /// Takes the maps in force as unknown: the next plan makes new ones.
    pub fn forget(&mut self) {
        self.written = None;
    }
}

impl Written {
    /// Changes of the maps in force; `None` if the policy does not fit into them.
    fn change(&mut self, compiled: &Compiled) -> Option<Vec<Operation>> {
        let mut operations = Vec::new();
        let before = self.intervals.len();
        let wanted = Wanted::of(compiled, &mut self.intervals)?;
        // Peers that enter are there beside those that leave.
        let peers = changes(&self.peers, &wanted.peers);
        let most = self.peers.len() + peers.iter().filter(|(address, _)| !has(&self.peers, address)).count();
        if most > self.peers_room as usize {
            return None;
        }
        let ranges = changes(&self.ranges, &wanted.ranges);
        let both = Directions {
            ingress: self.enforced.ingress && wanted.enforced.ingress,
            egress: self.enforced.egress && wanted.enforced.egress,
        };
        // A direction that is no longer enforced is open at once, and a new one is closed when all is written.
        if both != self.enforced {
            operations.push(Operation::Enforce(both));
        }
        operations.extend(self.intervals.since(before));
        operations.extend(in_order(&peers, ranges));
        if wanted.enforced != both {
            operations.push(Operation::Enforce(wanted.enforced));
        }
        Wanted { enforced: self.enforced, peers: self.peers, ranges: self.ranges } = wanted;
        Some(operations)
    }

    /// New maps with all of a policy; `None` if they cannot be as large.
    fn anew(compiled: &Compiled) -> Option<(Self, Vec<Operation>)> {
        let mut intervals = Intervals::unbounded();
        let wanted = Wanted::of(compiled, &mut intervals)?;
        let intervals_room = room(intervals.len(), INTERVALS_MAX);
        let peers_room = room(wanted.peers.len() as u32, PEERS_MAX);
        intervals.bound(intervals_room);
        let mut operations = vec![Operation::NewMaps { peers: peers_room, intervals: intervals_room }];
        operations.extend(intervals.since(0));
        operations.extend(wanted.ranges.iter().map(|&(range, runs)| Operation::SetRange(range, runs)));
        operations.extend(wanted.peers.iter().map(|&(address, runs)| Operation::SetPeer(address, runs)));
        operations.push(Operation::Enforce(wanted.enforced));
        let Wanted { enforced, peers, ranges } = wanted;
        Some((Self { enforced, peers, ranges, peers_room, intervals }, operations))
    }
}

impl Wanted {
    /// The contents of a policy, with runs of these intervals; `None` if they do not take all of them.
    fn of(compiled: &Compiled, intervals: &mut Intervals) -> Option<Self> {
        let enforced = enforced(compiled);
        let mut classes = Vec::with_capacity(compiled.classes.len());
        for class in &compiled.classes {
            let mut run = |direction: Direction, run: u32| {
                let of_class = compiled.runs.get(run as usize).map_or(&[][..], |run| run);
                match (enforced.has(direction), compiled.isolated.has(direction)) {
                    (false, _) => Some(Run::default()),
                    (true, true) => intervals.run(of_class),
                    (true, false) => intervals.run(&intervals::with_all_else_allowed(of_class)),
                }
            };
            let ingress = run(Direction::Ingress, class.ingress)?;
            classes.push(Runs { ingress, egress: run(Direction::Egress, class.egress)? });
        }
        let runs = |class: u32| classes.get(class as usize).copied().unwrap_or_default();
        let everywhere = AddressRange::new(Address::from_octets([0; 16]), 0);
        let others = Some((everywhere, runs(compiled.default_class)));
        let others = others.filter(|_| compiled.prefixes.iter().all(|(range, _)| *range != everywhere));
        let mut ranges: Vec<_> = compiled.prefixes.iter().map(|(range, class)| (*range, runs(*class))).collect();
        ranges.extend(others);
        ranges.sort_unstable();
        let peers = compiled.singles.iter().map(|(address, class)| (*address, runs(*class))).collect();
        Some(Self { enforced, peers, ranges })
    }
}

/// Directions in which something is denied.
fn enforced(compiled: &Compiled) -> Directions {
    let denies = |run: u32| {
        let run = compiled.runs.get(run as usize);
        run.is_some_and(|run| run.iter().any(|interval| interval.decision.verdict == crate::Verdict::Deny))
    };
    Directions {
        ingress: compiled.isolated.ingress || compiled.classes.iter().any(|class| denies(class.ingress)),
        egress: compiled.isolated.egress || compiled.classes.iter().any(|class| denies(class.egress)),
    }
}

/// Changes of peers and ranges in the order in which no address is looked up in a state between: an address gets its
/// new runs by the first of them that concerns it, and none that follows changes them.
fn in_order(
    peers: &[(Address, Change)],
    mut ranges: Vec<(AddressRange, Change)>,
) -> impl Iterator<Item = Operation> + use<'_> {
    // The narrowest first, and among those that go the widest.
    ranges.sort_unstable_by_key(|(range, _)| std::cmp::Reverse(range.fixed_bits()));
    let set_peers = peers.iter().filter_map(|&(address, change)| Some(Operation::SetPeer(address, change?)));
    let removed_peers = peers.iter().filter(|(_, change)| change.is_none());
    let removed_peers = removed_peers.map(|&(address, _)| Operation::RemovePeer(address));
    let removed: Vec<_> = ranges.iter().rev().filter(|(_, change)| change.is_none()).map(|(range, _)| *range).collect();
    let set_ranges = ranges.into_iter().filter_map(|(range, change)| Some(Operation::SetRange(range, change?)));
    set_peers.chain(set_ranges).chain(removed.into_iter().map(Operation::RemoveRange)).chain(removed_peers)
}

fn has(peers: &[(Address, Runs)], address: &Address) -> bool {
    peers.binary_search_by_key(address, |(address, _)| *address).is_ok()
}

/// Room for so many entries and as many more.
fn room(entries: u32, most: u32) -> u32 {
    entries.saturating_mul(2).clamp(ROOM_MIN, most).next_power_of_two()
}
