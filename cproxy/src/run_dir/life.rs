//! Life of an agent, which any user may learn: a datagram socket that is bound as long as the agent lives. The kernel
//! answers a `connect()` to it; the agent does nothing for it, also while it is stopped.

use std::{
    ffi::OsStr,
    fs, io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::FileTypeExt as _,
    },
    path::Path,
};

use cproxy_daemon::unix_socket::path_in;
use rustix::{
    fs::{FileType, Mode, OFlags, chmod, fstat, openat},
    net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, bind, shutdown, socket_with},
};

use super::{
    connection,
    files::{is_ready, read_line, remove},
    lock,
    protocol::{ALIVE, FAILED, SOCKET},
};

/// Effect of an agent's death, in words.
pub const KILLED: &str = "the agent was killed: Services work as of its last change, and later changes have no effect";

/// Effect of an agent's end, in words.
pub const ENDED: &str = "no agent runs: Services work as of the last change, and later changes have no effect";

/// Recorded reason of the last agent's end.
#[must_use]
pub fn failure(run_dir: &Path) -> Option<String> {
    read_line(run_dir, FAILED)
}

/// End of a sentence about the absence of an agent: the reason of the last one's end, or the remedy.
#[must_use]
pub fn remedy(run_dir: &Path) -> String {
    failure(run_dir).map_or(": start cproxy run".to_owned(), |reason| format!("; the last one has ended: {reason}"))
}

/// Whether an agent lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It lives; it may be stopped.
    Alive,
    /// It was killed: it has left its files, as one that ends by itself does not.
    Killed,
    /// None has left anything.
    None,
    /// Only root can learn it: its socket is not there or another user's, or it is of an earlier version.
    Unknown,
}

/// Shows that this process lives, until the socket is closed.
///
/// # Errors
/// The socket cannot be made.
pub(super) fn show(dir: &OwnedFd) -> io::Result<OwnedFd> {
    remove(dir, ALIVE)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddrUnix::new(path_in(dir, OsStr::new(ALIVE)))?)?;
    // Datagrams get EPIPE, so that none takes memory.
    shutdown(&socket, Shutdown::Read)?;
    // By its descriptor: in a directory of others, the name may lead elsewhere by now. The umask has taken rights away.
    let file = openat(dir, ALIVE, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    if FileType::from_raw_mode(fstat(&file)?.st_mode) == FileType::Socket {
        chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), Mode::from_raw_mode(0o666))?;
    }
    Ok(socket)
}

/// Whether an agent lives that has this run directory.
#[must_use]
pub fn life(run_dir: &Path) -> Life {
    let is_left_behind = match connected(run_dir) {
        Ok(()) => return Life::Alive,
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                if !is_ready(run_dir) && !run_dir.join(SOCKET).exists() =>
            {
                return Life::None;
            }
            kind => kind == io::ErrorKind::ConnectionRefused && is_socket(run_dir),
        },
    };
    // An agent of an earlier version, or one whose file somebody has removed or replaced.
    match connection::agent(run_dir) {
        Ok(_) => Life::Alive,
        Err(_) if !is_left_behind && lock::is_held(run_dir) => Life::Alive,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !is_left_behind => Life::Unknown,
        Err(_) => Life::Killed,
    }
}

/// Obstacle in the place of the socket that shows an agent's life.
pub(super) fn obstacle(run_dir: &Path) -> Option<String> {
    match connected(run_dir) {
        Err(error) if error.kind() == io::ErrorKind::Other => Some(error.to_string()),
        Err(_) if run_dir.join(ALIVE).exists() && !is_socket(run_dir) => {
            Some(format!("its file `{ALIVE}` is no socket: remove it"))
        }
        _ => None,
    }
}

fn connected(run_dir: &Path) -> io::Result<()> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    connection::connect_to(&socket, run_dir, ALIVE)
}

fn is_socket(run_dir: &Path) -> bool {
    fs::symlink_metadata(run_dir.join(ALIVE)).is_ok_and(|file| file.file_type().is_socket())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::run_dir::{files::boot_id, protocol::READY};

    #[test]
    fn an_agent_lives_as_long_as_its_socket() {
        let dir = std::env::temp_dir().join(format!("cproxy-life-{}-{}", "x".repeat(110), std::process::id()));
        assert_eq!(life(&dir), Life::None);
        fs::create_dir(&dir).unwrap();
        assert_eq!(life(&dir), Life::None);
        fs::write(dir.join(READY), boot_id()).unwrap();
        assert_eq!(life(&dir), Life::Killed, "an agent of an earlier version");
        let opened = cproxy_datapath::owned_dir::open(&dir).unwrap();
        let socket = show(&opened).unwrap();
        assert_eq!(fs::metadata(dir.join(ALIVE)).unwrap().permissions().mode() & 0o777, 0o666);
        assert_eq!(life(&dir), Life::Alive);
        let client = std::os::unix::net::UnixDatagram::unbound().unwrap();
        client.connect(path_in(&opened, OsStr::new(ALIVE))).unwrap();
        assert!(client.send(b"nothing is kept").is_err());
        drop(socket);
        assert_eq!(life(&dir), Life::Killed);
        drop(show(&opened).unwrap());
        fs::remove_dir_all(&dir).unwrap();
    }
}
