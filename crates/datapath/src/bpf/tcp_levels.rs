//! Further levels of places for TCP sockets: pairs of maps that the agent adds while there are many connections, and
//! removes afterwards.
//!
//! A level exists while `TCP_MORE_OWNERS` has its map. Its pins and its map of peers are there before that and go after
//! it, so an agent that is killed in between leaves at most memory that the next one uses or frees.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

use aya::maps::{Array, IterableMap as _, Map, MapData};
use cproxy_ebpf::Translation;

use super::{
    error::TableError,
    map_spec::{LevelSpec, MapShape, TCP_LEVELS, TCP_MORE_OWNERS, TCP_MORE_PEERS},
    open::{Access, open_map, pinned_map},
    pins::PinDir,
    syscalls::{inner_map_id, map_create, obj_pin, remove_inner_map, set_inner_map},
};

/// Attempts to open a level that the agent removes meanwhile.
const TRIES: usize = 10;

/// The arrays in which the programs find the maps of the levels.
#[derive(Debug)]
pub(super) struct Levels {
    pins: PinDir,
    access: Access,
    owners: MapData,
    peers: MapData,
}

/// State of a level.
enum Found {
    None,
    Level(Box<LevelMaps>),
    /// The programs use maps that have no pins, or not these.
    Unpinned,
}

/// The maps of a level.
pub(super) struct LevelMaps {
    pub(super) spec: LevelSpec,
    pub(super) owners: MapData,
    pub(super) peers: Array<MapData, Translation>,
}

impl Levels {
    pub(super) fn open(pins: &PinDir, access: Access) -> Result<Self, TableError> {
        let open = |name| {
            let path = pins.object(name);
            open_map(&path, access).map_err(|error| TableError::Open(path, error))
        };
        Ok(Self { pins: pins.clone(), access, owners: open(TCP_MORE_OWNERS)?, peers: open(TCP_MORE_PEERS)? })
    }

    /// All levels that exist, the first one first.
    pub(super) fn all(&self) -> Result<Vec<LevelMaps>, TableError> {
        let mut levels = Vec::new();
        for spec in TCP_LEVELS {
            match self.find(spec)? {
                Found::None => {}
                Found::Level(maps) => levels.push(*maps),
                Found::Unpinned => {
                    let error = io::Error::other("the maps of a level are not pinned beside it");
                    return Err(TableError::Pin(self.pins.object(TCP_MORE_OWNERS), error));
                }
            }
        }
        Ok(levels)
    }

    /// All levels that exist. A level that has lost its pins is replaced by an empty one, since its maps can no
    /// longer be opened.
    pub(super) fn take_over(&self) -> Result<Vec<LevelMaps>, TableError> {
        let mut levels = Vec::new();
        for spec in TCP_LEVELS {
            match self.find(spec)? {
                // The rest of a level that was not finished, or not removed.
                Found::None => self.remove(spec)?,
                Found::Level(maps) => levels.push(*maps),
                Found::Unpinned => {
                    let maps = self.create(spec)?;
                    self.put(&maps)?;
                    levels.push(maps);
                }
            }
        }
        Ok(levels)
    }

    /// The maps of a level under its pins, which must be those that the programs use.
    fn find(&self, spec: LevelSpec) -> Result<Found, TableError> {
        for _ in 0..TRIES {
            let Some(owners) = self.id(TCP_MORE_OWNERS, &self.owners, spec)? else { return Ok(Found::None) };
            let used = [Some(owners), self.id(TCP_MORE_PEERS, &self.peers, spec)?];
            let [of_owners, of_peers] = self.paths(spec);
            let pinned = [pinned_map(&of_owners)?, pinned_map(&of_peers)?];
            if used == pinned.map(|map| map.map(|map| map.id())) {
                return Ok(Found::Level(self.open_level(spec)?.into()));
            }
        }
        Ok(Found::Unpinned)
    }

    fn open_level(&self, spec: LevelSpec) -> Result<LevelMaps, TableError> {
        let [owners, peers] = self.paths(spec);
        let open = |path: &Path, shape: MapShape| {
            let failed = |error| TableError::Open(path.to_owned(), error);
            let map = open_map(path, self.access).map_err(failed)?;
            if MapShape::of(&map.info().map_err(failed)?) != Some(shape) {
                let error = io::Error::other("it is not a map of this layout");
                return Err(TableError::Pin(path.to_owned(), error));
            }
            Ok(map)
        };
        LevelMaps::new(spec, open(&owners, spec.owners)?, open(&peers, spec.peers)?)
    }

