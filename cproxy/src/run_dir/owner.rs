//! Run directory of a running agent, and the record of one that could not run.

use std::{
    ffi::OsStr,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use cproxy_core::printable;
use cproxy_daemon::unix_socket::{self, SocketFile};
use cproxy_datapath::owned_dir;
use tokio::net::UnixListener;

use super::{
    client, files, life, lock,
    protocol::{CLOSED, FAILED, LIMITED, READY, SOCKET, UNUSABLE},
};

/// Reason why a run directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("--run-dir {0}: {1}")]
pub struct RunDirError(PathBuf, io::Error);

/// Run directory of this agent, which removes its files when it ends.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    dir: OwnedFd,
    /// Lock that no other agent can hold.
    _lock: OwnedFd,
    /// Socket that shows that this agent lives.
    _alive: OwnedFd,
}

impl RunDir {
    /// Claims the directory, which is made if it does not exist, and removes a dead agent's files.
    ///
    /// # Errors
    /// Another agent or user has it.
    pub fn claim(path: &Path) -> Result<Self, RunDirError> {
        let claim = || {
            let dir = owned_dir::create(path)?;
            let lock = lock::acquire(&dir)?;
            files::clear(&dir)?;
            let alive = life::show(&dir)?;
            Ok(Self { path: path.to_owned(), dir, _lock: lock, _alive: alive })
        };
        claim().map_err(|error| RunDirError(path.to_owned(), error))
    }

    /// Fails if another agent has the directory, or if it is none that can be opened. Changes nothing.
    ///
    /// # Errors
    /// Another agent has it, or it cannot be opened.
    pub fn check_unused(path: &Path) -> Result<(), RunDirError> {
        match owned_dir::open_any(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            dir => dir.and_then(|dir| lock::check_free(&dir)),
        }
        .map_err(|error| RunDirError(path.to_owned(), error))
    }

    /// Creates the socket for requests.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn listen(&self) -> Result<(UnixListener, Arc<SocketFile>), RunDirError> {
        let path = self.path.join(SOCKET);
        let listen = |directory| unix_socket::listen_in(directory, OsStr::new(SOCKET), &path);
        let listening = self.dir.try_clone().and_then(listen).map(|(listener, file)| (listener, Arc::new(file)));
        listening.map_err(|error| RunDirError(path, error))
    }

    /// Writes `limited` with the caveat about the programs' cgroup.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn set_limited(&self, caveat: &str) -> Result<(), RunDirError> {
        self.write(LIMITED, &format!("{caveat}\n"))
    }

    /// Writes `closed` with the reason why the pod's policy is not in force, or removes it.
    ///
    /// # Errors
    /// It cannot be written or removed.
    pub fn set_closed(&self, reason: Option<&str>) -> Result<(), RunDirError> {
        match reason {
            Some(reason) => self.write(CLOSED, &format!("{}\n", printable(reason))),
            None => files::remove(&self.dir, CLOSED).map_err(|error| RunDirError(self.path.clone(), error)),
        }
    }

    /// Writes `ready`.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn set_ready(&self) -> Result<(), RunDirError> {
        self.write(READY, &files::boot_id())
    }

    /// Writes `ready` again if somebody has removed it.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn restore_ready(&self) -> Result<(), RunDirError> {
        if files::exists(&self.dir, READY) { Ok(()) } else { self.set_ready() }
    }

    /// Removes `ready`.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn clear_ready(&self) -> Result<(), RunDirError> {
        files::remove(&self.dir, READY).map_err(|error| RunDirError(self.path.clone(), error))
    }

    fn write(&self, name: &str, text: &str) -> Result<(), RunDirError> {
        files::write(&self.dir, name, text).map_err(|error| RunDirError(self.path.clone(), error))
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        // If the directory has gone, there is nothing to remove.
        files::clear(&self.dir).ok();
    }
}

/// Removes a dead agent's files; the agent may have been another user's.
///
/// # Errors
/// An agent is alive there, or a file cannot be removed.
pub fn clear_unused(path: &Path) -> Result<(), RunDirError> {
    let clear = || {
        let dir = owned_dir::open_any(path)?;
        let _lock = lock::acquire_existing(&dir)?;
        files::clear(&dir)
    };
    if !path.is_dir() {
        return Ok(());
    }
    clear().map_err(|error| RunDirError(path.to_owned(), error))
}

/// Kind of an agent's failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Another attempt may succeed.
    Transient,
    /// Another attempt on this machine would fail in the same way.
    Lasting,
}

/// Records why an agent has ended or could not start, for those that wait for it. Nothing is written if another agent
/// is alive; a failure to write is ignored, since the log has the reason too.
pub fn record_failure(path: &Path, failure: Failure, reason: &str) {
    // A second check besides the lock, which not every kernel has.
    if client::is_agent_listening(path) {
        return;
    }
    let name = match failure {
        Failure::Transient => FAILED,
        Failure::Lasting => UNUSABLE,
    };
    let record = || {
        let dir = owned_dir::create(path)?;
        let _lock = lock::acquire(&dir)?;
        files::clear(&dir)?;
        files::write(&dir, name, &format!("{reason}\n"))
    };
    record().ok();
}
