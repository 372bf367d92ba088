//! Paths at which the agent may change names.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
};

/// Kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// A file that did not exist.
    Create,
    /// The file of a unix socket, which did not exist.
    Bind,
    /// A file gets another name, or is replaced.
    Rename,
    /// A file is removed.
    Remove,
    /// A directory is made.
    MakeDirectory,
    /// An empty directory is removed.
    RemoveDirectory,
}

/// Directory of a change, as the kernel knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parent<'p> {
    /// Its path, without symbolic links.
    pub(super) path: &'p Path,
    /// Device and inode.
    pub(super) identity: (u64, u64),
    /// Mount that it was reached on. In another mount namespace, anything can be on the same path.
    pub(super) mount: u64,
}

/// Paths of an agent.
#[derive(Debug)]
pub(super) struct AllowedPaths {
    /// Device and inode of the run directory: on its path there may be another one by now.
    pub(super) run_dir: (u64, u64),
    /// The pin directory, without symbolic links; it may be removed and made again.
    pub(super) pin_dir: PathBuf,
    /// Files of sockets, without symbolic links.
    pub(super) files: Vec<PathBuf>,
}

impl AllowedPaths {
    /// Whether a name in a directory may change. The name has no slash in it. `mount_of` has the mount that is on a
    /// path now, where the broker is: numbers of mounts that have gone are given again.
    pub(super) fn allow(
        &self,
        parent: Parent<'_>,
        name: &OsStr,
        change: Change,
        mount_of: impl Fn(&Path) -> Option<u64>,
    ) -> bool {
        if name.is_empty() || name == "." || name == ".." {
            return false;
        }
        let (path, is_run_dir) = (parent.path.join(name), parent.identity == self.run_dir);
        let is_here = |directory: &Path| mount_of(directory) == Some(parent.mount);
        let is_pin = parent.path.starts_with(&self.pin_dir) && is_here(parent.path);
        let is_file = || self.files.contains(&path) && is_here(parent.path);
        match change {
            Change::Create => is_run_dir,
            Change::Bind => is_run_dir || is_file(),
            Change::Rename => is_run_dir || is_pin,
            Change::Remove => is_run_dir || is_pin || is_file(),
            Change::MakeDirectory => is_pin || path == self.pin_dir && is_here(parent.path),
            Change::RemoveDirectory => is_pin,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_change_in_the_agents_places_alone() {
        let allowed_paths = AllowedPaths {
            run_dir: (1, 7),
            pin_dir: "/sys/fs/bpf/cproxy".into(),
            files: vec!["/run/vmm/metrics.sock".into()],
        };
        let mount_of = |path: &Path| Some(if path.starts_with("/sys/fs/bpf") { 3 } else { 1 });
        let on_mount = |mount, path: &str, identity, name: &str| {
            let parent = Parent { path: Path::new(path), identity, mount };
            use Change::{Bind, Create, MakeDirectory, Remove, RemoveDirectory, Rename};
            assert_eq!(
                allowed_paths.allow(parent, OsStr::new(name), Bind, mount_of),
                identity == (1, 7) && !["", ".", ".."].contains(&name) || name == "metrics.sock" && mount == 1
            );
            [Create, Rename, Remove, MakeDirectory, RemoveDirectory]
                .map(|change| allowed_paths.allow(parent, OsStr::new(name), change, mount_of))
        };
        // The first number of an identity stands for the mount, too.
        let allowed = |path: &str, identity: (u64, u64), name: &str| on_mount(identity.0, path, identity, name);
        let none = [false; 5];
        for (path, name) in [("/sys/fs/bpf/cproxy/v7", "udp"), ("/sys/fs/bpf", "cproxy"), ("/run/vmm", "metrics.sock")]
        {
            assert_eq!(on_mount(9, path, (9, 2), name), none, "{path}/{name} of another mount namespace");
        }
        assert_eq!(allowed("/run/cproxy", (1, 7), "ready"), [true, true, true, false, false]);
        assert_eq!(allowed("/run/cproxy", (1, 8), "ready"), none, "another directory on the same path");
        assert_eq!(allowed("/run/cproxy/cgroup2", (2, 1), "x"), none);
        assert_eq!(allowed("/sys/fs/bpf/cproxy/v7", (3, 2), "udp"), [false, true, true, true, true]);
        assert_eq!(allowed("/sys/fs/bpf/cproxy", (3, 1), "v7"), [false, true, true, true, true]);
        assert_eq!(allowed("/sys/fs/bpf", (3, 0), "cproxy"), [false, false, false, true, false]);
        assert_eq!(allowed("/sys/fs/bpf", (3, 0), "cproxy2"), none);
        assert_eq!(allowed("/sys/fs/bpf/cproxy2", (3, 9), "v7"), none);
        assert_eq!(allowed("/run/vmm", (1, 20), "metrics.sock"), [false, false, true, false, false]);
        assert_eq!(allowed("/run/vmm", (1, 20), "vmm.sock"), none);
        assert_eq!(allowed("/etc", (1, 2), "passwd"), none);
        for name in ["", ".", ".."] {
            assert_eq!(allowed("/run/cproxy", (1, 7), name), none, "{name:?}");
        }
    }
}