    fn id(&self, name: &'static str, outer: &MapData, spec: LevelSpec) -> Result<Option<u32>, TableError> {
        let failed = |error| TableError::Pin(self.pins.object(name), error);
        inner_map_id(outer.fd().as_fd(), spec.element()).map_err(failed)
    }

    fn paths(&self, spec: LevelSpec) -> [PathBuf; 2] {
        spec.pins.map(|name| self.pins.object(name))
    }

    /// Creates the maps of a level without owners; the programs do not see them yet.
    pub(super) fn create(&self, spec: LevelSpec) -> Result<LevelMaps, TableError> {
        let create = |name, shape: MapShape| {
            let no_memory = |error| TableError::NoMemory { map: name, entries: shape.entries, error };
            let fd = map_create(shape, name).map_err(no_memory)?;
            MapData::from_fd(fd).map_err(|error| TableError::Open(self.pins.object(name), error))
        };
        let [owners, peers] = spec.pins;
        LevelMaps::new(spec, create(owners, spec.owners)?, create(peers, spec.peers)?)
    }

    /// Adds a level. After an error it does not exist.
    pub(super) fn put(&self, maps: &LevelMaps) -> Result<(), TableError> {
        let LevelMaps { spec, owners, peers } = maps;
        let put = || {
            self.pin(maps)?;
            self.set(TCP_MORE_PEERS, &self.peers, *spec, peers.map().fd().as_fd())?;
            self.set(TCP_MORE_OWNERS, &self.owners, *spec, owners.fd().as_fd())
        };
        // The error that is being reported has the reason; what stays is removed by the next agent.
        put().inspect_err(|_| drop(self.remove(*spec)))
    }

    fn set(
        &self,
        name: &'static str,
        outer: &MapData,
        spec: LevelSpec,
        inner: BorrowedFd<'_>,
    ) -> Result<(), TableError> {
        let failed = |error| TableError::Pin(self.pins.object(name), error);
        set_inner_map(outer.fd().as_fd(), spec.element(), inner).map_err(failed)
    }

    fn pin(&self, maps: &LevelMaps) -> Result<(), TableError> {
        let fds = [maps.owners.fd().as_fd(), maps.peers.map().fd().as_fd()];
        for (path, fd) in self.paths(maps.spec).into_iter().zip(fds) {
            // The pin of a level that was not finished, or not removed.
            fs::remove_file(&path).ok();
            obj_pin(fd, &path).map_err(|error| TableError::Pin(path, error))?;
        }
        Ok(())
    }

    /// Pins a level again that has lost a pin. Returns whether it had.
    pub(super) fn restore_pins(&self, maps: &LevelMaps) -> Result<bool, TableError> {
        let is_lost = self.paths(maps.spec).iter().any(|path| !path.exists());
        if is_lost { self.pin(maps).map(|()| true) } else { Ok(false) }
    }

    /// Removes a level in which no place has an owner; then no program uses its maps any more.
    pub(super) fn remove(&self, spec: LevelSpec) -> Result<(), TableError> {
        for (name, outer) in [(TCP_MORE_OWNERS, &self.owners), (TCP_MORE_PEERS, &self.peers)] {
            let failed = |error| TableError::Pin(self.pins.object(name), error);
            if self.id(name, outer, spec)?.is_some() {
                remove_inner_map(outer.fd().as_fd(), spec.element()).map_err(failed)?;
            }
        }
        // A pin that stays is removed with the next level, or by the next agent.
        self.paths(spec).into_iter().filter(|path| path.exists()).for_each(|path| drop(fs::remove_file(path)));
        Ok(())
    }
}

impl LevelMaps {
    fn new(spec: LevelSpec, owners: MapData, peers: MapData) -> Result<Self, TableError> {
        let peers = Array::try_from(Map::Array(peers)).map_err(|error| TableError::Read(TCP_MORE_PEERS, error))?;
        Ok(Self { spec, owners, peers })
    }
}
