//! Programs and maps of older layouts that stay in force for the sockets of those layouts.

use std::{os::fd::AsFd, path::PathBuf};

use crate::bpf::{
    pins::PinDir,
    predecessors::{PREDECESSORS, Predecessor},
    syscalls::{link_cgroup, obj_get},
};

/// Whether programs of an older layout are kept for its sockets.
pub fn has_kept(pins: &PinDir) -> bool {
    PREDECESSORS.into_iter().any(|predecessor| has_kept_of(pins, predecessor))
}

/// Whether links of this layout are kept, so that their programs run.
pub(super) fn has_kept_of(pins: &PinDir, predecessor: Predecessor) -> bool {
    kept_links(pins, predecessor).any(|link| link.exists())
}

/// Ids of the programs of older layouts that stay attached beside the new ones.
pub(in crate::bpf) fn kept_programs(pins: &PinDir) -> Vec<u32> {
    let links = PREDECESSORS.into_iter().flat_map(|predecessor| kept_links(pins, predecessor));
    links.filter_map(|link| Some(link_cgroup(obj_get(&link, 0).ok()?.as_fd()).ok()?.program_id)).collect()
}

/// Path of a kept map.
pub(in crate::bpf) fn kept_map(pins: &PinDir, name: &str) -> Option<PathBuf> {
    let mut paths = PREDECESSORS.into_iter().map(|predecessor| pins.layout_dir(predecessor.layout).join(name));
    paths.find(|path| path.exists())
}

fn kept_links(pins: &PinDir, predecessor: Predecessor) -> impl Iterator<Item = PathBuf> {
    let dir = pins.layout_dir(predecessor.layout);
    predecessor.kept_links.iter().map(move |link| dir.join(link))
}
