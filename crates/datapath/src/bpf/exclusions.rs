//! Cgroups as the programs know them: by id and level.

use std::{
    fs, io,
    os::fd::{AsFd as _, AsRawFd as _},
    path::{Path, PathBuf},
    ptr, thread,
};

use cproxy_core::{ExcludedCgroup, Exclusions};
use cproxy_ebpf::{EXCLUDED_CGROUP, EXCLUDED_OTHER_NETNS, Settings};
use cproxy_mountinfo as mountinfo;
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, statx},
    net::{AddressFamily, SocketType},
    thread::{LinkNameSpaceType, move_into_link_name_space},
};

use super::{
    cgroups::{CGROUP2_SUPER_MAGIC, ROOT_CGROUP_ID, cgroup_id, in_initial_namespace, is_cgroup2, is_on, is_root},
    error::TableError,
    pins::PinDir,
    reader::KernelReader,
    table::TableMaps,
};

/// Failure to read the cgroup of a directory.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// It cannot be read.
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
    /// It is somewhere else.
    #[error("{0}: not a cgroup2 directory; pass a directory of a cgroup2 mount")]
    NotCgroup2(PathBuf),
    /// The depth below the root cannot be read from the path.
    #[error(
        "{0}: the hierarchy's root cannot be seen from this cgroup namespace; pass a path below \
         a mount of the whole hierarchy"
    )]
    RootOutOfSight(PathBuf),
}

/// The cgroup of a directory on a cgroup2 mount. Its level is what `bpf_get_current_ancestor_cgroup_id` is asked for:
/// the hierarchy's root has level 0.
///
/// # Errors
/// It is no such directory.
pub fn excluded_cgroup(dir: &Path) -> Result<ExcludedCgroup, CgroupError> {
    let failed = |error| CgroupError::Io(dir.to_owned(), error);
    let path = fs::canonicalize(dir).map_err(failed)?;
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY;
    let opened = rustix::fs::open(&path, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
    if !is_cgroup2(&opened).map_err(failed)? {
        return Err(CgroupError::NotCgroup2(dir.to_owned()));
    }
    let mount_id = statx(CWD, &path, AtFlags::empty(), StatxFlags::MNT_ID).map_err(|error| failed(error.into()))?;
    let mounts = mountinfo::list().map_err(failed)?;
    let is_it = |mount: &mountinfo::MountEntry| mount.id == mount_id.stx_mnt_id;
    let mount = mounts.into_iter().find(is_it).ok_or_else(|| CgroupError::NotCgroup2(dir.to_owned()))?;
    let below = path.strip_prefix(&mount.point).map_err(|_| CgroupError::NotCgroup2(dir.to_owned()))?;
    let above = if is_root(&mount.point) {
        0
    } else if in_initial_namespace().map_err(failed)? {
        depth(&mount.root)
    } else {
        return Err(CgroupError::RootOutOfSight(dir.to_owned()));
    };
    Ok(ExcludedCgroup { id: cgroup_id(&path).map_err(failed)?, level: above + depth(below) })
}

/// Whether a directory is of the cgroup with this id, or of one below it.
#[must_use]
pub fn is_in_cgroup(dir: &Path, id: u64) -> bool {
    let path = fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
    let above = path.ancestors().take_while(|dir| is_on(dir, CGROUP2_SUPER_MAGIC));
    id == ROOT_CGROUP_ID || above.map(cgroup_id).any(|of| of.is_ok_and(|of| of == id))
}

/// Cookie of the calling thread's network namespace, as the programs know it.
///
/// # Errors
/// The kernel has none (Linux 5.14).
pub fn netns_cookie() -> io::Result<u64> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    let (mut cookie, mut length) = (0u64, size_of::<u64>() as libc::socklen_t);
    let (value, descriptor) = (ptr::from_mut(&mut cookie).cast(), socket.as_raw_fd());
    // SAFETY: the pointer and the length are those of a live integer.
    let result =
        unsafe { libc::getsockopt(descriptor, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE, value, &raw mut length) };
    if result == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}

/// Does work in a process's network namespace, on a thread that ends there.
///
/// # Errors
/// There is no such process, or its namespace may not be entered (`CAP_SYS_ADMIN`).
pub fn in_netns_of<T: Send>(pid: u32, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let netns = fs::File::open(format!("/proc/{pid}/ns/net"))?;
    let in_there = move || {
        move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(work())
    };
    thread::scope(|scope| {
        let spawned = thread::Builder::new().spawn_scoped(scope, in_there)?;
        spawned.join().map_err(|_| io::Error::from(io::ErrorKind::Other))?
    })
}

/// Exclusions that the programs follow.
///
/// # Errors
/// The pinned settings cannot be read.
pub fn read_exclusions(pins: &PinDir) -> Result<Exclusions, TableError> {
    Ok(exclusions_in(&KernelReader::open(pins)?.settings()?))
}

/// Exclusions in settings. Places that were never used are zero, and those that are free again match nothing.
fn exclusions_in(settings: &Settings) -> Exclusions {
    fn used<T: Copy>(count: u32, places: &[T]) -> &[T] {
        if count == 0 { &[] } else { places }
    }
    let cgroups = used(settings.excluded_cgroup_count, &settings.excluded_cgroups).iter();
    let netns = cgroups.clone().find(|cgroup| cgroup.kind == EXCLUDED_OTHER_NETNS);
    let uids = used(settings.excluded_uid_count, &settings.excluded_uids).iter().copied();
    let ports = used(settings.excluded_port_count, &settings.excluded_ports).iter().map(|port| u16::from_be(*port));
    Exclusions {
        cgroups: cgroups
            .filter(|cgroup| cgroup.kind == EXCLUDED_CGROUP && cgroup.id != u64::MAX)
            .map(|cgroup| ExcludedCgroup { id: cgroup.id, level: cgroup.level })
            .collect(),
        uids: uids.filter(|uid| *uid != u32::MAX).collect(),
        ports: ports.filter(|port| *port != 0).collect(),
        netns_others_than: netns.map(|netns| netns.id),
    }
}

fn depth(path: &Path) -> u32 {
    path.components().filter(|component| matches!(component, std::path::Component::Normal(_))).count() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_count_for_the_depth() {
        assert_eq!((depth(Path::new("/")), depth(Path::new("/a b/c"))), (0, 2));
    }

    #[test]
    fn a_directory_that_is_no_cgroup_is_named() {
        for dir in ["/proc", "/nowhere/at/all"] {
            let error = excluded_cgroup(Path::new(dir)).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{dir}: ")), "{error}");
        }
    }
}
