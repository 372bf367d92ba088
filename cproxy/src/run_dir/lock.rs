//! Lock of the one agent that uses the directory. Other users cannot open its file, and so cannot hold it.

use std::{io, os::fd::OwnedFd};

use rustix::{
    fs::{FileType, FlockOperation, Mode, OFlags, flock, fstat, openat},
    io::Errno,
    process::geteuid,
};

const LOCK: &str = "lock";

/// Takes the lock; its file is made if it does not exist.
///
/// # Errors
/// Another agent has it, or the file is not of this user alone.
pub(super) fn acquire(dir: &OwnedFd) -> io::Result<OwnedFd> {
    let file = open(dir, OFlags::CREATE)?;
    let stat = fstat(&file)?;
    let is_ours = stat.st_uid == geteuid().as_raw() && stat.st_mode & 0o077 == 0;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if is_ours && is_file { locked(file) } else { Err(foreign()) }
}

/// Takes the lock of any user's agent; `None` if no agent has used the directory.
///
/// # Errors
/// An agent has it, or its file cannot be opened.
pub(super) fn acquire_existing(dir: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    match open(dir, OFlags::empty()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        file => locked(file?).map(Some),
    }
}

fn open(dir: &OwnedFd, create: OFlags) -> io::Result<OwnedFd> {
    // Opening a FIFO would otherwise wait for a writer.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | create;
    openat(dir, LOCK, flags, Mode::RUSR | Mode::WUSR).map_err(|error| match error {
        Errno::LOOP => foreign(),
        error => error.into(),
    })
}

fn foreign() -> io::Error {
    io::Error::other(format!("its file `{LOCK}` is not this user's alone; remove that file"))
}

fn locked(file: OwnedFd) -> io::Result<OwnedFd> {
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => {
            Err(io::Error::other("in use by a running cproxy; stop that first, or pass another directory"))
        }
        // A kernel without file locks (CONFIG_FILE_LOCKING) cannot keep two agents apart.
        Err(Errno::NOSYS) => Ok(file),
        result => Ok(result.map(|()| file)?),
    }
}
