//! Maps of an older layout that stay in force.

use std::{fs, os::fd::AsFd, path::Path};

use aya::maps::MapInfo;

use crate::bpf::{
    map_spec::{MapShape, NAMED, RESIZABLE},
    pins::{PinDir, PinError, difference},
    predecessors::PREDECESSORS,
    program::Program,
    syscalls::{obj_get, obj_pin},
};

/// Pins the maps that stay in force in the directory of this layout, which is locked.
pub(super) fn carry_maps(pins: &PinDir) -> Result<(), PinError> {
    for predecessor in PREDECESSORS {
        let dir = pins.layout_dir(predecessor.layout);
        let stays = |name: &&str| !predecessor.renewed.contains(name);
        for (name, shape) in NAMED.into_iter().filter(|(name, _)| stays(name)) {
            carry(&dir.join(name), &pins.object(name), Some(shape))?;
        }
        // Their sizes vary, and opening them checks the rest.
        for name in RESIZABLE.iter().flat_map(|map| map.pins) {
            carry(&dir.join(name), &pins.object(name), None)?;
        }
    }
    Ok(())
}

fn carry(from: &Path, to: &Path, shape: Option<MapShape>) -> Result<(), PinError> {
    if to.exists() || !from.exists() {
        return Ok(());
    }
    let failed = |path: &Path, error| PinError::Io(path.to_owned(), error);
    let map = obj_get(from, 0).map_err(|error| failed(from, error))?;
    if let Some(shape) = shape {
        let info = MapInfo::from_pin(from).map_err(|error| PinError::Map(from.to_owned(), error))?;
        if let Some(difference) = difference(shape, &info) {
            let dir = from.parent().and_then(Path::parent).unwrap_or(from).to_owned();
            return Err(PinError::OtherMap { path: from.to_owned(), dir, difference });
        }
    }
    obj_pin(map.as_fd(), to).map_err(|error| failed(to, error))
}

/// Undoes [`carry_maps`] after a failure, if the older layout's programs are still those in force: its agent can then
/// start again.
pub(in crate::bpf) fn give_maps_back(pins: &PinDir) {
    let is_switched = Program::links().iter().any(|link| pins.object(link).exists());
    let has_older =
        PREDECESSORS.into_iter().any(|predecessor| pins.layout_dir(predecessor.layout).join("connect4").exists());
    if is_switched || !has_older {
        return;
    }
    let inner = RESIZABLE.iter().flat_map(|map| map.pins);
    for name in PinDir::map_names().chain(inner) {
        fs::remove_file(pins.object(name)).ok();
    }
    fs::remove_dir(pins.versioned()).ok();
}
