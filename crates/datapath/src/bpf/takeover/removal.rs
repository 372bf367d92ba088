//! Removal of what older layouts have left.

use std::{fs, os::fd::AsFd};

use super::kept::{has_kept, has_kept_of};
use crate::bpf::{
    pins::{PinDir, PinError, TRACE_DIRECTORY, list, remove_if_empty, remove_with_pins},
    predecessors::{PREDECESSORS, Predecessor},
    syscalls::{link_detach, link_id, obj_get, obj_get_if_any},
};

/// Removes what is left of older layouts once all programs are attached, apart from what their sockets need.
pub(in crate::bpf) fn retire(pins: &PinDir) -> Result<(), PinError> {
    for predecessor in PREDECESSORS {
        let has_kept = has_kept_of(pins, predecessor);
        remove(pins, predecessor, |name| !has_kept || !predecessor.keeps(name))?;
    }
    Ok(())
}

/// Removes what is kept of older layouts if no socket needs it any more, as `has_older_socket` tells. Returns whether
/// something is left.
///
/// # Errors
/// A file could not be removed.
pub fn end_takeover(pins: &PinDir, has_older_socket: impl FnOnce(&PinDir) -> bool) -> Result<bool, PinError> {
    if !has_kept(pins) {
        return Ok(false);
    }
    if has_older_socket(pins) {
        return Ok(true);
    }
    PREDECESSORS.into_iter().try_for_each(|predecessor| remove(pins, predecessor, |_| true))?;
    Ok(false)
}

/// Removes the objects of a layout whose names go, and detaches their links.
fn remove(pins: &PinDir, predecessor: Predecessor, goes: impl Fn(&str) -> bool) -> Result<(), PinError> {
    let dir = pins.layout_dir(predecessor.layout);
    for name in list(&dir)?.into_iter().filter(|name| goes(name)) {
        let path = dir.join(&name);
        if name == TRACE_DIRECTORY {
            remove_with_pins(&path).map_err(|error| PinError::Io(path, error))?;
            continue;
        }
        if let Ok(object) = obj_get(&path, 0)
            && let Ok(id) = link_id(object.as_fd())
            && !is_pinned_as(pins, &name, id)?
        {
            // An error: it is on a cgroup that is gone.
            link_detach(object.as_fd()).ok();
        }
        fs::remove_file(&path).map_err(|error| PinError::Io(path, error))?;
    }
    remove_if_empty(&dir)
}

/// Whether the link with this id is in force for this layout.
fn is_pinned_as(pins: &PinDir, name: &str, id: u32) -> Result<bool, PinError> {
    let path = pins.object(name);
    let own = obj_get_if_any(&path).and_then(|link| link.map(|link| link_id(link.as_fd())).transpose());
    // A link that cannot be read may be that one, and must not be detached.
    Ok(own.map_err(|error| PinError::Io(path, error))? == Some(id))
}
