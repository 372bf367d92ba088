//! The parts of a client: sockets, and answers with the addresses that the client sees.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, SendFlags, SocketType,
        sockopt::{self, Timeout},
    },
};

use super::{
    addresses::{Backend, backend_number},
    history::Period,
    servers::{ANSWER_BYTES, decode},
};
use crate::world::Form;

/// Limit on the wait for an answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// A socket that waits for a limited time.
pub fn socket(form: Form, kind: SocketType) -> io::Result<OwnedFd> {
    let family = if form == Form::V4 { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket(family, kind, None)?;
    for timeout in [Timeout::Recv, Timeout::Send] {
        sockopt::set_socket_timeout(&socket, timeout, Some(PATIENCE))?;
    }
    Ok(socket)
}

/// The backend in an answer to `question`, which must be of the family and protocol that were asked.
pub fn check_answer(form: Form, answer: [u8; ANSWER_BYTES], question: u64, ports: [u16; 2]) -> io::Result<Backend> {
    let (repeated, server) = decode(answer);
    if repeated != question {
        return Err(io::Error::other(format!("{server} has answered another question")));
    }
    let number = backend_number(server.ip()).filter(|_| server.is_ipv6() == (form == Form::V6));
    let port = ports.iter().position(|port| *port == server.port());
    let backend = number.zip(port).map(|(number, port)| Backend { number, port });
    backend.ok_or_else(|| io::Error::other(format!("reached {server}, no backend of that family and protocol")))
}

/// The outcome of a call, with the times before and after it.
pub fn timed<R>(call: impl FnOnce() -> R) -> (R, Period) {
    let from = Instant::now();
    let result = call();
    (result, Period { from, to: Instant::now() })
}

pub(crate) fn send_to(socket: &UdpSocket, question: u64, to: SocketAddr) -> Result<(), Errno> {
    rustix::net::sendto(socket, &question.to_be_bytes(), SendFlags::empty(), &to).map(drop)
}

/// The next answer and its source.
pub(crate) fn receive(socket: &UdpSocket) -> io::Result<([u8; ANSWER_BYTES], SocketAddr)> {
    let mut answer = [0; ANSWER_BYTES];
    match socket.recv_from(&mut answer)? {
        (ANSWER_BYTES, from) => Ok((answer, from)),
        (length, from) => Err(io::Error::other(format!("{length} bytes from {from}"))),
    }
}

/// Whether a call failed as if there were no Service: refused by a frontend without backends, or by the VIPs' route.
pub fn has_no_service(error: Errno) -> bool {
    [Errno::CONNREFUSED, Errno::ACCESS].contains(&error)
}
