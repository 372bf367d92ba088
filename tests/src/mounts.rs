//! Unmounting, of a sandbox's mounts and in scripts.

use std::{io, path::Path};

use rustix::mount::UnmountFlags;

/// Part of a shell script that unmounts cgroup2 everywhere.
pub const UNMOUNT_CGROUP2: &str = "for mount in $(awk '$9 == \"cgroup2\" || $8 == \"cgroup2\" {print $5}' \
                                   /proc/self/mountinfo); do umount -l $mount; done";

/// Unmounts everything at or below `directory`, newest first.
pub(crate) fn unmount_below(directory: &Path) -> io::Result<()> {
    for mount in cproxy_mountinfo::list()?.iter().rev().filter(|mount| mount.point.starts_with(directory)) {
        if let Err(error) = rustix::mount::unmount(&mount.point, UnmountFlags::empty()) {
            eprintln!("sandbox: {} is in use ({error}), detaching it", mount.point.display());
            rustix::mount::unmount(&mount.point, UnmountFlags::DETACH)?;
        }
    }
    Ok(())
}
