//! Whom the memory of maps is charged to.
//!
//! The kernel charges what a map allocates, for as long as it lives, to the memory cgroup of the process that made it
//! (kernel/bpf/syscall.c, `bpf_map_kzalloc`). For us that would be the agent's, and what the programs keep with sockets of
//! all processes would count against the agent's limit: past it, sockets would lose their state. And charging is most of
//! what an allocation costs, in the middle of a `connect()`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Moves this process to the root of the memory cgroups, where nothing is charged. Meant for the short-lived process that
/// makes the maps.
///
/// # Errors
/// There is no such hierarchy, or it may not be written: as in a container, where charging goes on.
pub fn leave_memory_cgroup() -> io::Result<()> {
    let (cgroups, mounts) = (fs::read_to_string("/proc/self/cgroup")?, fs::read_to_string("/proc/self/mountinfo")?);
    let root = find_root(&cgroups, &mounts).ok_or(io::ErrorKind::NotFound)?;
    // "0" is whoever writes.
    fs::write(Path::new(&root).join("cgroup.procs"), "0")
}

/// The mount of the hierarchy that has the memory controller: a version 1 hierarchy of its own, or cgroup2.
fn find_root(cgroups: &str, mountinfo: &str) -> Option<PathBuf> {
    let has_memory = |list: &str| list.split(',').any(|name| name == "memory");
    let is_v1 = cgroups.lines().filter_map(|line| line.split(':').nth(1)).any(has_memory);
    mountinfo.lines().find_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        let mut words = filesystem.split(' ');
        let (kind, options) = (words.next()?, words.nth(1).unwrap_or_default());
        let is_it = if is_v1 { kind == "cgroup" && has_memory(options) } else { kind == "cgroup2" };
        (root == "/" && is_it).then(|| PathBuf::from(point))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "37 32 0:33 / /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory";
    const BIND: &str = "38 32 0:33 /a/pod /memory rw - cgroup cgroup rw,memory";
    const CPU: &str = "39 32 0:34 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct";
    const V2: &str = "42 32 0:38 / /sys/fs/cgroup/unified rw,relatime shared:4 - cgroup2 cgroup2 rw";

    #[test]
    fn memory_is_where_its_controller_is() {
        let hybrid = "5:cpu,cpuacct:/\n4:memory:/agent\n0::/\n";
        let mounts = [CPU, BIND, V2, V1].join("\n");
        assert_eq!(find_root(hybrid, &mounts), Some("/sys/fs/cgroup/memory".into()));
        assert_eq!(find_root("0::/agent\n", &mounts), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(find_root(hybrid, &[CPU, BIND, V2].join("\n")), None);
        assert_eq!(find_root("", "nothing of use - "), None);
    }
}
