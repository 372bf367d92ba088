//! Lock of the one agent that uses the directory. Other users cannot open its file, and so cannot hold it.

use std::{
    fs, io,
    os::{fd::OwnedFd, unix::fs::MetadataExt as _},
    path::Path,
};

use rustix::{
    fs::{FileType, FlockOperation, Mode, OFlags, flock, fstat, openat},
    io::Errno,
    process::geteuid,
};

use super::files::is_trusted;

const LOCK: &str = "lock";

/// The kernel's locks of all processes (proc_locks(5)).
const LOCKS: &str = "/proc/locks";

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

/// Fails if an agent has the lock. It is shared with other checks for a moment: an agent that claims the directory in
/// that moment does not start, as beside the agent that checks. [`is_held`] costs a grace period of RCU, which is half
/// of a start.
///
/// # Errors
/// An agent has it. A lock file that cannot be opened or is not trusted is an error of [`acquire`].
pub(super) fn check_free(dir: &OwnedFd) -> io::Result<()> {
    let Ok(file) = open(dir, OFlags::empty()) else { return Ok(()) };
    let (lock, dir) = (fstat(&file)?, fstat(dir)?);
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(Errno::WOULDBLOCK) if is_trusted(lock.st_uid, dir.st_uid) => Err(in_use()),
        _ => Ok(()),
    }
}

/// Whether an agent has the lock. Taking it to find out would keep an agent from starting.
pub(super) fn is_held(run_dir: &Path) -> bool {
    let owner = fs::metadata(run_dir).map(|dir| dir.uid());
    let lock = fs::symlink_metadata(run_dir.join(LOCK));
    let (Ok(owner), Ok(lock), Ok(locks)) = (owner, lock, fs::read_to_string(LOCKS)) else { return false };
    is_trusted(lock.uid(), owner) && locks.lines().any(|line| is_lock_of(line, lock.ino()))
}

/// Whether a line is about a lock on the file with this inode, such as `1: FLOCK  ADVISORY  WRITE 742 00:1d:57 0 EOF`.
fn is_lock_of(line: &str, inode: u64) -> bool {
    let mut fields = line.split_whitespace().skip(1);
    let (kind, file) = (fields.next(), fields.nth(3));
    let number = file.and_then(|file| file.rsplit(':').next()?.parse().ok());
    kind == Some("FLOCK") && number == Some(inode)
}

fn open(dir: &OwnedFd, create: OFlags) -> io::Result<OwnedFd> {
    // Opening a FIFO would otherwise wait for a writer.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | create;
    openat(dir, LOCK, flags, Mode::RUSR | Mode::WUSR).map_err(|error| match error {
        Errno::LOOP => foreign(),
        error => error.into(),
    })
}

/// Error about a directory that an agent has.
pub(super) fn in_use() -> io::Error {
    io::Error::other("in use by a running cproxy; stop that first, or pass another directory")
}

fn foreign() -> io::Error {
    io::Error::other(format!("its file `{LOCK}` is not this user's alone; remove that file"))
}

fn locked(file: OwnedFd) -> io::Result<OwnedFd> {
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err(in_use()),
        // A kernel without file locks (CONFIG_FILE_LOCKING) cannot keep two agents apart.
        Err(Errno::NOSYS) => Ok(file),
        result => Ok(result.map(|()| file)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_known_by_its_file() {
        let line = "1: FLOCK  ADVISORY  WRITE 742 00:1d:57 0 EOF";
        assert!(is_lock_of(line, 57) && !is_lock_of(line, 7));
        assert!(!is_lock_of("2: POSIX  ADVISORY  WRITE 742 00:1d:57 0 EOF", 57));
        assert!(!is_lock_of("", 0));
    }

    #[test]
    fn a_lock_is_held_until_its_owner_drops_it() {
        let dir = std::env::temp_dir().join(format!("cproxy-lock-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        assert!(!is_held(&dir));
        let opened = cproxy_datapath::owned_dir::open(&dir).unwrap();
        assert!(check_free(&opened).is_ok(), "without a lock file");
        let lock = acquire(&opened).unwrap();
        assert!(is_held(&dir) && check_free(&opened).is_err());
        drop(lock);
        assert!(!is_held(&dir) && check_free(&opened).is_ok());
        fs::remove_dir_all(&dir).unwrap();
    }
}
