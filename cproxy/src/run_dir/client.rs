//! Commands' side of the socket.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::de::DeserializeOwned;

use super::protocol::{REQUEST_GAUGES, REQUEST_RESEED, REQUEST_SERVICES, RESPONSE_TIMEOUT, SOCKET};
use crate::report::FrontendRow;

/// Whether an agent listens in the run directory.
pub(super) fn is_agent_listening(run_dir: &Path) -> bool {
    connect(run_dir).is_ok()
}

/// Frontends of a running agent, without backends.
///
/// # Errors
/// No agent is running there, or it does not respond within `timeout`, which is not zero.
pub fn fetch_services(run_dir: &Path, timeout: Duration) -> io::Result<Vec<FrontendRow>> {
    fetch_json(run_dir, REQUEST_SERVICES, timeout)
}

/// Gauges of a running agent, by name.
///
/// # Errors
/// As [`fetch_services`].
pub fn fetch_gauges(run_dir: &Path, timeout: Duration) -> io::Result<BTreeMap<String, u64>> {
    fetch_json(run_dir, REQUEST_GAUGES, timeout)
}

/// Has a running agent choose from a new seed. Returns its response: `ok`, or `error: ` and the reason.
///
/// # Errors
/// No agent is running there, or it does not respond in time.
pub fn request_reseed(run_dir: &Path) -> io::Result<String> {
    String::from_utf8(fetch(run_dir, REQUEST_RESEED, RESPONSE_TIMEOUT)?).map_err(io::Error::other)
}

fn fetch_json<T: DeserializeOwned>(run_dir: &Path, request: &str, timeout: Duration) -> io::Result<T> {
    Ok(serde_json::from_slice(&fetch(run_dir, request, timeout)?)?)
}

fn fetch(run_dir: &Path, request: &str, timeout: Duration) -> io::Result<Vec<u8>> {
    let mut stream = connect(run_dir)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.write_all(request.as_bytes())?;
    let mut response = Vec::new();
    stream.read_to_end(&mut response).map_err(|error| match error.kind() {
        // The system's own text for a timeout does not help the user.
        io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::TimedOut, "no answer in time"),
        _ => error,
    })?;
    Ok(response)
}

/// Connects without waiting: a blocking call would never return if an agent has stopped and its queue is full.
fn connect(run_dir: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(run_dir.join(SOCKET))?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}
