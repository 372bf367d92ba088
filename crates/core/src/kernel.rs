//! What the table says to the kernel, and what it reads back from there.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{Address, Backend, Frontend};

/// How a backend is chosen for a new connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Balance {
    /// Any, with equal weight.
    #[default]
    Random,
    /// One after the other.
    RoundRobin,
}

/// One write to the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Fill slots that no set refers to.
    WriteBackends {
        /// The first slot.
        first_slot: u32,
        /// What goes there.
        members: Members,
    },
    /// Make a set consist of these slots; atomic.
    PublishSet {
        /// The set.
        set: u32,
        /// Its first slot.
        first_slot: u32,
        /// How many eligible backends it has.
        eligible: u16,
        /// How many backends after them still serve.
        serving: u16,
        /// As [`Members::drops`].
        drops: bool,
    },
    /// Give a set session affinity, or take it away; atomic.
    SetAffinity {
        /// The set.
        set: u32,
        /// What it gets.
        affinity: Affinity,
    },
    /// Insert a frontend, or replace its value.
    PutFrontend {
        /// The key.
        frontend: Frontend,
        /// The set it has.
        set: u32,
    },
    /// Delete a frontend.
    DeleteFrontend {
        /// The key.
        frontend: Frontend,
    },
    /// Have sockets look anew whether their backends serve: some have gone, or their frontends have, since the last time.
    RaiseEpoch,
    /// Make an address known as a ClusterIP: ports that it has no frontend for are refused.
    PutAddress(Address),
    /// Forget an address.
    DeleteAddress(Address),
    /// Say which addresses may be in the table.
    SetFilter(Filter),
    /// Mix this into every choice.
    SetSeed(u64),
    /// Choose backends so.
    SetBalance(Balance),
    /// Leave these alone.
    SetExclusions(Exclusions),
    /// Wait until every program that runs now has ended.
    Drain,
    /// Put a map of this size, with this content, in the place of the one that has the frontends; atomic, and as
    /// [`Op::Drain`] when it is done.
    ReplaceFrontends {
        /// Its size.
        room: u32,
        /// All frontends and their sets.
        frontends: Vec<(Frontend, u32)>,
        /// All addresses that are known as ClusterIPs.
        addresses: Vec<Address>,
    },
    /// Make room for sets with ids below this; those stay as they are. Atomic, and as [`Op::Drain`] when it is done.
    ResizeSets(u32),
    /// Make so many backend slots; those that stay keep their content. Atomic, and as [`Op::Drain`] when it is done.
    ResizeBackends(u32),
}

/// How much the maps can hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Frontends and addresses together.
    pub frontends: u32,
    /// Sets, with the one that unknown ports have: what ids are less than.
    pub sets: u32,
    /// Backend slots.
    pub slots: u32,
}

/// What a set consists of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Members {
    /// First the eligible backends, then those that still serve; each of the two runs is sorted.
    pub backends: Arc<[Backend]>,
    /// How many are eligible.
    pub eligible: usize,
    /// Whether connections are dropped, not refused, while none is eligible.
    pub drops: bool,
}

impl Members {
    /// From its two runs, both sorted.
    #[must_use]
    pub fn new(eligible: &[Backend], serving: &[Backend], drops: bool) -> Self {
        let backends = eligible.iter().chain(serving).copied().collect();
        Self { backends, eligible: eligible.len(), drops }
    }

    /// The backends that get new connections.
    #[must_use]
    pub fn eligible(&self) -> &[Backend] {
        self.backends.get(..self.eligible).unwrap_or_default()
    }

    /// The backends that only keep those they have.
    #[must_use]
    pub fn serving(&self) -> &[Backend] {
        self.backends.get(self.eligible..).unwrap_or_default()
    }

    /// Whether a backend is in either run.
    #[must_use]
    pub fn has(&self, backend: &Backend) -> bool {
        [self.eligible(), self.serving()].iter().any(|run| run.binary_search(backend).is_ok())
    }
}

/// Session affinity of a set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Affinity {
    /// Under which name clients are remembered.
    pub id: u32,
    /// For how long; 0: there is no affinity.
    pub seconds: u32,
}

impl Affinity {
    /// For how long, `None` without affinity.
    #[must_use]
    pub fn seconds(self) -> Option<u32> {
        (self.seconds != 0).then_some(self.seconds)
    }
}

/// One bit for each address in the table, many addresses to a bit: what has none is not in the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// For IPv4 addresses.
    pub v4: u64,
    /// For IPv6 addresses.
    pub v6: u64,
}

/// Whose sockets, and which destinations, the programs leave alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exclusions {
    /// Processes in or below these cgroups.
    pub cgroups: Vec<ExcludedCgroup>,
    /// Processes of these users.
    pub uids: Vec<u32>,
    /// Destinations with these ports.
    pub ports: Vec<u16>,
}

/// A cgroup that is left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExcludedCgroup {
    /// The inode number of its directory.
    pub id: u64,
    /// How many cgroups are above it.
    pub level: u32,
}

/// Room that only the API server's Service may take.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reserve {
    /// Sets.
    pub sets: u32,
    /// Backend slots.
    pub slots: u32,
}

/// How far the maps may grow, and what a set is like.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most frontends and addresses together.
    pub frontends: u32,
    /// Most sets; their ids start at 1.
    pub sets: u32,
    /// Most backend slots.
    pub slots: u32,
    /// Most frontends of external addresses and node ports.
    pub external_frontends: u32,
    /// Most backend slots of one Service.
    pub service_slots: u32,
    /// Sets, and backend slots, that only the API server's Service may take.
    pub reserved: Reserve,
    /// The map with the frontends may be replaced by one of the same size: not for a while after there was no memory.
    pub may_replace: bool,
    /// No map is made smaller than this.
    pub least: Room,
    /// Most backends in one run of a set.
    pub run_backends: usize,
    /// Which bit of the filter an address has.
    pub filter_bit: fn(Address) -> u64,
}

/// What the kernel holds, as read back from the maps.
#[derive(Clone, Debug, Default)]
pub struct KernelTable {
    /// The frontends and their sets.
    pub frontends: BTreeMap<Frontend, u32>,
    /// The addresses that are known as ClusterIPs.
    pub addresses: BTreeSet<Address>,
    /// The sets that frontends refer to.
    pub sets: BTreeMap<u32, KernelSet>,
    /// The filter.
    pub filter: Filter,
    /// How much the maps can hold now.
    pub room: Room,
    /// No program has ever read it.
    pub is_new: bool,
}

/// A set as read back from the maps.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct KernelSet {
    /// Its first slot.
    pub first_slot: u32,
    /// Its backends.
    pub members: Members,
    /// Its session affinity.
    pub affinity: Affinity,
}
