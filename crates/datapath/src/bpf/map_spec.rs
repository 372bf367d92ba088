//! The pinned maps of this layout: type, sizes and flags of each.

use aya::maps::{MapInfo, MapType};
use aya_obj::generated::{BPF_F_INNER_MAP, BPF_F_MMAPABLE, BPF_F_NO_PREALLOC};
use cproxy_ebpf::{
    AFFINITY_MAX, AffinityEntry, AffinityKey, BACKENDS_MIN, Backend, COUNTERS_MAX, FRONTENDS_MIN, FlowKey, FlowValue,
    FrontendKey, OWN_ADDRESS_V6, OwnAddress, SETS_MIN, Set, SetId, Settings, SocketState, TCP_FULL_BYTES,
    TCP_LEVELS_MORE, TCP_PLACES, TURNS_MAX, Translation, UDP_FLOWS_MAX, UdpState, tcp_level_places,
};

/// Type, sizes and flags of a map (`BPF_MAP_CREATE`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MapShape {
    pub(super) map_type: MapType,
    pub(super) key_bytes: u32,
    pub(super) value_bytes: u32,
    pub(super) entries: u32,
    pub(super) flags: u32,
}

impl MapShape {
    /// The shape of a map; `None` if its type is one that aya does not know.
    pub(super) fn of(info: &MapInfo) -> Option<Self> {
        Some(Self {
            map_type: info.map_type().ok()?,
            key_bytes: info.key_size(),
            value_bytes: info.value_size(),
            entries: info.max_entries(),
            flags: info.map_flags(),
        })
    }
}

/// A map that the agent replaces by a larger or a smaller one.
#[derive(Clone, Copy, Debug)]
pub(super) struct MapSpec {
    pub(super) name: &'static str,
    /// The map in force is pinned under one of these names.
    pub(super) pins: [&'static str; 2],
    /// With the least number of entries.
    pub(super) shape: MapShape,
}

pub(super) const FRONTENDS: MapSpec = MapSpec {
    name: "FRONTENDS",
    pins: ["FRONTENDS_0", "FRONTENDS_1"],
    shape: MapShape {
        map_type: MapType::Hash,
        key_bytes: size_of::<FrontendKey>() as u32,
        value_bytes: size_of::<SetId>() as u32,
        entries: FRONTENDS_MIN,
        flags: BPF_F_NO_PREALLOC,
    },
};

pub(super) const SETS: MapSpec = MapSpec {
    name: "SETS",
    pins: ["SETS_0", "SETS_1"],
    shape: array(size_of::<Set>(), SETS_MIN, BPF_F_MMAPABLE | BPF_F_INNER_MAP),
};

pub(super) const BACKENDS: MapSpec = MapSpec {
    name: "BACKENDS",
    pins: ["BACKENDS_0", "BACKENDS_1"],
    shape: array(size_of::<Backend>(), BACKENDS_MIN, BPF_F_MMAPABLE | BPF_F_INNER_MAP),
};

/// The maps that can be replaced.
pub(super) const RESIZABLE: [MapSpec; 3] = [FRONTENDS, SETS, BACKENDS];

/// The map that wakes the agent when a TCP socket has found no place.
pub(super) const TCP_FULL: &str = "TCP_FULL";
/// The owners of the further levels of places for TCP sockets, and their peers. Level 1 is element 0.
pub(super) const TCP_MORE_OWNERS: &str = "TCP_MORE_OWNERS";
pub(super) const TCP_MORE_PEERS: &str = "TCP_MORE_PEERS";

/// A further level of places for TCP sockets: maps that exist while there are many connections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LevelSpec {
    pub(super) level: u32,
    /// Names under which owners and peers are pinned.
    pub(super) pins: [&'static str; 2],
    pub(super) owners: MapShape,
    pub(super) peers: MapShape,
}

impl LevelSpec {
    /// Its element in the arrays of maps.
    pub(super) fn element(self) -> u32 {
        self.level - 1
    }
}

/// The further levels.
pub(super) const TCP_LEVELS: [LevelSpec; TCP_LEVELS_MORE as usize] =
    [level(1, ["TCP_OWNERS_1", "TCP_PEERS_1"]), level(2, ["TCP_OWNERS_2", "TCP_PEERS_2"])];

const fn level(level: u32, pins: [&'static str; 2]) -> LevelSpec {
    let places = tcp_level_places(level);
    LevelSpec {
        level,
        pins,
        owners: array(size_of::<u64>(), places, BPF_F_MMAPABLE | BPF_F_INNER_MAP),
        peers: array(size_of::<Translation>(), places, BPF_F_INNER_MAP),
    }
}

/// The maps that the programs name; those that can be replaced are in a map of one map.
pub(super) const NAMED: [(&str, MapShape); 16] = [
    (FRONTENDS.name, OUTER),
    (SETS.name, OUTER),
    (BACKENDS.name, OUTER),
    ("SETTINGS", array(size_of::<Settings>(), 1, BPF_F_MMAPABLE)),
    ("OWN_ADDRESSES", array(size_of::<OwnAddress>(), OWN_ADDRESS_V6 + 1, BPF_F_MMAPABLE)),
    ("TCP_OWNERS", array(size_of::<u64>(), TCP_PLACES + 1, BPF_F_MMAPABLE)),
    ("TCP_PEERS", array(size_of::<Translation>(), TCP_PLACES, 0)),
    (TCP_MORE_OWNERS, MapShape { entries: TCP_LEVELS_MORE, ..OUTER }),
    (TCP_MORE_PEERS, MapShape { entries: TCP_LEVELS_MORE, ..OUTER }),
    (TCP_FULL, MapShape { map_type: MapType::RingBuf, key_bytes: 0, ..array(0, TCP_FULL_BYTES, 0) }),
    ("SOCKETS", socket_storage(size_of::<SocketState>())),
    ("UDP_SOCKETS", socket_storage(size_of::<UdpState>())),
    ("UDP_FLOWS", lru_hash(size_of::<FlowKey>(), size_of::<FlowValue>(), UDP_FLOWS_MAX)),
    ("AFFINITY", lru_hash(size_of::<AffinityKey>(), size_of::<AffinityEntry>(), AFFINITY_MAX)),
    ("TURNS", array(size_of::<u64>(), TURNS_MAX, 0)),
    ("COUNTERS", MapShape { map_type: MapType::PerCpuArray, ..array(size_of::<u64>(), COUNTERS_MAX, 0) }),
];

/// The map of counters by frontend, which the tracing set alone has, and its pin.
pub(super) const SERVICE_COUNTS: &str = "SERVICE_COUNTS";

const OUTER: MapShape = MapShape { map_type: MapType::ArrayOfMaps, ..array(size_of::<u32>(), 1, 0) };

const fn array(value_bytes: usize, entries: u32, flags: u32) -> MapShape {
    MapShape { map_type: MapType::Array, key_bytes: 4, value_bytes: value_bytes as u32, entries, flags }
}

const fn socket_storage(value_bytes: usize) -> MapShape {
    MapShape { map_type: MapType::SkStorage, ..array(value_bytes, 0, BPF_F_NO_PREALLOC) }
}

const fn lru_hash(key_bytes: usize, value_bytes: usize, entries: u32) -> MapShape {
    let (key_bytes, value_bytes) = (key_bytes as u32, value_bytes as u32);
    MapShape { map_type: MapType::LruHash, key_bytes, value_bytes, entries, flags: 0 }
}
