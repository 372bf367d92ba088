//! Calls on new sockets: each connects, or sends its first datagram, and asks the backend that it has reached.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream, UdpSocket},
    os::fd::AsFd,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    net::{SocketType, connect, sockopt},
};

use super::{
    addresses::{Backend, TCP_PORTS, UDP_PORTS, cluster_ip},
    client::{check_answer, has_no_service, receive, send_to, socket, timed},
    history::{Outcome, Period},
    servers::ANSWER_BYTES,
};
use crate::world::{Form, PORT, SocketKind};

/// Makes one call.
pub(crate) fn call(kind: SocketKind, form: Form, service: usize, question: u64) -> io::Result<(Outcome, Period)> {
    let vip = form.address(cluster_ip(service), PORT);
    match kind {
        SocketKind::Tcp => {
            let mut socket = TcpStream::from(socket(form, SocketType::STREAM)?);
            // A reset frees the port at once.
            sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
            let from = Instant::now();
            let followed = follow_up(timed(|| connect(&socket, &vip)), || {
                check_peer(&socket, vip)?;
                socket.write_all(&question.to_be_bytes())?;
                let mut answer = [0; ANSWER_BYTES];
                socket.read_exact(&mut answer)?;
                check_answer(form, answer, question, TCP_PORTS)
            });
            or_closed(followed, from)
        }
        SocketKind::UdpConnected => {
            let socket = UdpSocket::from(socket(form, SocketType::DGRAM)?);
            let from = Instant::now();
            let followed = follow_up(timed(|| connect(&socket, &vip)), || {
                check_peer(&socket, vip)?;
                socket.send(&question.to_be_bytes())?;
                receive_from(&socket, form, vip, question)
            });
            or_closed(followed, from)
        }
        SocketKind::UdpUnconnected => {
            let socket = UdpSocket::from(socket(form, SocketType::DGRAM)?);
            let sent = timed(|| send_to(&socket, question, vip));
            follow_up(sent, || receive_from(&socket, form, vip, question))
        }
    }
}

/// Asks the backend after a call that has not failed.
fn follow_up(
    (called, period): (Result<(), Errno>, Period),
    ask: impl FnOnce() -> io::Result<Backend>,
) -> io::Result<(Outcome, Period)> {
    match called {
        Ok(()) => Ok((Outcome::Reached(ask()?), period)),
        Err(error) if has_no_service(error) => Ok((Outcome::NoService, period)),
        Err(error) => Err(error.into()),
    }
}

/// The backend that answers, with the address that was asked as its source.
fn receive_from(socket: &UdpSocket, form: Form, vip: SocketAddr, question: u64) -> io::Result<Backend> {
    let (answer, from) = receive(socket)?;
    if from != vip {
        return Err(io::Error::other(format!("the answer shows {from}")));
    }
    check_answer(form, answer, question, UDP_PORTS)
}

fn check_peer(socket: &impl AsFd, vip: SocketAddr) -> io::Result<()> {
    let peer = rustix::net::getpeername(socket)?.and_then(|peer| SocketAddr::try_from(peer).ok());
    if peer == Some(vip) { Ok(()) } else { Err(io::Error::other(format!("getpeername shows {peer:?}"))) }
}

/// An outcome, which may be that the socket was closed.
fn or_closed(followed: io::Result<(Outcome, Period)>, from: Instant) -> io::Result<(Outcome, Period)> {
    match followed {
        Err(error) if is_closed(&error) => Ok((Outcome::Closed, Period { from, to: Instant::now() })),
        followed => followed,
    }
}

/// Whether the error is that of a connected socket closed from outside: ECONNABORTED once, and then not connected.
fn is_closed(error: &io::Error) -> bool {
    let error = error.raw_os_error().map(Errno::from_raw_os_error);
    [Errno::CONNABORTED, Errno::NOTCONN, Errno::DESTADDRREQ, Errno::PIPE].map(Some).contains(&error)
}
