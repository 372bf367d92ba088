//! Leftovers of tests and demonstrations, of which there should be none: cgroups, whose programs would stay in force,
//! mounts and temporary directories. The name of each holds the process id of its creator: `cproxy-test-<pid>-<n>`.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use cproxy_mountinfo::MountEntry;

use crate::run;

/// Beginnings of the names. A test may add words before the process id: `cproxy-test blank-<pid>-<n>`.
const PREFIXES: [&str; 2] = ["cproxy-test", "cproxy-demo"];

/// A cgroup, mount or directory of a test or demonstration that still exists.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Leftover {
    /// A cgroup, by its directory.
    Cgroup(PathBuf),
    /// A mount, by its mount point.
    Mount(PathBuf),
    /// A directory for temporary files.
    Directory(PathBuf),
}

/// Removes leftovers of dead processes; returns those of live ones, which are other runs on this machine.
pub(crate) fn clear() -> Result<Vec<Leftover>> {
    let (orphans, others): (Vec<_>, Vec<_>) = find()?.into_iter().partition(Leftover::is_orphan);
    for orphan in orphans {
        run::report(format!("sweep: an earlier run left {orphan}; {}", removal(&orphan)));
    }
    Ok(others)
}

/// Removes the leftovers that are not among those `before`, and describes them. Those of live processes belong to other
/// runs on this machine: ours have ended.
pub(crate) fn left_since(before: &[Leftover]) -> Result<Vec<String>> {
    let left = find()?.into_iter().filter(|leftover| leftover.is_orphan() && !before.contains(leftover));
    Ok(left.map(|leftover| format!("left behind: {leftover}; {}", removal(&leftover))).collect())
}

fn removal(leftover: &Leftover) -> String {
    match leftover.remove() {
        Ok(()) => "removed".to_owned(),
        Err(error) => format!("not removed: {error:#}"),
    }
}

impl fmt::Display for Leftover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Cgroup(_) => "cgroup",
            Self::Mount(_) => "mount",
            Self::Directory(_) => "directory",
        };
        write!(f, "{kind} {}", self.path().display())
    }
}

impl Leftover {
    fn path(&self) -> &Path {
        match self {
            Self::Cgroup(path) | Self::Mount(path) | Self::Directory(path) => path,
        }
    }

    fn is_orphan(&self) -> bool {
        creator(self.path()).is_some_and(|process| !Path::new("/proc").join(process.to_string()).exists())
    }

    fn remove(&self) -> Result<()> {
        match self {
            Self::Cgroup(path) => remove_cgroup(path),
            Self::Mount(path) => run::capture(Command::new("umount").arg("--lazy").arg(path)).map(drop),
            Self::Directory(path) => remove_directory(path),
        }
    }
}

/// The process id in the name of a leftover.
fn creator(path: &Path) -> Option<u32> {
    let name = path.iter().rev().find_map(|part| sandbox_name(part.to_str()?))?;
    name.split('-').nth(1)?.parse().ok()
}

/// The part of a sandbox's name behind the prefix.
fn sandbox_name(name: &str) -> Option<&str> {
    let rest = PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix))?;
    rest.starts_with(['-', ' ']).then_some(rest)
}

fn find() -> Result<Vec<Leftover>> {
    let mounts = mounts()?;
    let mut found = mounts_of_ours(&mounts);
    for mount in mounts.iter().filter(|mount| [&b"cgroup"[..], b"cgroup2"].contains(&mount.kind.as_slice())) {
        find_cgroups(&mount.point, &mut found);
    }
    let temporary = children(&env::temp_dir()).into_iter().filter(|child| is_ours(child));
    found.extend(temporary.map(Leftover::Directory));
    Ok(found)
}

/// The mounts of tests and demonstrations, the deepest first: it is the last in the list and must be unmounted first.
fn mounts_of_ours(mounts: &[MountEntry]) -> Vec<Leftover> {
    let ours = mounts.iter().rev().filter(|mount| is_ours(&mount.point));
    ours.map(|mount| Leftover::Mount(mount.point.clone())).collect()
}

