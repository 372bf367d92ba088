//! Directories that only this user or root can have prepared. They are used through their descriptors, so that they
//! cannot be swapped for others meanwhile.

use std::{
    fs::DirBuilder,
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::DirBuilderExt,
    },
    path::{Path, PathBuf},
};

use rustix::fs::{Mode, OFlags, fstat};

/// Write access of others than the owner.
const OTHERS_WRITE: u32 = 0o022;

/// Opens a directory of this user's, which is made if it is not there.
///
/// # Errors
/// As [`open`], or it cannot be made.
pub fn create(dir: &Path) -> io::Result<OwnedFd> {
    DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
    open(dir)
}

/// Opens a directory of this user's; one of root's if only root can write it.
///
/// # Errors
/// It is another user's, a symbolic link, or cannot be opened.
pub fn open(dir: &Path) -> io::Result<OwnedFd> {
    let opened = open_any(dir)?;
    check_owner(&opened)?;
    Ok(opened)
}

/// Opens a directory of any user.
///
/// # Errors
/// It is a symbolic link, or cannot be opened.
pub fn open_any(dir: &Path) -> io::Result<OwnedFd> {
    // Behind a slash at its end, a link would be followed.
    let dir: PathBuf = dir.components().collect();
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    rustix::fs::open(&dir, flags, Mode::empty()).map_err(|error| match error {
        rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP if dir.is_symlink() => {
            io::Error::other("a symbolic link, which is not followed here; pass the directory itself")
        }
        error => error.into(),
    })
}

/// Checks that only this user or root can have prepared an opened directory.
///
/// # Errors
/// Another user can.
pub fn check_owner(dir: impl AsFd) -> io::Result<()> {
    let stat = fstat(dir)?;
    match stat.st_uid {
        uid if uid == rustix::process::geteuid().as_raw() => Ok(()),
        0 if stat.st_mode & OTHERS_WRITE == 0 => Ok(()),
        0 => Err(io::Error::other("a directory of root's that others can write; pass one of this user's")),
        uid => Err(io::Error::other(format!("made by another user (uid {uid}); remove it or pass another one"))),
    }
}

/// The path of a name in an opened directory, for system calls that take nothing else. It is good for as long as the
/// directory is open.
pub fn path_in(dir: impl AsFd, name: &str) -> PathBuf {
    Path::new("/proc/self/fd").join(dir.as_fd().as_raw_fd().to_string()).join(name)
}
