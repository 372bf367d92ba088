//! The maps that are as large as the data needs them to be: each is one map in a map of maps, through which the programs
//! look, so that the agent can put another one in its place by one write.
//!
//! The map that is in force is pinned under one of two names: the next one gets the other name before it is put in force,
//! and the old pin goes afterwards. Which of the two it is says the outer map, at every moment, also after an agent was
//! killed in between. (By its id alone it could not be opened without CAP_SYS_ADMIN.)

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya::maps::{MapData, MapInfo};
use cproxy_ebpf::{BACKENDS_MIN, Backend, FRONTENDS_MIN, FrontendKey, SETS_MIN, Set, SetId};

use super::{
    pins::PinDir,
    syscalls::{MapShape, inner_map_id, map_create, obj_get, obj_pin, set_inner_map},
    tables::TableError,
};

/// Flags of `BPF_MAP_CREATE` (include/uapi/linux/bpf.h).
pub(super) const BPF_F_NO_PREALLOC: u32 = 1;
pub(super) const BPF_F_MMAPABLE: u32 = 1 << 10;
const BPF_F_INNER_MAP: u32 = 1 << 12;

/// `enum bpf_map_type`.
const HASH: u32 = 1;
const ARRAY: u32 = 2;

/// One of the three.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) name: &'static str,
    /// Under one of these names the map in force is pinned.
    pub(super) pins: [&'static str; 2],
    map_type: u32,
    key_bytes: u32,
    pub(super) value_bytes: u32,
    flags: u32,
    least: u32,
}

pub(super) const FRONTENDS: Kind = Kind {
    name: "FRONTENDS",
    pins: ["FRONTENDS_0", "FRONTENDS_1"],
    map_type: HASH,
    key_bytes: size_of::<FrontendKey>() as u32,
    value_bytes: size_of::<SetId>() as u32,
    flags: BPF_F_NO_PREALLOC,
    least: FRONTENDS_MIN,
};

pub(super) const SETS: Kind = Kind {
    name: "SETS",
    pins: ["SETS_0", "SETS_1"],
    map_type: ARRAY,
    key_bytes: 4,
    value_bytes: size_of::<Set>() as u32,
    flags: BPF_F_MMAPABLE | BPF_F_INNER_MAP,
    least: SETS_MIN,
};

pub(super) const BACKENDS: Kind = Kind {
    name: "BACKENDS",
    pins: ["BACKENDS_0", "BACKENDS_1"],
    map_type: ARRAY,
    key_bytes: 4,
    value_bytes: size_of::<Backend>() as u32,
    flags: BPF_F_MMAPABLE | BPF_F_INNER_MAP,
    least: BACKENDS_MIN,
};

/// A map of one map.
#[derive(Debug)]
pub(super) struct Growing {
    kind: Kind,
    pins: PinDir,
    outer: OwnedFd,
}

/// The map that was in force when it was opened.
#[derive(Debug)]
pub(super) struct Current {
    pub(super) map: MapData,
    pub(super) id: u32,
    pub(super) entries: u32,
}

impl Growing {
    /// Opens the outer map.
    pub(super) fn open(pins: &PinDir, kind: Kind) -> Result<Self, TableError> {
        let path = pins.object(kind.name);
        let outer = obj_get(&path).map_err(|error| TableError::Pin(path, error))?;
        Ok(Self { kind, pins: pins.clone(), outer })
    }

    /// Makes the first one if there is none: before the programs are attached. One that is in force and has lost its pin
    /// cannot be opened, and counts as none.
    pub(super) fn prepare(pins: &PinDir, kind: Kind) -> Result<(), TableError> {
        let growing = Self::open(pins, kind)?;
        if growing.id()?.is_some_and(|id| growing.path_of(id).is_some()) {
            return Ok(());
        }
        let first = growing.make(kind.least)?;
        growing.put(first.fd().as_fd()).map(drop)
    }

