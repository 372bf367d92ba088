//! Connection to the socket of an agent.

use std::{
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
};

use rustix::{
    fs::{Mode, OFlags, openat},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt::socket_peercred},
    process::Pid,
};

use super::{files::check_owner, protocol::SOCKET};

/// Process of a running agent: the one that listens (unix(7), SO_PEERCRED).
///
/// # Errors
/// No agent is running there, or it may not be asked.
pub fn agent(run_dir: &Path) -> io::Result<Pid> {
    Ok(socket_peercred(connect(run_dir)?)?.pid)
}

/// Connects to a socket of the directory, also where its path is too long for an address. One that another user has put
/// there is refused.
pub(super) fn connect_to(socket: &OwnedFd, run_dir: &Path, name: &str) -> io::Result<()> {
    let dir = rustix::fs::open(run_dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let file = openat(&dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    check_owner(&file, run_dir, name)?;
    // By its descriptor: the name may lead to another file by now.
    Ok(rustix::net::connect(socket, &SocketAddrUnix::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?)?)
}

/// Connects without waiting: a blocking call would never return if an agent has stopped and its queue is full.
pub(super) fn connect(run_dir: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect_to(&socket, run_dir, SOCKET)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}
