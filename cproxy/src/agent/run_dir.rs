//! Run directory: `ready` means that the table has been complete since this agent started.
//!
//! All access is through the opened directory: other users know its path too, and may have put links there.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use cproxy_datapath::owned_dir;
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, fstat, openat, renameat, unlinkat};
use tokio::net::UnixListener;

use super::AgentError;
use crate::{
    admin,
    wait::{self, FAILED, LIMITED, READY, UNUSABLE},
};

/// Lock file of the agent that uses the directory. Other users cannot open it, and so cannot hold the lock.
const LOCK: &str = "lock";

/// Name of a file until it is complete.
const TEMPORARY: &str = ".new";

/// Run directory of this agent, which removes its files when it ends.
#[derive(Debug)]
pub(super) struct RunDir {
    path: PathBuf,
    dir: OwnedFd,
    /// Lock that no other agent can hold.
    _lock: OwnedFd,
}

impl RunDir {
    /// Creates the directory, and removes a dead agent's files.
    pub(super) fn create(path: &Path) -> Result<Self, AgentError> {
        Self::take(path).map_err(|error| AgentError::RunDir(path.to_owned(), error))
    }

    fn take(path: &Path) -> io::Result<Self> {
        let dir = owned_dir::create(path)?;
        let lock = lock(&dir)?;
        clear(&dir)?;
        Ok(Self { path: path.to_owned(), dir, _lock: lock })
    }

    /// Creates the socket on which the agent answers.
    pub(super) fn listen(&self) -> Result<UnixListener, AgentError> {
        UnixListener::bind(owned_dir::path_in(&self.dir, admin::SOCKET))
            .map_err(|error| AgentError::RunDir(self.path.join(admin::SOCKET), error))
    }

    /// Leaves the caveat about the programs' cgroup for `cproxy wait`.
    pub(super) fn set_limited(&self, caveat: &str) -> Result<(), AgentError> {
        self.write(LIMITED, &format!("{caveat}\n"))
    }

    /// Creates `ready`, which names the boot: on a lasting file system it may outlive the machine.
    pub(super) fn set_ready(&self) -> Result<(), AgentError> {
        self.write(READY, &wait::this_boot())
    }

    fn write(&self, name: &str, text: &str) -> Result<(), AgentError> {
        write(&self.dir, name, text).map_err(|error| AgentError::RunDir(self.path.clone(), error))
    }
}

/// Removes a dead agent's files; fails if one is alive. The agent may have been another user's.
pub(super) fn clear_unused(path: &Path) -> Result<(), AgentError> {
    let clear_unused = || {
        let dir = owned_dir::open_any(path)?;
        let _lock = match open_lock(&dir, OFlags::empty()) {
            // Without the lock file, no agent has used the directory.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            lock => Some(locked(lock?)?),
        };
        clear(&dir)
    };
    if !path.is_dir() {
        return Ok(());
    }
    clear_unused().map_err(|error| AgentError::RunDir(path.to_owned(), error))
}

/// Records why the agent has ended, for those that wait for it. Nothing is written if another agent is alive; a failure
/// is ignored, since the log has the reason too.
pub(super) fn leave_word(path: &Path, name: &str, reason: &str) {
    // A second check besides the lock, which not every kernel has.
    if admin::is_answered(path) {
        return;
    }
    let leave = || {
        let dir = owned_dir::create(path)?;
        let _lock = lock(&dir)?;
        clear(&dir)?;
        write(&dir, name, &format!("{reason}\n"))
    };
    leave().ok();
}

fn lock(dir: &OwnedFd) -> io::Result<OwnedFd> {
    let file = open_lock(dir, OFlags::CREATE)?;
    let stat = fstat(&file)?;
    let is_ours = stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_mode & 0o077 == 0;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if is_ours && is_file { locked(file) } else { Err(foreign_lock()) }
}

fn open_lock(dir: &OwnedFd, create: OFlags) -> io::Result<OwnedFd> {
    // Opening a FIFO would otherwise wait for a writer.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | create;
    openat(dir, LOCK, flags, Mode::RUSR | Mode::WUSR).map_err(|error| match error {
        rustix::io::Errno::LOOP => foreign_lock(),
        error => error.into(),
    })
}

fn foreign_lock() -> io::Error {
    io::Error::other(format!("its file `{LOCK}` is no lock of this user's alone; remove that file"))
}

fn locked(file: OwnedFd) -> io::Result<OwnedFd> {
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => {
            Err(io::Error::other("in use by a running cproxy; stop that first, or pass another directory"))
        }
        // A kernel without file locks (CONFIG_FILE_LOCKING) cannot tell two agents apart.
        Err(rustix::io::Errno::NOSYS) => Ok(file),
        result => Ok(result.map(|()| file)?),
    }
}

/// Writes a file atomically and replaces an earlier one.
fn write(dir: &OwnedFd, name: &str, text: &str) -> io::Result<()> {
    remove(dir, TEMPORARY)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(dir, TEMPORARY, flags, Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH)?;
    File::from(file).write_all(text.as_bytes())?;
    Ok(renameat(dir, TEMPORARY, dir, name)?)
}

fn clear(dir: &OwnedFd) -> io::Result<()> {
    [READY, LIMITED, FAILED, UNUSABLE, admin::SOCKET].into_iter().try_for_each(|name| remove(dir, name))
}

fn remove(dir: &OwnedFd, name: &str) -> io::Result<()> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Err(error) if error != rustix::io::Errno::NOENT => Err(error.into()),
        _ => Ok(()),
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        // If the directory has gone, there is nothing to remove.
        clear(&self.dir).ok();
    }
}
