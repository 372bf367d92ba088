//! Takeover of a table of an older layout, without a gap.
//!
//! A map whose content both layouts read in the same way stays in force: it gets a pin in the directory of this layout,
//! too. The others are made anew. Each link is then updated to the new program, so that a call runs either the old
//! program or the new one. Where a map was made anew that has state of sockets, the programs that show and free this
//! state stay attached beside the new ones, until the last socket from before has been closed.
//!
//! Every step can be the last one of an agent that is killed: the next one goes on from what is pinned.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya::maps::MapInfo;

use super::{
    map_spec::{MapShape, NAMED, RESIZABLE},
    pins::{PinDir, PinError, difference, list},
    syscalls::{link_cgroup, link_detach, link_id, obj_get, obj_get_if_any, obj_pin},
    tracing,
};
use crate::sockets::has_older_socket;

/// Layout whose table this one can take over.
#[derive(Clone, Copy, Debug)]
pub(super) struct Predecessor {
    pub(super) layout: u32,
    /// Maps of this layout that it has not, or whose content means something else there.
    renewed: &'static [&'static str],
    /// Its links that show or free what those maps have of sockets.
    kept_links: &'static [&'static str],
    /// Its maps with state of sockets, which the agent reads meanwhile.
    kept_maps: &'static [&'static str],
}

/// All of them, newest first.
pub(super) const PREDECESSORS: [Predecessor; 2] = [
    Predecessor { layout: 7, renewed: &["OWN_ADDRESSES"], kept_links: &[], kept_maps: &[] },
    Predecessor {
        layout: 6,
        // `TCP_OWNERS` can be mapped into memory since.
        renewed: &["OWN_ADDRESSES", "TCP_OWNERS", "TCP_PEERS"],
        kept_links: &["getpeername4", "getpeername6", "sock_release"],
        kept_maps: &["TCP_OWNERS", "TCP_PEERS"],
    },
];

impl Predecessor {
    /// The one with this layout.
    pub(super) fn of(layout: u32) -> Option<Self> {
        PREDECESSORS.into_iter().find(|predecessor| predecessor.layout == layout)
    }

    fn dir(self, pins: &PinDir) -> PathBuf {
        pins.of_layout(self.layout)
    }

    fn keeps(self, name: &str) -> bool {
        [self.kept_links, self.kept_maps].iter().any(|kept| kept.contains(&name))
    }

    /// Whether links of it are kept, so that their programs run.
    fn has_kept(self, pins: &PinDir) -> bool {
        let dir = self.dir(pins);
        self.kept_links.iter().any(|link| dir.join(link).exists())
    }
}

/// Pins the maps that stay in force in the directory of this layout, which is locked.
pub(super) fn carry_maps(pins: &PinDir) -> Result<(), PinError> {
    for predecessor in PREDECESSORS {
        let dir = predecessor.dir(pins);
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

/// Link of an older layout that is to be updated, and the id of its cgroup; `None`: a new one has to be attached.
/// An error comes with its path.
pub(super) fn link_to_update(pins: &PinDir, name: &str) -> Result<Option<(u64, OwnedFd)>, (PathBuf, io::Error)> {
    for predecessor in PREDECESSORS.into_iter().filter(|predecessor| !predecessor.keeps(name)) {
        let path = predecessor.dir(pins).join(name);
        if let Some(link) = pinned_link(&path).map_err(|error| (path, error))? {
            return Ok(Some(link));
        }
    }
    Ok(None)
}

/// A pinned link, and the id of its cgroup; `None` without one.
pub(super) fn pinned_link(path: &Path) -> io::Result<Option<(u64, OwnedFd)>> {
    let Some(link) = obj_get_if_any(path)? else { return Ok(None) };
    Ok(Some((link_cgroup(link.as_fd())?.cgroup_id, link)))
}

/// Removes what is left of older layouts once all programs are attached, apart from what their sockets need.
pub(super) fn retire(pins: &PinDir) -> Result<(), PinError> {
    for predecessor in PREDECESSORS {
        let has_kept = predecessor.has_kept(pins);
        remove(pins, predecessor, |name| !has_kept || !predecessor.keeps(name))?;
    }
    Ok(())
}

/// Ids of the programs of older layouts that stay attached beside the new ones.
pub(super) fn kept_programs(pins: &PinDir) -> Vec<u32> {
    let links = PREDECESSORS.iter().flat_map(|of| of.kept_links.iter().map(|link| of.dir(pins).join(link)));
    links.filter_map(|link| Some(link_cgroup(obj_get(&link, 0).ok()?.as_fd()).ok()?.program_id)).collect()
}

/// Whether programs of an older layout are kept for its sockets.
pub fn has_kept(pins: &PinDir) -> bool {
    PREDECESSORS.into_iter().any(|predecessor| predecessor.has_kept(pins))
}

/// Removes what is kept of older layouts if no socket needs it any more. Returns whether something is left.
///
/// # Errors
/// A file could not be removed.
pub fn end_handover(pins: &PinDir) -> Result<bool, PinError> {
    if !has_kept(pins) {
        return Ok(false);
    }
    if has_older_socket(pins) {
        return Ok(true);
    }
    PREDECESSORS.into_iter().try_for_each(|predecessor| remove(pins, predecessor, |_| true))?;
    Ok(false)
}

/// Path of a kept map.
pub(super) fn kept_map(pins: &PinDir, name: &str) -> Option<PathBuf> {
    let paths = PREDECESSORS.into_iter().map(|predecessor| predecessor.dir(pins).join(name));
    paths.into_iter().find(|path| path.exists())
}

fn remove(pins: &PinDir, predecessor: Predecessor, goes: impl Fn(&str) -> bool) -> Result<(), PinError> {
    let dir = predecessor.dir(pins);
    for name in list(&dir)?.into_iter().filter(|name| goes(name)) {
        let path = dir.join(&name);
        if name == tracing::DIRECTORY {
            tracing::remove_pins_in(&path).map_err(|error| PinError::Io(path, error))?;
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
    match fs::remove_dir(&dir) {
        Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => {
            Err(PinError::Io(dir, error))
        }
        _ => Ok(()),
    }
}

/// Whether the link with this id is in force for this layout.
fn is_pinned_as(pins: &PinDir, name: &str, id: u32) -> Result<bool, PinError> {
    let path = pins.object(name);
    let own = obj_get_if_any(&path).and_then(|link| link.map(|link| link_id(link.as_fd())).transpose());
    // A link that cannot be read may be that one, and must not be detached.
    Ok(own.map_err(|error| PinError::Io(path, error))? == Some(id))
}

/// Undoes [`carry_maps`] after a failure, if the older layout's programs are still those in force: its agent can then
/// start again.
pub(super) fn give_back(pins: &PinDir, links: &[&str]) {
    let is_switched = links.iter().any(|link| pins.object(link).exists());
    let has_older = PREDECESSORS.into_iter().any(|predecessor| predecessor.dir(pins).join("connect4").exists());
    if is_switched || !has_older {
        return;
    }
    let inner = RESIZABLE.iter().flat_map(|map| map.pins);
    for name in PinDir::map_names().chain(inner) {
        fs::remove_file(pins.object(name)).ok();
    }
    fs::remove_dir(pins.versioned()).ok();
}
