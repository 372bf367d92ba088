//! Place of a process in the hierarchy of cgroups.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use cproxy_mountinfo as mountinfo;

use super::cgroups::cgroup_id;

/// Cgroup of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessCgroup {
    /// Its directory.
    pub dir: PathBuf,
    /// Its id, and before it those of all above it that can be seen.
    pub ids: Vec<u64>,
}

impl ProcessCgroup {
    /// Cgroup of the process with this id; of this process without one.
    ///
    /// # Errors
    /// There is no such process, or no mount shows the cgroup.
    pub fn of(pid: Option<u32>) -> io::Result<Self> {
        let process = pid.map_or_else(|| "self".to_owned(), |pid| pid.to_string());
        let text = fs::read_to_string(format!("/proc/{process}/cgroup"))?;
        let path = path_in(&text).ok_or(io::ErrorKind::NotFound)?;
        let mounts = mountinfo::list()?.into_iter().filter(|mount| mount.kind == b"cgroup2");
        let mut shown = mounts.filter_map(|mount| below(&mount.point, path.strip_prefix(&mount.root).ok()?));
        shown.next().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// Path of the process in the hierarchy of version 2.
fn path_in(text: &str) -> Option<&Path> {
    // A cgroup that was removed has a mark behind its path, and no directory.
    text.lines().find_map(|line| line.strip_prefix("0::")).map(Path::new)
}

fn below(point: &Path, path: &Path) -> Option<ProcessCgroup> {
    let mut dir = PathBuf::from(point);
    let mut ids = vec![cgroup_id(&dir).ok()?];
    for name in path {
        dir.push(name);
        ids.push(cgroup_id(&dir).ok()?);
    }
    // Another file system may cover the mount.
    dir.join("cgroup.procs").exists().then_some(ProcessCgroup { dir, ids })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_version_2_has_the_path() {
        assert_eq!(path_in("5:cpu:/x\n1:name=systemd:/y\n0::/a/b c\n"), Some(Path::new("/a/b c")));
        assert_eq!(path_in("5:cpu:/x\n"), None);
    }
}
