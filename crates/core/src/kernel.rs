//! Writes to the kernel's table, and the content that is read back from it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{Address, Backend, Frontend};

/// Policy that chooses the backend of a new connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Balance {
    /// Random, with equal weight.
    #[default]
    Random,
    /// Round robin.
    RoundRobin,
}

/// One write to the kernel's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Fills slots that no set refers to.
    WriteBackends {
        /// First slot.
        first_slot: u32,
        /// Backends for the slots.
        members: Members,
        /// Whether the programs count the calls that are sent to them.
        are_counted: bool,
    },
    /// Points a set at these slots; atomic.
    PublishSet {
        /// Id of the set.
        set: u32,
        /// First slot of the set.
        first_slot: u32,
        /// Number of eligible backends.
        eligible: u16,
        /// Number of backends after them that still serve.
        serving: u16,
        /// See [`Members::drops`].
        drops: bool,
    },
    /// Sets or removes the session affinity of a set; atomic.
    SetAffinity {
        /// Id of the set.
        set: u32,
        /// Session affinity of the set.
        affinity: Affinity,
    },
    /// Inserts a frontend or replaces its value.
    PutFrontend {
        /// Key of the element.
        frontend: Frontend,
        /// Id of the frontend's set.
        set: u32,
    },
    /// Deletes a frontend.
    DeleteFrontend {
        /// Key of the element.
        frontend: Frontend,
    },
    /// Raises the epoch, so that sockets look up again whether their backends serve: backends or frontends have gone
    /// since the last time.
    RaiseEpoch,
    /// Makes an address known as a ClusterIP: its ports without a frontend refuse connections.
    PutAddress(Address),
    /// Removes an address from the known ClusterIPs.
    DeleteAddress(Address),
    /// Replaces the filter of addresses that may be in the table.
    SetFilter(Filter),
    /// Sets the seed of the choice of backends.
    SetSeed(u64),
    /// Sets the policy that chooses backends.
    SetBalance(Balance),
    /// Replaces the exclusions.
    SetExclusions(Exclusions),
    /// Replaces the VM's addresses, at most one of each family, to which datagram sockets are connected that are to be
    /// refused; atomic for each family.
    SetOwnAddresses(Vec<Address>),
    /// Frees places of TCP sockets that still have these owners.
    FreeTcpPlaces(Vec<TcpPlace>),
    /// Adds a level of places for TCP sockets, or opens the last one again. Does nothing if all levels exist.
    GrowTcpPlaces,
    /// Closes the last further level of places for TCP sockets, moves peers to the levels below it, and removes it if
    /// it then has none. Includes an [`Op::Drain`]. Does nothing without a further level.
    ShrinkTcpPlaces,
    /// Waits for a grace period: every program that runs now has ended.
    Drain,
    /// Replaces the map of the frontends by one of this size and content; atomic, and includes an [`Op::Drain`].
    ReplaceFrontends {
        /// Size of the new map, in elements.
        capacity: u32,
        /// All frontends and the ids of their sets.
        frontends: Vec<(Frontend, u32)>,
        /// All addresses that are known as ClusterIPs.
        addresses: Vec<Address>,
    },
    /// Resizes the map of sets to ids below this; sets that stay do not change. Atomic, and includes an [`Op::Drain`].
    ResizeSets(u32),
    /// Resizes the map of backends to this many slots; slots that stay keep their content. Atomic, and includes an
    /// [`Op::Drain`].
    ResizeBackends(u32),
}

/// Place of a TCP socket's translation, and its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpPlace {
    /// Number of the place in the maps' layout: its level and its index in it.
    pub place: u32,
    /// Cookie of the socket that owns it.
    pub owner: u64,
}

/// Capacity of the maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Frontends and addresses together.
    pub frontends: u32,
    /// Sets, including the one for unknown ports: all ids are below this.
    pub sets: u32,
    /// Backend slots.
    pub slots: u32,
}

/// Backends of a set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Members {
    /// Eligible backends, then those that only keep their connections; each of the two runs is sorted.
    pub backends: Arc<[Backend]>,
    /// Number of eligible backends.
    pub eligible: usize,
    /// Whether connections are dropped instead of refused while no backend is eligible.
    pub drops: bool,
}

