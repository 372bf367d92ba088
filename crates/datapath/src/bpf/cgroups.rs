//! Cgroups as directories, and the root of their hierarchy.
//!
//! The root is known by the files that it alone has or lacks. The path of a mount's root proves nothing: a container in
//! a cgroup namespace of its own sees its own cgroup as `/`, and the hierarchy's root, bound from the machine, as
//! `/../..`.

use std::{
    collections::HashSet,
    fs, io,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

use cproxy_mountinfo::MountEntry;
use rustix::fs::{Mode, OFlags, fstatfs};

/// Magic number of `statfs(2)` (include/uapi/linux/magic.h).
pub(super) const CGROUP2_SUPER_MAGIC: u64 = 0x6367_7270;

/// The inode number of the first cgroup namespace, in which paths start at the hierarchy's root
/// (include/linux/proc_ns.h, `PROC_CGROUP_INIT_INO`).
const INITIAL_NAMESPACE: u64 = 0xefff_fffb;

/// Id of the hierarchy's root (fs/kernfs/mount.c: ids start at 1). All processes are below it.
pub const ROOT_CGROUP_ID: u64 = 1;

/// Id of a cgroup: the inode number of its directory.
///
/// # Errors
/// There is no such directory.
pub fn cgroup_id(dir: &Path) -> io::Result<u64> {
    Ok(fs::metadata(dir)?.ino())
}

/// Whether an open file or directory is on cgroup2.
///
/// # Errors
/// Its file system cannot be asked.
pub fn is_cgroup2(opened: impl AsFd) -> io::Result<bool> {
    Ok(fstatfs(opened)?.f_type as u64 == CGROUP2_SUPER_MAGIC)
}

/// Ids of a cgroup and of all below it.
///
/// # Errors
/// There is no such directory, or it cannot be read.
pub(crate) fn cgroups_below(dir: &Path) -> io::Result<HashSet<u64>> {
    let mut ids = HashSet::from([cgroup_id(dir)?]);
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            continue;
        }
        match cgroups_below(&entry.path()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            below => ids.extend(below?),
        }
    }
    Ok(ids)
}

/// Whether a cgroup2 directory is the hierarchy's root: all others have this file
/// (Documentation/admin-guide/cgroup-v2.rst).
pub(super) fn is_root(dir: &Path) -> bool {
    matches!(dir.join("cgroup.type").try_exists(), Ok(false))
}

/// Whether a directory is the root of a hierarchy of version 1: no other has this file (kernel/cgroup/cgroup-v1.c,
/// `CFTYPE_ONLY_ON_ROOT`).
pub(super) fn is_root_v1(dir: &Path) -> bool {
    matches!(dir.join("release_agent").try_exists(), Ok(true))
}

/// The mount points of cgroup2 that are not covered by another file system.
pub(super) fn mounted(mounts: Vec<MountEntry>) -> Vec<PathBuf> {
    let points = mounts.into_iter().filter(|mount| mount.kind == b"cgroup2").map(|mount| mount.point);
    points.filter(|point| is_on(point, CGROUP2_SUPER_MAGIC)).collect()
}

/// Whether this process is in the first cgroup namespace: a new mount then shows the whole hierarchy.
///
/// # Errors
/// The kernel does not say.
pub(super) fn in_initial_namespace() -> io::Result<bool> {
    Ok(fs::metadata("/proc/self/ns/cgroup")?.ino() == INITIAL_NAMESPACE)
}

/// Whether a directory is on a file system with this magic number.
pub(super) fn is_on(dir: &Path, magic: u64) -> bool {
    // O_PATH: what it is can be asked of a directory that may not be read.
    let opened = rustix::fs::open(dir, OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::PATH, Mode::empty());
    opened.and_then(fstatfs).is_ok_and(|stat| stat.f_type as u64 == magic)
}
