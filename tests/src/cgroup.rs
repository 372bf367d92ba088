//! Separate cgroups: eBPF programs attached to one affect this process and its children only. Their parent holds no
//! others, since agents watch it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use cproxy_mountinfo::MountEntry;

/// Limit on the time that killed processes take to leave.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(60);

/// A cgroup that holds the whole process until dropped.
#[derive(Debug)]
pub(crate) struct ChildCgroup {
    pub(crate) path: PathBuf,
    /// Directory of another cgroup beside it, which only explicitly placed processes enter.
    pub(crate) beside: PathBuf,
    /// Directory of the process's former cgroup.
    pub(crate) origin: PathBuf,
    /// The cgroup that holds both, a child of the cgroup2 root.
    pub(crate) parent: PathBuf,
}

impl ChildCgroup {
    /// Creates the cgroup `name` with two in it, and moves the process into the first.
    pub(crate) fn enter(name: &str) -> Self {
        let mount = mount_point().unwrap_or_else(|error| panic!("{error}"));
        let origin = own_directory(&mount).unwrap_or_else(|error| panic!("{error}"));
        let parent = mount.point.join(name);
        let cgroup = Self { path: parent.join("hooked"), beside: parent.join("beside"), origin, parent };
        for path in [&cgroup.parent, &cgroup.path, &cgroup.beside] {
            fs::create_dir(path).unwrap_or_else(|error| panic!("cannot create the cgroup {}: {error}", path.display()));
        }
        move_process(&cgroup.path)
            .unwrap_or_else(|error| panic!("cannot move this process into {}: {error}", cgroup.path.display()));
        cgroup
    }

    fn leave_and_remove(&self) -> io::Result<()> {
        move_process(&self.origin)?;
        kill_and_remove(&self.parent)
    }
}

impl Drop for ChildCgroup {
    fn drop(&mut self) {
        if let Err(error) = self.leave_and_remove() {
            eprintln!("sandbox: the cgroup {} stays: {error}", self.parent.display());
        }
    }
}

/// Removes the remains of a killed process's cgroup `name`.
pub(crate) fn sweep(name: &str) -> io::Result<()> {
    let path = mount_point()?.point.join(name);
    if path.is_dir() { kill_and_remove(&path) } else { Ok(()) }
}

/// Kills the processes in the cgroup and below it, and removes it.
fn kill_and_remove(path: &Path) -> io::Result<()> {
    if own_directory(&mount_point()?)?.starts_with(path) {
        return Err(io::Error::other("this process is still inside"));
    }
    fs::write(path.join("cgroup.kill"), "1")?;
    remove_tree(path, Instant::now() + REMOVAL_TIMEOUT)
}

/// The cgroup2 file system.
fn mount_point() -> io::Result<MountEntry> {
    cproxy_mountinfo::list()?
        .into_iter()
        .find(|mount| mount.kind == b"cgroup2")
        .ok_or_else(|| io::Error::other("no cgroup2 file system is mounted: mount -t cgroup2 none /sys/fs/cgroup"))
}

/// Directory of this process's cgroup below `mount`.
fn own_directory(mount: &MountEntry) -> io::Result<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup")?;
    let own = text.lines().find_map(|line| line.strip_prefix("0::")).map(Path::new);
    let below = own.and_then(|own| own.strip_prefix(&mount.root).ok());
    let outside = || io::Error::other("the process's cgroup is outside what is mounted: leave the cgroup namespace");
    Ok(mount.point.join(below.ok_or_else(outside)?))
}

/// Moves all threads of this process.
fn move_process(directory: &Path) -> io::Result<()> {
    fs::write(directory.join("cgroup.procs"), "0")
}

/// Removes a cgroup and those below it. The kernel refuses while a killed process is still exiting.
fn remove_tree(path: &Path, deadline: Instant) -> io::Result<()> {
    for entry in fs::read_dir(path)?.flatten() {
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path(), deadline)?;
        }
    }
    loop {
        match fs::remove_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(2));
            }
            result => return result,
        }
    }
}
