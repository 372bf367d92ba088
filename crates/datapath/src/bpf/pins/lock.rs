//! The lock of the one agent on a pin directory, and those of the layouts in it.

use std::{
    fs, io,
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rustix::{fs::FlockOperation, io::Errno};

use super::dir::{PinDir, PinError, list};
use crate::owned_dir;

/// Longest time for which a lock is waited for: the child of an agent that has ended while it was installing ends with
/// it, a moment later.
const WAIT_MAX: Duration = Duration::from_millis(500);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(5);

/// The lock of the one agent on a pin directory; the kernel releases it with the process.
#[derive(Debug)]
pub struct PinLock {
    pins: PinDir,
    dir: OwnedFd,
    is_empty: bool,
    /// Locks of older layouts, whose agents must not start meanwhile.
    _older: Vec<OwnedFd>,
}

impl PinLock {
    /// The lock of a directory that is prepared, and of those of older layouts.
    pub(in crate::bpf) fn new(pins: &PinDir, dir: OwnedFd, older: Vec<OwnedFd>) -> Result<Self, PinError> {
        Ok(Self { pins: pins.clone(), dir, is_empty: list(&pins.versioned())?.is_empty(), _older: older })
    }

    /// The pin directory.
    #[must_use]
    pub fn pins(&self) -> &PinDir {
        &self.pins
    }

    /// Whether nothing was pinned there: no program uses any map of ours.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.is_empty
    }

    /// Whether the directory that is locked is still there.
    pub(in crate::bpf) fn is_in_place(&self) -> Result<bool, PinError> {
        let stat = |error: Errno| PinError::Io(self.pins.versioned(), error.into());
        let own = rustix::fs::fstat(&self.dir).map_err(stat)?;
        let is_own = |other: fs::Metadata| (other.dev(), other.ino()) == (own.st_dev, own.st_ino);
        Ok(fs::metadata(self.pins.versioned()).is_ok_and(is_own))
    }

    /// The same lock for a child that works on the pins: it is held until both have ended.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn share(&self) -> io::Result<OwnedFd> {
        self.dir.try_clone()
    }
}

/// Makes the directory of this layout, and locks it.
pub(in crate::bpf) fn make_and_lock(pins: &PinDir) -> Result<OwnedFd, PinError> {
    let (whole, versioned) = (pins.directory(), pins.versioned());
    // No other user may hold its lock, nor remove pins: on many machines all users can write to a bpffs.
    let make = |dir: &Path| {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.map_err(|error| PinError::Io(dir.to_owned(), error))
    };
    make(whole)?;
    owned_dir::open(whole).map_err(|error| PinError::Io(whole.to_owned(), error))?;
    make(&versioned)?;
    lock_owned(pins, &versioned)
}

/// Locks the directory of another layout.
pub(in crate::bpf) fn lock_other_layout(pins: &PinDir, layout: u32) -> Result<OwnedFd, PinError> {
    let whole = pins.directory();
    owned_dir::open(whole).map_err(|error| PinError::Io(whole.to_owned(), error))?;
    lock_owned(pins, &pins.layout_dir(layout))
}

/// Locks a directory that only this user or root can have prepared.
fn lock_owned(pins: &PinDir, dir: &Path) -> Result<OwnedFd, PinError> {
    let lock = lock_directory(pins, dir)?;
    owned_dir::check_owner(&lock).map_err(|error| PinError::Io(dir.to_owned(), error))?;
    Ok(lock)
}

/// Locks the directory of a layout.
pub(super) fn lock_directory(pins: &PinDir, dir: &Path) -> Result<OwnedFd, PinError> {
    let io = |error: io::Error| PinError::Io(dir.to_owned(), error);
    let opened = owned_dir::open_any(dir).map_err(io)?;
    let deadline = Instant::now() + WAIT_MAX;
    let try_lock = || rustix::fs::flock(&opened, FlockOperation::NonBlockingLockExclusive);
    let mut locked = try_lock();
    while locked == Err(Errno::WOULDBLOCK) && Instant::now() < deadline {
        thread::sleep(PAUSE);
        locked = try_lock();
    }
    match locked {
        // A kernel without file locks (CONFIG_FILE_LOCKING) cannot tell two agents apart; one is no worse for that.
        Ok(()) | Err(Errno::NOSYS) => Ok(opened),
        Err(Errno::WOULDBLOCK) => Err(PinError::Locked(pins.directory().to_owned())),
        Err(error) => Err(io(error.into())),
    }
}
