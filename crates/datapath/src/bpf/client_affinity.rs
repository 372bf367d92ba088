//! Backend that session affinity keeps for a client, as the programs would choose it now. Reading it changes nothing.

use aya::maps::{HashMap, Map, MapData, MapError};
use cproxy_core::{Affinity, Backend, KernelSet};
use cproxy_ebpf::{AffinityEntry, AffinityKey, affinity_time, digest};
use rustix::time::{ClockId, clock_gettime};

use super::{
    error::TableError,
    open::{Access, open_map},
    pins::PinDir,
};

/// Map of clients.
const NAME: &str = "AFFINITY";

/// Backend of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientAffinity {
    /// The backend.
    pub backend: Backend,
    /// Seconds since the client's last new connection.
    pub idle_seconds: u64,
}

/// The map of clients, opened for reading.
pub struct ClientAffinities(HashMap<MapData, AffinityKey, u64>);

impl ClientAffinities {
    /// Opens the map.
    ///
    /// # Errors
    /// It is missing or may not be used.
    pub fn open(pins: &PinDir) -> Result<Self, TableError> {
        let path = pins.object(NAME);
        let map = open_map(&path, Access::ReadOnly).map_err(|error| TableError::Open(path, error))?;
        HashMap::try_from(Map::LruHashMap(map)).map(Self).map_err(|error| TableError::Read(NAME, error))
    }

    /// The backend that a set keeps for the client in the network namespace with this cookie. `None` without affinity,
    /// for a client that has none yet, and for one whose time is over or whose backend gets no new connections any
    /// more.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn of(&self, set: &KernelSet, netns_cookie: u64) -> Result<Option<ClientAffinity>, TableError> {
        let Affinity { id, seconds } = set.affinity;
        if seconds == 0 {
            return Ok(None);
        }
        let entry = match self.0.get(&AffinityKey { id, zero: 0, netns_cookie }, 0) {
            Ok(entry) => AffinityEntry(entry),
            Err(MapError::KeyNotFound) => return Ok(None),
            Err(error) => return Err(TableError::Read(NAME, error)),
        };
        let now = clock_gettime(ClockId::Monotonic);
        let now = affinity_time(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64);
        let is_it = |backend: &&Backend| digest(&backend.address.words(), backend.port.to_be()) == entry.digest();
        let kept = set.members.eligible().iter().find(is_it).filter(|_| entry.is_fresh(now, seconds));
        Ok(kept.map(|backend| ClientAffinity { backend: *backend, idle_seconds: entry.idle_ns(now) / 1_000_000_000 }))
    }
}