    pub(super) fn name(&self) -> &'static str {
        self.kind.name
    }

    pub(super) fn element_bytes(&self) -> usize {
        self.kind.value_bytes as usize
    }

    fn id(&self) -> Result<Option<u32>, TableError> {
        inner_map_id(self.outer.as_fd()).map_err(|error| TableError::Pin(self.pins.object(self.kind.name), error))
    }

    /// Whether the programs still use the map with this id.
    pub(super) fn is_current(&self, id: u32) -> bool {
        self.id().is_ok_and(|now| now == Some(id))
    }

    /// The map in force.
    pub(super) fn current(&self) -> Result<Current, TableError> {
        // Between the question and the answer the agent may put another one in force; it does so seldom.
        for _ in 0..10 {
            let Some(id) = self.id()? else { continue };
            if let Some(info) = self.pinned().find(|(_, info)| info.id() == id).map(|(_, info)| info) {
                return self.open_map(id, &info);
            }
        }
        let path = self.pins.object(self.kind.name);
        let what = match self.id()? {
            Some(_) => "the map that it holds is not pinned beside it",
            None => "it is empty: cproxy is just being installed, or that was broken off; `cproxy run` mends it",
        };
        Err(TableError::Pin(path, io::Error::other(what)))
    }

    fn open_map(&self, id: u32, info: &MapInfo) -> Result<Current, TableError> {
        let path = self.path_of(id).unwrap_or_else(|| self.pins.object(self.kind.name));
        let is = (info.map_type().map(|of| of as u32).ok(), info.key_size(), info.value_size(), info.map_flags());
        let kind = &self.kind;
        if is != (Some(kind.map_type), kind.key_bytes, kind.value_bytes, kind.flags) {
            return Err(TableError::Pin(path, io::Error::other("it is not a map of this layout")));
        }
        let map = MapData::from_pin(&path).map_err(|error| TableError::Open(path, error))?;
        Ok(Current { map, id, entries: info.max_entries() })
    }

    fn pinned(&self) -> impl Iterator<Item = (PathBuf, MapInfo)> {
        let paths = self.kind.pins.iter().map(|name| self.pins.object(name));
        paths.filter_map(|path| MapInfo::from_pin(&path).ok().map(|info| (path, info)))
    }

    fn path_of(&self, id: u32) -> Option<PathBuf> {
        self.pinned().find(|(_, info)| info.id() == id).map(|(path, _)| path)
    }

    /// A new map with room for so many; nobody sees it yet.
    pub(super) fn make(&self, entries: u32) -> Result<MapData, TableError> {
        let Kind { name, map_type, key_bytes, value_bytes, flags, .. } = self.kind;
        let failed = |error| TableError::NoMemory { map: name, entries, error };
        let fd = map_create(MapShape { map_type, key_bytes, value_bytes, entries, flags }, name).map_err(failed)?;
        MapData::from_fd(fd).map_err(|error| TableError::Open(self.pins.object(name), error))
    }

    /// Puts a map in force that [`Growing::make`] has given, and gives back its id; when it returns, no program uses the one
    /// before it.
    pub(super) fn put(&self, map: BorrowedFd<'_>) -> Result<u32, TableError> {
        let failed = |path: &Path, error| TableError::Pin(path.to_owned(), error);
        let outer = self.pins.object(self.kind.name);
        let before = self.id()?.and_then(|id| self.path_of(id));
        let mut paths = self.kind.pins.iter().map(|name| self.pins.object(name));
        let path = paths.find(|path| before.as_ref() != Some(path)).unwrap_or_else(|| outer.clone());
        // What an agent that was killed has left there.
        fs::remove_file(&path).ok();
        obj_pin(map, &path).map_err(|error| failed(&path, error))?;
        if let Err(error) = set_inner_map(self.outer.as_fd(), map) {
            fs::remove_file(&path).ok();
            return Err(failed(&outer, error));
        }
        if let Some(before) = before {
            fs::remove_file(&before).map_err(|error| failed(&before, error))?;
        }
        self.id()?.ok_or_else(|| failed(&outer, io::ErrorKind::NotFound.into()))
    }

    /// Waits until every program that runs now has ended, by putting the map in force that is; on every number of CPUs:
    /// `membarrier(MEMBARRIER_CMD_GLOBAL)` does not wait where only one is online (kernel/sched/membarrier.c).
    pub(super) fn wait_for_programs(&self, current: &MapData) -> Result<(), TableError> {
        set_inner_map(self.outer.as_fd(), current.fd().as_fd())
            .map_err(|error| TableError::Pin(self.pins.object(self.kind.name), error))
    }
}
