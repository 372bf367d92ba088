//! Leftovers of tests and demonstrations, of which there should be none: cgroups, on which an attached program would go
//! on answering, mounts and temporary directories. All carry the process id of their maker in their name,
//! `cproxy-test-<pid>-<n>`.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::run;

const PREFIXES: [&str; 2] = ["cproxy-test-", "cproxy-demo-"];

/// Something of a test's or demonstration's that still exists.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Leftover {
    /// A cgroup, by its directory.
    Cgroup(PathBuf),
    /// A mount, by its mount point.
    Mount(PathBuf),
    /// A directory for temporary files.
    Directory(PathBuf),
}

/// Removes what dead processes left; returns what belongs to live ones, which are other runs on this machine.
pub(crate) fn clear() -> Result<Vec<Leftover>> {
    let (orphans, others): (Vec<_>, Vec<_>) = find()?.into_iter().partition(Leftover::is_orphan);
    for orphan in orphans {
        run::say(format!("sweep: an earlier run left {orphan}; {}", removal(&orphan)));
    }
    Ok(others)
}

/// Names what exists now and did not belong to another run before; removes it where its maker is dead.
pub(crate) fn left_since(before: &[Leftover]) -> Result<Vec<String>> {
    let left = find()?.into_iter().filter(|leftover| !before.contains(leftover));
    Ok(left.map(|leftover| describe(&leftover)).collect())
}

fn describe(leftover: &Leftover) -> String {
    let outcome = if leftover.is_orphan() { removal(leftover) } else { "its process is alive, so it stays".to_owned() };
    format!("left behind: {leftover}; {outcome}")
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
        maker(self.path()).is_some_and(|process| !Path::new("/proc").join(process.to_string()).exists())
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
fn maker(path: &Path) -> Option<u32> {
    let names = path.iter().filter_map(|part| part.to_str());
    let tail = names.rev().find_map(|name| PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)))?;
    tail.split('-').next()?.parse().ok()
}

fn find() -> Result<Vec<Leftover>> {
    let mounts = mounts()?;
    // The deepest mount is the last in the table, and must be unmounted first.
    let ours = mounts.iter().rev().filter(|mount| is_ours(&mount.point));
    let mut found: Vec<Leftover> = ours.map(|mount| Leftover::Mount(PathBuf::from(&mount.point))).collect();
    for mount in mounts.iter().filter(|mount| ["cgroup", "cgroup2"].contains(&mount.kind.as_str())) {
        find_cgroups(Path::new(&mount.point), &mut found);
    }
    let temporary = children(&env::temp_dir()).into_iter().filter(|child| child.to_str().is_some_and(is_ours));
    found.extend(temporary.map(Leftover::Directory));
    Ok(found)
}

/// Whether this machine has the cgroup hierarchy that programs are attached to.
pub(crate) fn has_cgroup2() -> bool {
    mounts().is_ok_and(|mounts| mounts.iter().any(|mount| mount.kind == "cgroup2"))
}

fn is_ours(path: &str) -> bool {
    PREFIXES.iter().any(|prefix| path.contains(&format!("/{prefix}")))
}

/// Cgroups come and go while this looks: what cannot be read is gone.
fn find_cgroups(directory: &Path, found: &mut Vec<Leftover>) {
    for child in children(directory) {
        let leftover = Leftover::Cgroup(child.clone());
        if !child.to_str().is_some_and(is_ours) {
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
    if let Some(mount) = mounts()?.iter().find(|mount| Path::new(&mount.point).starts_with(directory)) {
        bail!("{} is still mounted", mount.point);
    }
    fs::remove_dir_all(directory).with_context(|| format!("removing {}", directory.display()))
}

#[derive(PartialEq, Eq, Debug)]
struct Mount {
    point: String,
    kind: String,
}

fn mounts() -> Result<Vec<Mount>> {
    Ok(parse_mounts(&fs::read_to_string("/proc/self/mountinfo").context("reading /proc/self/mountinfo")?))
}

/// The mounts in the format of `/proc/self/mountinfo`: optional fields of varying number end at a lone `-`.
fn parse_mounts(table: &str) -> Vec<Mount> {
    let mounts = table.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let point = unescape(before.split(' ').nth(4)?);
        Some(Mount { point, kind: after.split(' ').next()?.to_owned() })
    });
    mounts.collect()
}

/// The kernel writes spaces, tabs, line ends and backslashes as three octal digits.
fn unescape(field: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(field.to_owned(), |text, (escaped, plain)| text.replace(escaped, plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 master:1 - cgroup2 cgroup2 rw\n\
        50 27 0:40 / /tmp/cproxy-test-12-0/with\\040space rw - bpf bpf rw,mode=700\nnonsense\n";

    #[test]
    fn mount_points_and_kinds_are_read() {
        let mounts = parse_mounts(TABLE);
        let pairs: Vec<_> = mounts.iter().map(|mount| (mount.point.as_str(), mount.kind.as_str())).collect();
        let expected = [
            ("/sys/fs/cgroup", "tmpfs"),
            ("/sys/fs/cgroup/unified", "cgroup2"),
            ("/tmp/cproxy-test-12-0/with space", "bpf"),
        ];
        assert_eq!(pairs, expected);
    }

    #[test]
    fn the_maker_is_in_the_name() {
        assert_eq!(maker(Path::new("/sys/fs/cgroup/cproxy-test-123-4")), Some(123));
        assert_eq!(maker(Path::new("/tmp/cproxy-demo-77/bpf")), Some(77));
        assert_eq!(maker(Path::new("/tmp/cproxy-test-x")), None);
        assert_eq!(maker(Path::new("/tmp/other-1-2")), None);
    }

    #[test]
    fn only_names_of_tests_and_demonstrations_are_ours() {
        assert!(is_ours("/sys/fs/cgroup/cproxy-demo-1-2"));
        assert!(!is_ours("/sys/fs/cgroup/cproxy.service") && !is_ours("/tmp/my-cproxy-test-1"));
    }

    #[test]
    fn a_dead_process_makes_an_orphan_and_a_live_one_does_not() {
        let own = std::process::id();
        assert!(!Leftover::Cgroup(format!("/x/cproxy-test-{own}-0").into()).is_orphan());
        assert!(Leftover::Cgroup(format!("/x/cproxy-test-{}-0", u32::MAX).into()).is_orphan());
        assert!(!Leftover::Cgroup("/x/cproxy-test-unknown".into()).is_orphan());
    }
}
