//! Maps as large as the data needs them to be: each is the only map in a map of maps, through which the programs look
//! it up, so that the agent replaces it by one write.
//!
//! The map in force is pinned under one of two names: its successor gets the other name before it is put in force, and
//! the old pin goes afterwards. The outer map says which of the two is in force, at every moment, also after an agent
//! was killed in between. (By its id alone a map cannot be opened without CAP_SYS_ADMIN.)

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

use aya::maps::{MapData, MapInfo};

use super::{
    error::{TableError, root_cause},
    map_spec::{MapShape, MapSpec},
    open::{Access, open_map, pinned_map},
    pins::PinDir,
    syscalls::{inner_map_id, map_create, obj_pin, set_inner_map},
};

/// A map of one map.
#[derive(Debug)]
pub(super) struct ResizableMap {
    spec: MapSpec,
    pins: PinDir,
    access: Access,
    outer: MapData,
}

/// An inner map: the one in force when it was opened, or one that [`ResizableMap::create`] has made.
#[derive(Debug)]
pub(super) struct InnerMap {
    pub(super) map: MapData,
    pub(super) id: u32,
    pub(super) entries: u32,
}

impl ResizableMap {
    /// Opens the outer map.
    pub(super) fn open(pins: &PinDir, spec: MapSpec, access: Access) -> Result<Self, TableError> {
        let path = pins.object(spec.name);
        let outer =
            open_map(&path, access).map_err(|error| TableError::Pin(path, io::Error::other(root_cause(&error))))?;
        Ok(Self { spec, pins: pins.clone(), access, outer })
    }

    /// Creates the first map if there is none: before the programs are attached. One that is in force and has lost its
    /// pin cannot be opened, and counts as none.
    pub(super) fn prepare(pins: &PinDir, spec: MapSpec) -> Result<(), TableError> {
        let resizable = Self::open(pins, spec, Access::ReadWrite)?;
        if resizable.find_current()?.is_some() {
            return Ok(());
        }
        let first = resizable.create(spec.shape.entries)?;
        resizable.replace(first.map.fd().as_fd())
    }

    pub(super) fn name(&self) -> &'static str {
        self.spec.name
    }

    pub(super) fn value_bytes(&self) -> usize {
        self.spec.shape.value_bytes as usize
    }

    fn id(&self) -> Result<Option<u32>, TableError> {
        let failed = |error| TableError::Pin(self.pins.object(self.spec.name), error);
        inner_map_id(self.outer.fd().as_fd(), 0).map_err(failed)
    }

    /// Whether the programs still use the map with this id.
    pub(super) fn is_current(&self, id: u32) -> bool {
        self.id().is_ok_and(|now| now == Some(id))
    }

    /// The map in force.
    pub(super) fn current(&self) -> Result<InnerMap, TableError> {
        // The agent may put another one in force between the two calls; it does so seldom.
        for _ in 0..10 {
            if let Some((path, info)) = self.find_current()? {
                return self.open_current(path, &info);
            }
        }
        let path = self.pins.object(self.spec.name);
        let what = match self.id()? {
            Some(_) => "the map that it holds is not pinned beside it",
            None => "it is empty: cproxy is just being installed, or that was broken off; `cproxy run` mends it",
        };
        Err(TableError::Pin(path, io::Error::other(what)))
    }

    fn open_current(&self, path: PathBuf, info: &MapInfo) -> Result<InnerMap, TableError> {
        let entries = info.max_entries();
        if MapShape::of(info) != Some(MapShape { entries, ..self.spec.shape }) {
            return Err(TableError::Pin(path, io::Error::other("it is not a map of this layout")));
        }
        let map = open_map(&path, self.access).map_err(|error| TableError::Open(path, error))?;
        Ok(InnerMap { map, id: info.id(), entries })
    }

    /// The pin of the map in force; `None` if there is no such map, or none of the pins is its own. A pin that cannot
    /// be opened may be its own.
    fn find_current(&self) -> Result<Option<(PathBuf, MapInfo)>, TableError> {
        let Some(id) = self.id()? else { return Ok(None) };
        let mut failure = None;
        for path in self.spec.pins.iter().map(|name| self.pins.object(name)) {
            match pinned_map(&path) {
                Ok(Some(info)) if info.id() == id => return Ok(Some((path, info))),
                Ok(_) => {}
                Err(error) => failure = Some(error),
            }
        }
        failure.map_or(Ok(None), Err)
    }

    /// A new map with this many entries; the programs do not see it yet.
    pub(super) fn create(&self, entries: u32) -> Result<InnerMap, TableError> {
        let MapSpec { name, shape, .. } = self.spec;
        let no_memory = |error| TableError::NoMemory { map: name, entries, error };
        let fd = map_create(MapShape { entries, ..shape }, name).map_err(no_memory)?;
        let failed = |error| TableError::Open(self.pins.object(name), error);
        let map = MapData::from_fd(fd).map_err(failed)?;
        let id = map.info().map_err(failed)?.id();
        Ok(InnerMap { map, id, entries })
    }

    /// Puts a map in force that [`Self::create`] has made; then no program uses its predecessor any more. That is the
    /// last step that can fail: after an error the predecessor is still in force, with its pin, and a writer goes on
    /// with it.
    pub(super) fn replace(&self, map: BorrowedFd<'_>) -> Result<(), TableError> {
        let failed = |path: &Path, error| TableError::Pin(path.to_owned(), error);
        let outer = self.pins.object(self.spec.name);
        let before = self.find_current()?.map(|(path, _)| path);
        let mut paths = self.spec.pins.iter().map(|name| self.pins.object(name));
        let path = paths.find(|path| before.as_ref() != Some(path)).unwrap_or_else(|| outer.clone());
        // The pin of an earlier predecessor that could not be removed.
        fs::remove_file(&path).ok();
        obj_pin(map, &path).map_err(|error| failed(&path, error))?;
        if let Err(error) = set_inner_map(self.outer.fd().as_fd(), 0, map) {
            fs::remove_file(&path).ok();
            return Err(failed(&outer, error));
        }
        // If it stays, the outer map still says which of the two is in force, and the next replacement needs its name.
        before.map(fs::remove_file);
        Ok(())
    }

    /// Pins the map in force again if it has lost its pin. Returns whether it had.
    pub(super) fn restore_pin(&self, current: BorrowedFd<'_>) -> Result<bool, TableError> {
        if self.id()?.is_none() || self.find_current()?.is_some() {
            return Ok(false);
        }
        let [path, _] = self.spec.pins.map(|name| self.pins.object(name));
        // Another map's pin there is of no use.
        fs::remove_file(&path).ok();
        obj_pin(current, &path).map_err(|error| TableError::Pin(path, error))?;
        Ok(true)
    }

    /// Waits until every program that runs now has ended, by putting the map in force that is; on every number of CPUs:
    /// `membarrier(MEMBARRIER_CMD_GLOBAL)` does not wait where only one is online (kernel/sched/membarrier.c).
    pub(super) fn wait_for_programs(&self, current: &MapData) -> Result<(), TableError> {
        set_inner_map(self.outer.fd().as_fd(), 0, current.fd().as_fd())
            .map_err(|error| TableError::Pin(self.pins.object(self.spec.name), error))
    }
}