impl Members {
    /// Members from the two runs, both sorted.
    #[must_use]
    pub fn new(eligible: &[Backend], kept: &[Backend], drops: bool) -> Self {
        let backends = eligible.iter().chain(kept).copied().collect();
        Self { backends, eligible: eligible.len(), drops }
    }

    /// Backends that get new connections.
    #[must_use]
    pub fn eligible(&self) -> &[Backend] {
        self.backends.get(..self.eligible).unwrap_or_default()
    }

    /// Backends that get no new connections but keep those they have.
    #[must_use]
    pub fn kept(&self) -> &[Backend] {
        self.backends.get(self.eligible..).unwrap_or_default()
    }

    /// Whether a backend is in either run.
    #[must_use]
    pub fn has(&self, backend: &Backend) -> bool {
        [self.eligible(), self.kept()].iter().any(|run| run.binary_search(backend).is_ok())
    }
}

/// Session affinity of a set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Affinity {
    /// Identifier under which the clients of the set are remembered.
    pub id: u32,
    /// Time for which a client keeps its backend; 0 without affinity.
    pub seconds: u32,
}

impl Affinity {
    /// Time for which a client keeps its backend; `None` without affinity.
    #[must_use]
    pub fn seconds(self) -> Option<u32> {
        (self.seconds != 0).then_some(self.seconds)
    }
}

/// One bit for each address in the table; several addresses share a bit. An address whose bit is clear is not in the
/// table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Bits of IPv4 addresses.
    pub v4: u64,
    /// Bits of IPv6 addresses.
    pub v6: u64,
}

/// Sockets and destinations that the programs leave alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exclusions {
    /// Processes in or below these cgroups.
    pub cgroups: Vec<ExcludedCgroup>,
    /// Processes of these users.
    pub uids: Vec<u32>,
    /// Destinations with these ports.
    pub ports: Vec<u16>,
    /// Sockets in other network namespaces than that with this cookie, if there is one.
    pub netns_others_than: Option<u64>,
}

/// cgroup that is left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExcludedCgroup {
    /// Inode number of the cgroup's directory.
    pub id: u64,
    /// Number of cgroups above it.
    pub level: u32,
}

/// Room reserved for the API server's Service.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reserve {
    /// Sets.
    pub sets: u32,
    /// Backend slots.
    pub slots: u32,
}

/// Limits on the size of the maps and of a set.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of frontends and addresses together.
    pub frontends: u32,
    /// Maximum number of sets; ids start at 1.
    pub sets: u32,
    /// Maximum number of backend slots.
    pub slots: u32,
    /// Maximum number of frontends of external addresses and node ports.
    pub external_frontends: u32,
    /// Maximum number of backend slots of one Service.
    pub service_slots: u32,
    /// Sets and backend slots reserved for the API server's Service.
    pub reserved: Reserve,
    /// Whether the map of frontends may be replaced by one of the same size: not for a while after memory ran out.
    pub may_replace: bool,
    /// Minimum size of each map.
    pub least: Capacity,
    /// Maximum number of backends in one run of a set.
    pub run_backends: usize,
    /// Function from an address to its bit in the filter.
    pub filter_bit: fn(Address) -> u64,
}

/// Content of the kernel's table, as read back from the maps.
#[derive(Clone, Debug, Default)]
pub struct KernelTable {
    /// Frontends and the ids of their sets.
    pub frontends: BTreeMap<Frontend, u32>,
    /// Addresses that are known as ClusterIPs.
    pub addresses: BTreeSet<Address>,
    /// Sets that frontends refer to, by id.
    pub sets: BTreeMap<u32, KernelSet>,
    /// Filter of addresses.
    pub filter: Filter,
    /// Current capacity of the maps.
    pub capacity: Capacity,
    /// Whether no program has ever read the table.
    pub is_new: bool,
    /// Whether there are keys that no agent writes, or the set of unknown ports is not empty.
    pub is_damaged: bool,
}

/// Set as read back from the maps.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct KernelSet {
    /// First slot of the set.
    pub first_slot: u32,
    /// Backends of the set.
    pub members: Members,
    /// Session affinity of the set.
    pub affinity: Affinity,
}
