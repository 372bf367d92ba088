//! The place of this process in the hierarchy of cgroups.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use cproxy_mountinfo as mountinfo;

use super::cgroups::cgroup_id;

/// Ids of the cgroup of this process and of all above it that can be seen.
///
/// # Errors
/// No mount shows the cgroup.
pub fn own_cgroup_ids() -> io::Result<Vec<u64>> {
    let text = fs::read_to_string("/proc/self/cgroup")?;
    let path = own_path(&text).ok_or(io::ErrorKind::NotFound)?;
    let mounts = mountinfo::list()?.into_iter().filter(|mount| mount.kind == b"cgroup2");
    let mut ids = mounts.filter_map(|mount| ids_below(&mount.point, path.strip_prefix(&mount.root).ok()?));
    ids.next().ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Path of the process in the hierarchy of version 2.
fn own_path(text: &str) -> Option<&Path> {
    // A cgroup that was removed has a mark behind its path, and no directory.
    text.lines().find_map(|line| line.strip_prefix("0::")).map(Path::new)
}

fn ids_below(point: &Path, path: &Path) -> Option<Vec<u64>> {
    let mut dir = PathBuf::from(point);
    let mut ids = vec![cgroup_id(&dir).ok()?];
    for name in path {
        dir.push(name);
        ids.push(cgroup_id(&dir).ok()?);
    }
    // Another file system may cover the mount.
    dir.join("cgroup.procs").exists().then_some(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_version_2_has_the_path() {
        assert_eq!(own_path("5:cpu:/x\n1:name=systemd:/y\n0::/a/b c\n"), Some(Path::new("/a/b c")));
        assert_eq!(own_path("5:cpu:/x\n"), None);
    }
}
