//! Unix sockets that listen, and their files.
//!
//! A directory may belong to somebody else, such as a VMM. So the file is made, given away and removed through a
//! descriptor of its directory, and only as long as it is the process's own.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat, inotify::WatchFlags},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
    process::{Gid, Uid, geteuid},
};
use tokio::{
    net::UnixListener,
    task::spawn_blocking,
    time::{MissedTickBehavior, interval},
};

use crate::FileChanges;

/// Flags with which directories are opened.
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Queue of connections, as long as the standard library's.
const BACKLOG: i32 = 128;

/// Interval at which a socket that is not there is made again.
const FILE_INTERVAL: Duration = Duration::from_secs(1);

/// File of a socket, removed at the end.
#[derive(Debug)]
pub struct SocketFile {
    path: Arc<Path>,
    name: OsString,
    place: Mutex<Place>,
}

/// Where the file is at present.
#[derive(Debug)]
struct Place {
    directory: OwnedFd,
    /// Device and inode.
    identity: (u64, u64),
    /// Whether the process ends, and makes no socket again.
    is_closed: bool,
}

impl SocketFile {
    /// Path that clients are known by.
    #[must_use]
    pub fn path(&self) -> &Arc<Path> {
        &self.path
    }

    /// Whether the file is still there.
    #[must_use]
    pub fn is_there(&self) -> bool {
        let place = self.lock();
        status(&place.directory, &self.name).is_ok_and(|found| identity(&found) == place.identity)
    }

    fn lock(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the file may have gone. Without inotify that is at once.
    async fn changed(&self) {
        let changes = FileChanges::open().and_then(|changes| {
            let path = path_in(&self.lock().directory, &self.name);
            // Its last name goes, and it is a socket's as before.
            changes.watch(&path, WatchFlags::ATTRIB | WatchFlags::MOVE_SELF | WatchFlags::DELETE_SELF)?;
            Ok(changes)
        });
        match changes {
            // It may have gone before it was watched.
            Ok(changes) if self.is_there() => drop(changes.changed().await),
            Ok(_) => {}
            Err(error) => tracing::debug!("changes of unix://{} cannot be seen: {error}", self.path.display()),
        }
    }

    /// Waits until the file has gone, and listens at its path again.
    pub async fn listen_again(self: Arc<Self>) -> UnixListener {
        let (mut interval, mut is_reported) = (interval(FILE_INTERVAL), false);
        // Somebody who removes the file again and again does not fill the log, nor does one that cannot be made.
        interval.reset();
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            self.changed().await;
            interval.tick().await;
            let file = self.clone();
            let listen = move || (!file.is_there() && !file.lock().is_closed).then(|| file.listen());
            match spawn_blocking(listen).await {
                Ok(Some(Ok(listener))) => {
                    tracing::info!("listening on unix://{} again: somebody removed its file", self.path.display());
                    return listener;
                }
                Ok(Some(Err(error))) if !is_reported => {
                    tracing::warn!(
                        "somebody removed the file of unix://{}, and it cannot be made again: {error}; trying again",
                        self.path.display()
                    );
                    is_reported = true;
                }
                _ => {}
            }
        }
    }

    /// Listens in the same directory or, if that has gone, in the one that is on its path now.
    fn listen(&self) -> io::Result<UnixListener> {
        let directory = self.lock().directory.try_clone()?;
        let listened = match rustix::fs::fstat(&directory)?.st_nlink {
            0 => listen(&self.path),
            _ => listen_in(directory, &self.name, &self.path),
        };
        let (listener, new) = listened?;
        let mut place = self.lock();
        if place.is_closed {
            return Err(io::Error::other("the process ends"));
        }
        std::mem::swap(&mut *place, &mut *new.lock());
        Ok(listener)
    }

