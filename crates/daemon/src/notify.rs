//! Notification of the init system that the program is ready (sd_notify(3)): one datagram to the socket that it names.

use std::{
    env, io,
    os::{
        linux::net::SocketAddrExt,
        unix::{ffi::OsStrExt, net},
    },
};

const VARIABLE: &str = "NOTIFY_SOCKET";
const READY: &[u8] = b"READY=1";

/// Sends `READY=1` if the environment names a socket. A failure is only logged.
pub fn ready() {
    if let Err(error) = send(READY) {
        tracing::warn!("{VARIABLE}: {error}");
    }
}

fn send(message: &[u8]) -> io::Result<()> {
    let Some(path) = env::var_os(VARIABLE) else { return Ok(()) };
    let address = match path.as_bytes() {
        [b'@', name @ ..] => net::SocketAddr::from_abstract_name(name)?,
        _ => net::SocketAddr::from_pathname(&path)?,
    };
    let socket = net::UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.send_to_addr(message, &address).map(drop)
}
