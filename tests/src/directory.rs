//! The sandbox's directory: scratch files, a bpffs, and a lock that shows whether its owner is alive.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use rustix::mount::MountFlags;

use crate::{cgroup, mounts};

/// Lock file that the owner holds for as long as it lives. Unlike a process ID, a lock cannot pass to another process.
const LOCK: &str = "lock";

/// A directory below the one for temporary files. Dropping it unmounts and removes its contents.
#[derive(Debug)]
pub(crate) struct Directory {
    pub(crate) path: PathBuf,
    _lock: File,
}

impl Directory {
    /// Creates it, with `run`, `manifests`, and a bpffs at `bpf`.
    pub(crate) fn create(name: &str) -> Self {
        let path = parent().join(name);
        fs::create_dir(&path).unwrap_or_else(|error| panic!("cannot create {}: {error}", path.display()));
        let lock = lock(&path).unwrap_or_else(|error| panic!("cannot lock {}: {error}", path.display()));
        let directory = Self { path, _lock: lock };
        for below in ["bpf", "run", "manifests"] {
            fs::create_dir(directory.path.join(below)).expect("cannot create a directory in the sandbox's own");
        }
        rustix::mount::mount("bpf", directory.path.join("bpf"), "bpf", MountFlags::empty(), None)
            .expect("cannot mount a bpffs: run as root on a kernel with CONFIG_BPF_SYSCALL");
        directory
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.path) {
            eprintln!("sandbox: {} stays: {error}", self.path.display());
        }
    }
}

/// Removes the directories, mounts and cgroups of killed owners whose names start with `prefix`.
pub(crate) fn sweep(prefix: &str) {
    for entry in fs::read_dir(parent()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let ours = name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('-'));
        // Held to the end, so that only one process sweeps the directory.
        let Some(_lock) = ours.then(|| abandoned(&entry.path())).flatten() else { continue };
        if let Err(error) = cgroup::sweep(&name).and_then(|()| remove(&entry.path())) {
            eprintln!("sandbox: cannot sweep {}: {error}", entry.path().display());
        }
    }
}

/// The lock, if its owner is gone.
fn abandoned(path: &Path) -> Option<File> {
    let lock = File::open(path.join(LOCK)).ok()?;
    lock.try_lock().is_ok().then_some(lock)
}

/// Creates the lock, which appears only once it is held.
fn lock(path: &Path) -> io::Result<File> {
    let hidden = path.join(".lock");
    let lock = File::create_new(&hidden)?;
    // A guest's kernel without file locks (CONFIG_FILE_LOCKING) has only one process that would need them.
    lock.lock().or_else(|error| if error.raw_os_error() == Some(libc::ENOSYS) { Ok(()) } else { Err(error) })?;
    fs::rename(&hidden, path.join(LOCK))?;
    Ok(lock)
}

fn remove(path: &Path) -> io::Result<()> {
    // A failure must stop the removal: deleting through a mount would delete files of other users.
    mounts::unmount_below(path)?;
    fs::remove_dir_all(path)
}

/// Parent of the directories; a real path, since mountinfo shows real paths.
fn parent() -> PathBuf {
    fs::canonicalize(std::env::temp_dir()).expect("the directory for temporary files does not exist: create it")
}
