//! The run directory: `ready` says that the table has been complete since this agent started.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, Mode, OFlags};

use super::AgentError;
use crate::{
    admin,
    wait::{self, FAILED, READY, UNUSABLE},
};

/// The run directory of this agent; what it put there goes with it.
#[derive(Debug)]
pub(super) struct RunDir {
    dir: PathBuf,
    /// Held: no other agent uses the directory.
    _lock: OwnedFd,
}

impl RunDir {
    /// Makes it, and takes away what a dead agent left.
    pub(super) fn create(dir: &Path) -> Result<Self, AgentError> {
        let failed = |error| AgentError::RunDir(dir.to_owned(), error);
        fs::create_dir_all(dir).map_err(failed)?;
        let lock = lock(dir).map_err(failed)?;
        clear(dir).map_err(failed)?;
        Ok(Self { dir: dir.to_owned(), _lock: lock })
    }

    /// Lets `ready` appear, whole at once. It says in which boot that was: on a lasting file system it may outlive the machine.
    pub(super) fn set_ready(&self) -> Result<(), AgentError> {
        let temporary = self.dir.join(".ready");
        let failed = |error| AgentError::RunDir(self.dir.clone(), error);
        fs::write(&temporary, wait::this_boot()).map_err(failed)?;
        fs::rename(&temporary, self.dir.join(READY)).map_err(failed)
    }
}

/// Takes away what a dead agent has left; fails if one is alive.
pub(super) fn clear_unused(dir: &Path) -> Result<(), AgentError> {
    let failed = |error| AgentError::RunDir(dir.to_owned(), error);
    if !dir.is_dir() {
        return Ok(());
    }
    let _lock = lock(dir).map_err(failed)?;
    clear(dir).map_err(failed)
}

/// Leaves word of why the agent has ended, for those who wait for it. Where another agent is alive, nothing is said; where
/// it cannot be said, the log has it all the same.
pub(super) fn leave_word(dir: &Path, name: &str, reason: &str) {
    // Besides the lock, which not every kernel has.
    if admin::is_answered(dir) {
        return;
    }
    let leave = || {
        fs::create_dir_all(dir)?;
        let _lock = lock(dir)?;
        clear(dir)?;
        fs::write(dir.join(name), format!("{reason}\n"))
    };
    leave().ok();
}

fn lock(dir: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(dir, flags, Mode::empty())?;
    match rustix::fs::flock(&opened, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(io::Error::other("in use by a running cproxy; pass another one")),
        // A kernel without file locks (CONFIG_FILE_LOCKING) cannot tell two agents apart.
        Err(rustix::io::Errno::NOSYS) => Ok(opened),
        result => Ok(result.map(|()| opened)?),
    }
}

fn clear(dir: &Path) -> io::Result<()> {
    for name in [READY, FAILED, UNUSABLE, admin::SOCKET] {
        match fs::remove_file(dir.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

impl Drop for RunDir {
    fn drop(&mut self) {
        // The directory may have gone; then so has what is to be taken away.
        clear(&self.dir).ok();
    }
}
