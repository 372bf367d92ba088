//! The parts of a client: forms of addresses, sockets, and answers with the addresses that the client sees.

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

use crate::{
    history::Period,
    servers::{ANSWER_BYTES, decode},
    world::{Backend, FAMILIES, Family, UDP_PORTS, vip},
};

/// Limit on the wait for an answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Form of an address in an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    V4,
    V6,
    /// An IPv4 address on an IPv6 socket.
    Mapped,
}

impl Form {
    pub(crate) const ALL: [Self; 3] = [Self::V4, Self::V6, Self::Mapped];

    pub(crate) fn vip(self, service: usize) -> SocketAddr {
        self.address(vip(self.family(), service))
    }

    /// The UDP address of a backend.
    pub(crate) fn backend(self, number: u32) -> SocketAddr {
        self.address(SocketAddr::new(self.family().backend(number), UDP_PORTS[0]))
    }

    fn family(self) -> Family {
        FAMILIES[usize::from(self == Self::V6)]
    }

    fn address(self, address: SocketAddr) -> SocketAddr {
        match (address, self) {
            (SocketAddr::V4(address), Self::Mapped) => (address.ip().to_ipv6_mapped(), address.port()).into(),
            (address, _) => address,
        }
    }

    /// A socket that waits for a limited time.
    pub(crate) fn socket(self, kind: SocketType) -> io::Result<OwnedFd> {
        let family = if self == Self::V4 { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = rustix::net::socket(family, kind, None)?;
        for timeout in [Timeout::Recv, Timeout::Send] {
            sockopt::set_socket_timeout(&socket, timeout, Some(PATIENCE))?;
        }
        Ok(socket)
    }

    /// The backend in an answer to `question`.
    pub(crate) fn check_answer(
        self,
        answer: [u8; ANSWER_BYTES],
        question: u64,
        ports: [u16; 2],
    ) -> io::Result<Backend> {
        let (repeated, server) = decode(answer);
        if repeated != question {
            return Err(io::Error::other(format!("{server} has answered another question")));
        }
        let number = self.family().number(server.ip());
        let port = ports.iter().position(|port| *port == server.port());
        let backend = number.zip(port).map(|(number, port)| Backend { number, port });
        let stranger = || format!("reached {server}, which is no backend of that family and protocol");
        backend.ok_or_else(|| io::Error::other(stranger()))
    }
}

/// The outcome of a call, with the times before and after it.
pub(crate) fn timed<R>(call: impl FnOnce() -> R) -> (R, Period) {
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

/// Whether a call failed as if there were no Service: with the error of a frontend without backends, or with that of the
/// VIPs' route.
pub(crate) fn has_no_service(error: Errno) -> bool {
    [Errno::CONNREFUSED, Errno::ACCESS].contains(&error)
}
