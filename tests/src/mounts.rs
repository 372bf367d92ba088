//! What is mounted where, as `/proc/self/mountinfo` tells it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::mount::UnmountFlags;

/// One line of mountinfo, as far as the harness cares.
#[derive(Debug)]
pub(crate) struct Mount {
    /// Which directory of the file system is mounted.
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
    pub(crate) kind: String,
}

/// All mounts of this process, oldest first.
pub(crate) fn list() -> io::Result<Vec<Mount>> {
    Ok(fs::read_to_string("/proc/self/mountinfo")?.lines().filter_map(parse).collect())
}

/// `31 23 0:28 ROOT TARGET options [optional fields] - TYPE source super-options`
fn parse(line: &str) -> Option<Mount> {
    let (place, file_system) = line.split_once(" - ")?;
    let mut fields = place.split(' ').skip(3);
    Some(Mount {
        root: fields.next()?.into(),
        target: fields.next()?.into(),
        kind: file_system.split(' ').next()?.to_owned(),
    })
}

/// Unmounts everything at or below `directory`, newest first.
pub(crate) fn unmount_below(directory: &Path) -> io::Result<()> {
    for mount in list()?.iter().rev().filter(|mount| mount.target.starts_with(directory)) {
        if let Err(error) = rustix::mount::unmount(&mount.target, UnmountFlags::empty()) {
            eprintln!("sandbox: {} is in use ({error}), detaching it", mount.target.display());
            rustix::mount::unmount(&mount.target, UnmountFlags::DETACH)?;
        }
    }
    Ok(())
}
