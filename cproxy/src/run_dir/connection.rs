//! Connection to the socket of an agent.

use std::{io, os::unix::net::UnixStream, path::Path};

use rustix::{
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

/// Connects without waiting: a blocking call would never return if an agent has stopped and its queue is full.
pub(super) fn connect(run_dir: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(run_dir.join(SOCKET))?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}
