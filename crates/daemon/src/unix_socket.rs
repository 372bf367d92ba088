//! Unix sockets that listen, and their files.
//!
//! A directory may belong to somebody else, such as a VMM. So the file is made, given away and removed through a
//! descriptor of its directory, and only as long as it is the process's own.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
    process::{Gid, Uid, geteuid},
};
use tokio::{net::UnixListener, task::spawn_blocking, time::interval};

/// Flags with which directories are opened.
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Queue of connections, as long as the standard library's.
const BACKLOG: i32 = 128;

/// Interval at which it is looked whether a socket's file is still there.
const FILE_INTERVAL: Duration = Duration::from_secs(1);

/// File of a socket, removed at the end.
#[derive(Debug)]
pub struct SocketFile {
    path: Arc<Path>,
    directory: OwnedFd,
    name: OsString,
    /// Device and inode.
    identity: (u64, u64),
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
        status(&self.directory, &self.name).is_ok_and(|found| identity(&found) == self.identity)
    }

    /// Gives the file to an owner.
    ///
    /// # Errors
    /// Another file has taken its place, or the process may not do it.
    pub fn give(&self, owner: &Stat) -> io::Result<()> {
        let file = rustix::fs::openat(
            &self.directory,
            &self.name,
            OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let found = rustix::fs::fstat(&file)?;
        if identity(&found) != self.identity || found.st_uid != geteuid().as_raw() || found.st_nlink != 1 {
            return Err(io::Error::other("another file has taken the place of the socket"));
        }
        let (uid, gid) = (Uid::from_raw(owner.st_uid), Gid::from_raw(owner.st_gid));
        Ok(rustix::fs::chownat(&file, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.is_there() {
            rustix::fs::unlinkat(&self.directory, &self.name, AtFlags::empty()).ok();
        }
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

/// Waits until a socket's file has gone, and listens at its path again.
pub async fn listen_again(file: Arc<SocketFile>) -> (UnixListener, SocketFile) {
    let (mut interval, mut is_reported) = (interval(FILE_INTERVAL), false);
    loop {
        interval.tick().await;
        let looked_at = file.clone();
        let listen = move || (!looked_at.is_there()).then(|| listen(&looked_at.path));
        match spawn_blocking(listen).await {
            Ok(Some(Ok(again))) => {
                tracing::info!("listening on unix://{} again: somebody removed its file", file.path.display());
                return again;
            }
            Ok(Some(Err(error))) if !is_reported => {
                tracing::warn!(
                    "somebody removed the file of unix://{}, and it cannot be made again: {error}; trying again",
                    file.path.display()
                );
                is_reported = true;
            }
            _ => {}
        }
    }
}

/// Listens in a directory. A socket that an earlier process has left behind is replaced; one that is in use, or another
/// file, is not. `path` is what clients are known by.
///
/// # Errors
/// The socket cannot be made.
pub fn listen_in(directory: OwnedFd, name: &OsStr, path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    // Not the path itself, on which somebody else may have another directory now.
    let reached: PathBuf =
        [OsStr::new("/proc/self/fd"), OsStr::new(&directory.as_raw_fd().to_string()), name].iter().collect();
    let listener = match bind(&reached) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_left_behind(&directory, name, &reached)? => {
            rustix::fs::unlinkat(&directory, name, AtFlags::empty())?;
            bind(&reached)
        }
        listener => listener,
    }?;
    let identity = identity(&status(&directory, name)?);
    Ok((listener, SocketFile { path: path.into(), directory, name: name.to_owned(), identity }))
}

/// Makes a socket that only the file's owner can connect to, whatever the umask is.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file gets the socket's own mode (net/unix/af_unix.c, `unix_bind_bsd`).
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
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
        let again = tokio::spawn(listen_again(file.clone()));
        // It cannot be made yet.
        tokio::time::sleep(FILE_INTERVAL / 2).await;
        fs::create_dir_all(&directory).unwrap();
        let (_again, new) = again.await.unwrap();
        drop((first, file));
        assert!(new.is_there(), "the end of the old socket leaves the new file alone");
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
