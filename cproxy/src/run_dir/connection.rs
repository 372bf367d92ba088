//! Connection to the socket of an agent.

use std::{
    ffi::OsStr,
    io,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
};

use cproxy_daemon::unix_socket::path_in;
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt::socket_peercred},
    process::Pid,
};

use super::protocol::SOCKET;

/// Process of a running agent: the one that listens (unix(7), SO_PEERCRED).
///
/// # Errors
/// No agent is running there, or it may not be asked.
pub fn agent(run_dir: &Path) -> io::Result<Pid> {
    Ok(socket_peercred(connect(run_dir)?)?.pid)
}

/// Connects to a socket of the directory, also where its path is too long for an address.
pub(super) fn connect_to(socket: &OwnedFd, run_dir: &Path, name: &str) -> Result<(), Errno> {
    let dir = rustix::fs::open(run_dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::net::connect(socket, &SocketAddrUnix::new(path_in(&dir, OsStr::new(name)))?)
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
