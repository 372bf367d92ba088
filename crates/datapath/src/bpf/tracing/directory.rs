//! Directory of a tracer, and its lock.

use std::{
    fs, io,
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::{fs::FlockOperation, io::Errno};

use super::error::TraceError;
use crate::{
    bpf::{
        pins::{PinDir, TRACE_DIRECTORY, remove_pins_in, remove_with_pins},
        policy::send_events,
    },
    owned_dir,
};

/// Time for which the agent may hold the lock while it looks for a tracer.
const LOOK_MAX: Duration = Duration::from_millis(200);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(5);

pub(super) fn directory(pins: &PinDir) -> PathBuf {
    pins.object(TRACE_DIRECTORY)
}

pub(super) fn path(pins: &PinDir, name: &str) -> PathBuf {
    directory(pins).join(name)
}

/// Makes the directory and locks it.
pub(super) fn lock(pins: &PinDir) -> Result<OwnedFd, TraceError> {
    let path = directory(pins);
    let failed = |error: io::Error| TraceError::Io(path.clone(), error);
    let deadline = Instant::now() + LOOK_MAX;
    loop {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(failed)?;
        let dir = owned_dir::open(&path).map_err(failed)?;
        match rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive) {
            // A tracer that ends removes the directory that it has locked.
            Ok(()) | Err(Errno::NOSYS) if is_at(&dir, &path) => return Ok(dir),
            Ok(()) | Err(Errno::NOSYS | Errno::WOULDBLOCK) => {}
            Err(error) => return Err(failed(error.into())),
        }
        if Instant::now() >= deadline {
            return Err(TraceError::Busy(path));
        }
        thread::sleep(PAUSE);
    }
}

/// Whether a process traces. True on a kernel without file locks (CONFIG_FILE_LOCKING).
pub(super) fn is_locked(pins: &PinDir) -> bool {
    let Ok(dir) = owned_dir::open_any(&directory(pins)) else { return false };
    rustix::fs::flock(&dir, FlockOperation::NonBlockingLockShared).is_err()
}

/// Whether an opened directory still has this path.
pub(super) fn is_at(dir: &OwnedFd, path: &Path) -> bool {
    let Ok(own) = rustix::fs::fstat(dir) else { return false };
    fs::metadata(path).is_ok_and(|other| (other.dev(), other.ino()) == (own.st_dev, own.st_ino))
}

/// Removes the pins of a tracer that was killed. Call it once no link leads to its programs. A tracer that is alive
/// keeps its pins, and one that starts waits for the lock.
pub(in crate::bpf) fn remove_leftover(pins: &PinDir) -> io::Result<()> {
    let path = directory(pins);
    if !path.exists() {
        return Ok(());
    }
    let dir = owned_dir::open(&path)?;
    let is_ours = rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive).is_ok() && is_at(&dir, &path);
    if !is_ours {
        return Ok(());
    }
    send_events(pins, None).map_err(io::Error::other)?;
    remove_with_pins(&path)
}

/// Removes the directory and all pins in it.
pub(super) fn remove_all(pins: &PinDir) -> io::Result<()> {
    remove_with_pins(&directory(pins))
}

/// Removes all pins in the directory.
pub(super) fn remove_pins(pins: &PinDir) -> Result<(), TraceError> {
    remove_pins_in(&directory(pins)).map_err(|error| TraceError::Io(directory(pins), error))
}