    /// Removes the file while others may still own this, and does not make it again.
    pub fn close(&self) {
        let mut place = self.lock();
        if !place.is_closed
            && status(&place.directory, &self.name).is_ok_and(|found| identity(&found) == place.identity)
        {
            rustix::fs::unlinkat(&place.directory, &self.name, AtFlags::empty()).ok();
        }
        place.is_closed = true;
    }

    /// Gives the file to an owner.
    ///
    /// # Errors
    /// Another file has taken its place, or the process may not do it.
    pub fn give(&self, owner: &Stat) -> io::Result<()> {
        let place = self.lock();
        let file = rustix::fs::openat(
            &place.directory,
            &self.name,
            OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let found = rustix::fs::fstat(&file)?;
        if identity(&found) != place.identity || found.st_uid != geteuid().as_raw() || found.st_nlink != 1 {
            return Err(io::Error::other("another file has taken the place of the socket"));
        }
        let (uid, gid) = (Uid::from_raw(owner.st_uid), Gid::from_raw(owner.st_gid));
        Ok(rustix::fs::chownat(&file, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.close();
    }
}

/// Opens a directory below another one, without symbolic links in between.
///
/// # Errors
/// It cannot be opened (Linux 5.6 or newer is needed).
pub fn open_below(directory: &Path, below: &Path) -> io::Result<OwnedFd> {
    let top = rustix::fs::open(directory, DIRECTORY, Mode::empty())?;
    if below.as_os_str().is_empty() {
        return Ok(top);
    }
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
    Ok(rustix::fs::openat2(&top, below, DIRECTORY, Mode::empty(), resolve)?)
}

/// Status of a file itself, not of one that it links to.
///
/// # Errors
/// It does not exist.
pub fn status(directory: &OwnedFd, name: &OsStr) -> io::Result<Stat> {
    Ok(rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Listens at a path.
///
/// # Errors
/// The socket cannot be made.
pub fn listen(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    listen_in(open_below(directory, Path::new(""))?, name, path)
}

/// Listens in a directory. A socket that an earlier process has left behind is replaced; one that is in use, or another
/// file, is not. `path` is what clients are known by.
///
/// # Errors
/// The socket cannot be made.
pub fn listen_in(directory: OwnedFd, name: &OsStr, path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let reached = path_in(&directory, name);
    let listener = match bind(&reached) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_left_behind(&directory, name, &reached)? => {
            rustix::fs::unlinkat(&directory, name, AtFlags::empty())?;
            bind(&reached)
        }
        listener => listener,
    }?;
    let identity = identity(&status(&directory, name)?);
    let place = Mutex::new(Place { directory, identity, is_closed: false });
    Ok((listener, SocketFile { path: path.into(), name: name.to_owned(), place }))
}

/// Path of a file in an opened directory: on the directory's own path somebody else may have another one now.
#[must_use]
pub fn path_in(directory: &OwnedFd, name: &OsStr) -> PathBuf {
    [OsStr::new("/proc/self/fd"), OsStr::new(&directory.as_raw_fd().to_string()), name].iter().collect()
}

/// Makes a socket that only the file's owner can connect to, whatever the umask is.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file gets the socket's own mode (net/unix/af_unix.c, `unix_bind_bsd`).
    let has_mode = match rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR) {
        // System calls are filtered, and there is no broker. The umask has to do.
        Err(Errno::NOSYS) => false,
        result => result.map(|()| true)?,
    };
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    if !has_mode && Mode::from_raw_mode(rustix::fs::stat(path)?.st_mode).intersects(Mode::WGRP | Mode::WOTH) {
        rustix::fs::unlink(path)?;
        return Err(io::Error::other("the umask would let others connect"));
    }
    rustix::net::listen(&socket, BACKLOG)?;
    UnixListener::from_std(socket.into())
}

/// Whether a file is a socket on which nobody listens. A full queue of connections is no reason to wait.
fn is_left_behind(directory: &OwnedFd, name: &OsStr, path: &Path) -> io::Result<bool> {
    if !FileType::from_raw_mode(status(directory, name)?.st_mode).is_socket() {
        return Err(io::Error::other("a file that is no socket is there"));
    }
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => Ok(true),
        Err(Errno::ACCESS) => Err(io::Error::other("the socket of another user is there: remove it")),
        _ => Ok(false),
    }
}

/// Device and inode.
#[must_use]
pub fn identity(status: &Stat) -> (u64, u64) {
    (status.st_dev, status.st_ino)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    fn directory(name: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("cproxy-daemon-{name}-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        directory
    }

    #[tokio::test]
    async fn only_a_socket_that_is_left_behind_is_replaced() {
        let directory = directory("sockets");
        let path = directory.join("socket");
        let first = listen(&path).unwrap();
        assert_eq!(listen(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(first);
        assert!(!path.exists());
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let second = listen(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "another file").unwrap();
        drop(second);
        assert_eq!(fs::read_to_string(&path).unwrap(), "another file");
        assert!(listen(&path).unwrap_err().to_string().contains("no socket"));
        fs::remove_dir_all(&directory).unwrap();
    }

    #[tokio::test]
    async fn only_the_owner_can_connect() {
        let directory = directory("mode");
        let path = directory.join("socket");
        let _listener = listen(&path).unwrap();
        assert_eq!(rustix::fs::stat(&path).unwrap().st_mode & 0o777, 0o600);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[tokio::test]
    async fn a_socket_whose_file_was_removed_is_made_again() {
        let directory = directory("removed");
        let path = directory.join("socket");
        let (first, file) = listen(&path).unwrap();
        let file = Arc::new(file);
        fs::remove_dir_all(&directory).unwrap();
        let again = tokio::spawn(file.clone().listen_again());
        // It cannot be made yet.
        tokio::time::sleep(FILE_INTERVAL / 2).await;
        fs::create_dir_all(&directory).unwrap();
        let again = again.await.unwrap();
        drop(first);
        assert!(file.is_there(), "the end of the old socket leaves the new file alone");
        drop((again, file));
        assert!(!path.exists(), "the new file is removed at the end");
        fs::remove_dir_all(&directory).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_socket_whose_file_stays_costs_nothing() {
        let directory = directory("stays");
        let (_listener, file) = listen(&directory.join("socket")).unwrap();
        let again = tokio::time::timeout(Duration::from_secs(3600), Arc::new(file).listen_again());
        assert!(again.await.is_err(), "the clock has moved by an hour at once, so nothing has waited for it");
        fs::remove_dir_all(&directory).unwrap();
    }

    #[tokio::test]
    async fn a_socket_with_a_full_queue_is_in_use_at_once() {
        let directory = directory("full");
        let path = directory.join("socket");
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let _waiting = std::os::unix::net::UnixStream::connect(&path).unwrap();
        assert_eq!(listen(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[tokio::test]
    async fn a_file_in_the_place_of_the_socket_is_not_given_away() {
        let directory = directory("links");
        let (path, other) = (directory.join("socket"), directory.join("other"));
        fs::write(&other, "").unwrap();
        let (_listener, file) = listen(&path).unwrap();
        let owner = rustix::fs::stat(&directory).unwrap();
        file.give(&owner).unwrap();
        fs::remove_file(&path).unwrap();
        symlink(&other, &path).unwrap();
        assert!(file.give(&owner).is_err());
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn no_symbolic_link_leads_to_a_directory() {
        let directory = directory("below");
        fs::create_dir_all(directory.join("a/b")).unwrap();
        symlink("a", directory.join("link")).unwrap();
        assert!(open_below(&directory, Path::new("a/b")).is_ok());
        assert!(open_below(&directory, Path::new("link/b")).is_err());
        assert!(open_below(&directory, Path::new("../b")).is_err());
        fs::remove_dir_all(&directory).unwrap();
    }
}