/// Whether this machine has the cgroup hierarchy that programs are attached to.
pub(crate) fn has_cgroup2() -> bool {
    mounts().is_ok_and(|mounts| mounts.iter().any(|mount| mount.kind == b"cgroup2"))
}

fn is_ours(path: &Path) -> bool {
    path.iter().any(|part| part.to_str().and_then(sandbox_name).is_some())
}

/// Adds the cgroups of tests and demonstrations. Cgroups come and go meanwhile: one that cannot be read is gone.
fn find_cgroups(directory: &Path, found: &mut Vec<Leftover>) {
    for child in children(directory) {
        let leftover = Leftover::Cgroup(child.clone());
        if !is_ours(&child) {
            find_cgroups(&child, found);
        } else if !found.contains(&leftover) {
            found.push(leftover);
        }
    }
}

fn children(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()).collect()
}

fn remove_cgroup(directory: &Path) -> Result<()> {
    for child in children(directory) {
        remove_cgroup(&child)?;
    }
    fs::remove_dir(directory).with_context(|| format!("removing {}", directory.display()))
}

/// Removes a directory, but never through a mount: the files behind one belong to others.
fn remove_directory(directory: &Path) -> Result<()> {
    if let Some(mount) = mounts()?.iter().find(|mount| mount.point.starts_with(directory)) {
        bail!("{} is still mounted", mount.point.display());
    }
    fs::remove_dir_all(directory).with_context(|| format!("removing {}", directory.display()))
}

fn mounts() -> Result<Vec<MountEntry>> {
    cproxy_mountinfo::list().with_context(|| format!("reading {}", cproxy_mountinfo::PATH))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(point: &str) -> MountEntry {
        let (root, kind, options) = ("/".into(), b"bpf".to_vec(), b"rw".to_vec());
        MountEntry { id: 1, root, point: point.into(), kind, options }
    }

    #[test]
    fn mounts_of_tests_are_unmounted_from_the_deepest_on() {
        let points =
            ["/", "/tmp/cproxy-test-12-0", "/run", "/tmp/cproxy-test-12-0/bpf", "/tmp/cproxy-test blank-7-1/bpf"];
        let ours = mounts_of_ours(&points.map(mount));
        let expected = [points[4], points[3], points[1]].map(|point| Leftover::Mount(point.into()));
        assert_eq!(ours, expected);
    }

    #[test]
    fn the_creator_is_in_the_name() {
        assert_eq!(creator(Path::new("/sys/fs/cgroup/cproxy-test-123-4")), Some(123));
        assert_eq!(creator(Path::new("/tmp/cproxy-demo-77/bpf")), Some(77));
        assert_eq!(creator(Path::new("/tmp/cproxy-test blank-42-1/bpf")), Some(42));
        assert_eq!(creator(Path::new("/sys/fs/cgroup/cproxy-test-5-1/beside")), Some(5));
        assert_eq!(creator(Path::new("/tmp/cproxy-test-x")), None);
        assert_eq!(creator(Path::new("/tmp/other-1-2")), None);
    }

    #[test]
    fn only_names_of_tests_and_demonstrations_are_ours() {
        for (path, expected) in [
            ("/sys/fs/cgroup/cproxy-demo-1-2", true),
            ("/tmp/cproxy-test blank-1-2/bpf", true),
            ("/sys/fs/cgroup/cproxy.service", false),
            ("/tmp/my-cproxy-test-1", false),
            ("/tmp/cproxy-tests", false),
        ] {
            assert_eq!(is_ours(Path::new(path)), expected, "{path}");
        }
    }

    #[test]
    fn a_dead_process_makes_an_orphan_and_a_live_one_does_not() {
        let own = std::process::id();
        assert!(!Leftover::Cgroup(format!("/x/cproxy-test-{own}-0").into()).is_orphan());
        assert!(Leftover::Cgroup(format!("/x/cproxy-test-{}-0", u32::MAX).into()).is_orphan());
        assert!(!Leftover::Cgroup("/x/cproxy-test-unknown".into()).is_orphan());
    }
}
