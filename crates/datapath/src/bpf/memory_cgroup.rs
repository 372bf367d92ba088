//! The memory cgroup that maps are charged to.
//!
//! The kernel charges what a map allocates, for as long as it lives, to the memory cgroup of the process that made it
//! (kernel/bpf/syscall.c, `bpf_map_kzalloc`). For us that would be the agent's, and what the programs keep with sockets
//! of all processes would count against the agent's limit: past it, sockets would lose their state. And charging is
//! most of what an allocation costs, in the middle of a `connect()`.

use std::{fs, io, path::Path};

use cproxy_mountinfo::{self as mountinfo, MountEntry};

use super::cgroups::{is_root, is_root_v1};

/// Moves this process to the root of the memory cgroups, where nothing is charged. Meant for the short-lived process
/// that makes the maps.
///
/// # Errors
/// There is no such hierarchy, or it may not be written: as in a container, where charging goes on.
pub fn leave_memory_cgroup() -> io::Result<()> {
    let hierarchy = Hierarchy::of_memory(&fs::read_to_string("/proc/self/cgroup")?);
    let mounts = mountinfo::list()?.into_iter().filter(|mount| hierarchy.is_on(mount));
    let root = mounts.map(|mount| mount.point).find(|point| hierarchy.is_root(point));
    // "0" is the writing process.
    fs::write(root.ok_or(io::ErrorKind::NotFound)?.join("cgroup.procs"), "0")
}

/// The hierarchy that has the memory controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hierarchy {
    /// One of version 1.
    V1,
    /// cgroup2.
    V2,
}

fn has_memory(list: &[u8]) -> bool {
    list.split(|&byte| byte == b',').any(|name| name == b"memory")
}

impl Hierarchy {
    /// As the text of `/proc/self/cgroup` says.
    fn of_memory(cgroups: &str) -> Self {
        let mut controllers = cgroups.lines().filter_map(|line| line.split(':').nth(1));
        if controllers.any(|list| has_memory(list.as_bytes())) { Self::V1 } else { Self::V2 }
    }

    fn is_on(self, mount: &MountEntry) -> bool {
        match self {
            Self::V1 => mount.kind == b"cgroup" && has_memory(&mount.options),
            Self::V2 => mount.kind == b"cgroup2",
        }
    }

    fn is_root(self, dir: &Path) -> bool {
        match self {
            Self::V1 => is_root_v1(dir),
            Self::V2 => is_root(dir),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_where_its_controller_is() {
        let hybrid = Hierarchy::of_memory("5:cpu,cpuacct:/\n4:memory:/agent\n0::/\n");
        let unified = Hierarchy::of_memory("0::/agent\n");
        assert_eq!((hybrid, unified, Hierarchy::of_memory("")), (Hierarchy::V1, Hierarchy::V2, Hierarchy::V2));
        let mount = |kind: &[u8], options: &[u8]| MountEntry {
            id: 1,
            root: "/".into(),
            point: "/x".into(),
            kind: kind.to_owned(),
            options: options.to_owned(),
        };
        let mounts = [mount(b"cgroup", b"rw,cpu,cpuacct"), mount(b"cgroup", b"rw,memory"), mount(b"cgroup2", b"rw")];
        assert_eq!(mounts.each_ref().map(|mount| hybrid.is_on(mount)), [false, true, false]);
        assert_eq!(mounts.each_ref().map(|mount| unified.is_on(mount)), [false, false, true]);
    }
}
