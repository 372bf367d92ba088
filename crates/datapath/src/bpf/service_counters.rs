//! Counters by frontend, which the tracing set of the programs keeps: for a tracer as long as it runs, and for an agent
//! with `--service-counters` all the time. The agent's map is pinned, and its tracers count in it, too.

use std::{collections::BTreeMap, io, ops::AddAssign, path::PathBuf};

use aya::maps::{Map, MapData, MapError, MapInfo, MapType, PerCpuHashMap};
use cproxy_core::{Address, Frontend, sorted_map};
use cproxy_ebpf::{
    FrontendKey, PROTOCOL_ANY,
    observation::{COUNTED_FRONTENDS_MAX, COUNTS, Count},
};

use super::{
    encoding,
    error::root_cause,
    map_spec::{MapShape, SERVICE_COUNTS},
    open::{Access, open_map},
    pins::PinDir,
};

/// Entries that each CPU keeps aside, and that must be free before one takes more; otherwise entries in use are evicted
/// (kernel/bpf/bpf_lru_list.c, `LOCAL_FREE_TARGET`).
const ENTRIES_ASIDE: u32 = 128;

/// Shape of the map: [`COUNTED_FRONTENDS_MAX`] entries are in use before one is evicted.
fn shape() -> MapShape {
    MapShape {
        map_type: MapType::LruPerCpuHash,
        key_bytes: size_of::<FrontendKey>() as u32,
        value_bytes: size_of::<[u64; COUNTS]>() as u32,
        entries: entries(),
        flags: 0,
    }
}

/// Number of the map's entries on this machine.
pub(super) fn entries() -> u32 {
    // Without /sys, the map has room for one CPU.
    let cpus = aya::util::nr_cpus().map_or(1, |cpus| cpus as u32);
    COUNTED_FRONTENDS_MAX + ENTRIES_ASIDE * cpus
}

/// Opened map.
pub(super) type CountsMap = PerCpuHashMap<MapData, FrontendKey, [u64; COUNTS]>;

/// Calls to a frontend since its counters began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceCounts {
    /// Connects, and first datagrams of a flow, that were sent to a backend.
    pub connections: u64,
    /// Calls that failed with ECONNREFUSED.
    pub refusals: u64,
    /// Calls that failed with EHOSTUNREACH.
    pub drops: u64,
}

impl AddAssign for ServiceCounts {
    fn add_assign(&mut self, other: Self) {
        self.connections += other.connections;
        self.refusals += other.refusals;
        self.drops += other.drops;
    }
}

impl ServiceCounts {
    /// The part that was counted after an earlier state; `None` if that state's counters are not these.
    fn since(self, earlier: Self) -> Option<Self> {
        Some(Self {
            connections: self.connections.checked_sub(earlier.connections)?,
            refusals: self.refusals.checked_sub(earlier.refusals)?,
            drops: self.drops.checked_sub(earlier.drops)?,
        })
    }
}

/// Counters, summed over CPUs. Frontends without calls are not among them, nor are those that were idle for long, if
/// there are very many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceCounters {
    /// Calls to frontends.
    pub frontends: BTreeMap<Frontend, ServiceCounts>,
    /// Calls to ports that a ClusterIP does not have, by ClusterIP.
    pub addresses: BTreeMap<Address, ServiceCounts>,
}

impl ServiceCounters {
    /// Counters of the agent; `None` unless it keeps any (`--service-counters`).
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn read(pins: &PinDir) -> io::Result<Option<Self>> {
        pinned(pins, Access::ReadOnly)?.map(|map| Self::of(&map)).transpose()
    }

    pub(super) fn of(map: &CountsMap) -> io::Result<Self> {
        let mut counters = Self::default();
        for key in map.keys() {
            let key = key.map_err(failed)?;
            let values = match map.get(&key, 0) {
                Ok(values) => values,
                // Evicted meanwhile.
                Err(MapError::KeyNotFound) => continue,
                Err(error) => return Err(failed(error)),
            };
            let sum = |count: Count| values.iter().filter_map(|counts| counts.get(count as usize)).sum();
            let (connections, refusals, drops) = (sum(Count::Connections), sum(Count::Refusals), sum(Count::Drops));
            let counts = ServiceCounts { connections, refusals, drops };
            if key.protocol == PROTOCOL_ANY {
                counters.addresses.insert(Address::from_words(key.address), counts);
            } else if let Some(frontend) = encoding::frontend(&key) {
                counters.frontends.insert(frontend, counts);
            }
        }
        Ok(counters)
    }

    /// The part that was counted after an earlier state. Counters that have begun again since, such as those of a
    /// Service that was deleted and made anew, leave that state.
    pub(super) fn since(self, earlier: &mut Self) -> Self {
        let Self { frontends, addresses } = self;
        Self {
            frontends: since(frontends, &mut earlier.frontends),
            addresses: since(addresses, &mut earlier.addresses),
        }
    }
}

fn since<K: Ord>(
    now: BTreeMap<K, ServiceCounts>,
    earlier: &mut BTreeMap<K, ServiceCounts>,
) -> BTreeMap<K, ServiceCounts> {
    earlier.retain(|key, earlier| now.get(key).is_some_and(|now| now.since(*earlier).is_some()));
    let counted = now.into_iter().map(|(key, now)| {
        let counted = earlier.get(&key).and_then(|earlier| now.since(*earlier));
        (key, counted.unwrap_or(now))
    });
    sorted_map(counted.filter(|(_, counts)| *counts != ServiceCounts::default()))
}

/// Path of the agent's map.
pub(super) fn path(pins: &PinDir) -> PathBuf {
    pins.object(SERVICE_COUNTS)
}

/// The agent's map, if it has one.
pub(super) fn pinned(pins: &PinDir, access: Access) -> io::Result<Option<CountsMap>> {
    if !is_pinned(pins)? {
        return Ok(None);
    }
    let map = open_map(&path(pins), access).map_err(failed)?;
    Ok(Some(Map::PerCpuLruHashMap(map).try_into().map_err(failed)?))
}

/// Whether the agent's map is there. A map of another build, with another shape, counts as absent.
pub(super) fn is_pinned(pins: &PinDir) -> io::Result<bool> {
    let path = path(pins);
    if !path.exists() {
        return Ok(false);
    }
    let info = MapInfo::from_pin(&path).map_err(failed)?;
    Ok(MapShape::of(&info) == Some(shape()))
}

fn failed(error: MapError) -> io::Error {
    match error {
        MapError::SyscallError(error) => error.io_error,
        error => io::Error::other(root_cause(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_since_a_state_leave_out_what_it_has() {
        let counts = |connections| ServiceCounts { connections, ..ServiceCounts::default() };
        let at = |port| Frontend {
            address: cproxy_core::parse_address("10.96.0.1").unwrap(),
            port,
            protocol: cproxy_core::Protocol::Tcp,
        };
        let of = |frontends: &[(u16, u64)]| ServiceCounters {
            frontends: frontends.iter().map(|&(port, connections)| (at(port), counts(connections))).collect(),
            addresses: BTreeMap::new(),
        };
        let mut earlier = of(&[(80, 5), (81, 3), (83, 1), (84, 9)]);
        let now = of(&[(80, 7), (81, 3), (82, 2), (84, 4)]);
        assert_eq!(now.since(&mut earlier), of(&[(80, 2), (82, 2), (84, 4)]));
        assert_eq!(earlier, of(&[(80, 5), (81, 3)]), "the counters of 83 and 84 have begun again");
        assert_eq!(of(&[(83, 2), (84, 10)]).since(&mut earlier), of(&[(83, 2), (84, 10)]));
    }
}
