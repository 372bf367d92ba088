//! One connect of any kind: the backend that answers, and the addresses that the client sees.

use std::{
    io::{self, Read},
    net::{SocketAddr, TcpStream, UdpSocket},
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, SocketType,
        sockopt::{self, Timeout},
    },
};

use crate::{
    history::Meeting,
    servers::{ANSWER_BYTES, QUESTION_BYTES, decode},
    world::{Backend, FAMILIES, Family, SERVICES, TCP_PORTS, UDP_PORTS, vip},
};

/// Limit on the wait for an answer.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Tcp,
    UdpConnected,
    /// A new socket that sends without being connected.
    UdpFresh,
    /// The same unconnected socket for as long as its thread runs.
    UdpLasting,
}

/// Form of an address in an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    V4,
    V6,
    /// An IPv4 address on an IPv6 socket.
    Mapped,
}

pub(crate) const KINDS: [Kind; 4] = [Kind::Tcp, Kind::UdpConnected, Kind::UdpFresh, Kind::UdpLasting];
pub(crate) const FORMS: [Form; 3] = [Form::V4, Form::V6, Form::Mapped];

impl Form {
    fn family(self) -> Family {
        FAMILIES[usize::from(self == Self::V6)]
    }

    fn vip(self, service: usize) -> SocketAddr {
        match (vip(self.family(), service), self) {
            (SocketAddr::V4(vip), Self::Mapped) => (vip.ip().to_ipv6_mapped(), vip.port()).into(),
            (vip, _) => vip,
        }
    }

    fn socket(self, kind: SocketType) -> io::Result<OwnedFd> {
        let family = if self == Self::V4 { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = rustix::net::socket(family, kind, None)?;
        sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        Ok(socket)
    }

    /// The backend with this server address.
    fn backend(self, server: SocketAddr, ports: [u16; 2]) -> Result<Backend, String> {
        let number = self.family().number(server.ip());
        let port = ports.iter().position(|port| *port == server.port());
        let backend = number.zip(port).map(|(number, port)| Backend { number, port });
        backend.ok_or_else(|| format!("reached {server}, which is no backend of that family and protocol"))
    }
}

/// The outcome of a connect, with the times before and after it.
pub(crate) struct Attempt {
    pub(crate) from: Instant,
    pub(crate) to: Instant,
    pub(crate) meeting: Result<Meeting, String>,
}

/// Lasting sockets of a thread.
pub(crate) struct Client {
    v4: UdpSocket,
    v6: UdpSocket,
    /// Their last backends, with the times of the questions.
    last: [[Option<(Backend, Instant)>; SERVICES]; FORMS.len()],
    questions: u64,
}

impl Client {
    pub(crate) fn new() -> Self {
        let socket = |form: Form| UdpSocket::from(form.socket(SocketType::DGRAM).unwrap());
        Self { v4: socket(Form::V4), v6: socket(Form::V6), last: Default::default(), questions: 0 }
    }

    /// Connects once.
    pub(crate) fn attempt(&mut self, kind: Kind, form: Form, service: usize) -> Attempt {
        let vip = form.vip(service);
        self.questions += 1;
        let question = self.questions.to_be_bytes();
        match kind {
            Kind::Tcp => tcp(form, vip),
            Kind::UdpConnected => udp_connected(form, vip, question),
            Kind::UdpFresh => match form.socket(SocketType::DGRAM) {
                Ok(socket) => udp(&socket.into(), form, vip, question),
                Err(error) => broken(&error),
            },
            Kind::UdpLasting => udp(if form == Form::V4 { &self.v4 } else { &self.v6 }, form, vip, question),
        }
    }

    /// The lasting socket's previous backend, and the time since which the socket must have kept it.
    pub(crate) fn succeed(&mut self, form: Form, service: usize, attempt: &Attempt) -> Option<(Backend, Instant)> {
        let now = match attempt.meeting {
            Ok(Meeting::Reached(backend)) => Some((backend, attempt.from)),
            _ => None,
        };
        std::mem::replace(&mut self.last[form as usize][service], now)
    }
}

fn tcp(form: Form, vip: SocketAddr) -> Attempt {
    let opened = form.socket(SocketType::STREAM).and_then(|socket| {
        sockopt::set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
        // A reset frees the port at once.
        sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
        Ok(socket)
    });
    let socket = match opened {
        Ok(socket) => socket,
        Err(error) => return broken(&error),
    };
    timed(
        || rustix::net::connect(&socket, &vip),
        || {
            shows(&socket, vip)?;
            let mut answer = [0; ANSWER_BYTES];
            (&TcpStream::from(socket.try_clone().map_err(text)?)).read_exact(&mut answer).map_err(text)?;
            form.backend(decode(answer), TCP_PORTS)
        },
    )
}

fn udp_connected(form: Form, vip: SocketAddr, question: [u8; QUESTION_BYTES]) -> Attempt {
    let socket = match form.socket(SocketType::DGRAM) {
        Ok(socket) => UdpSocket::from(socket),
        Err(error) => return broken(&error),
    };
    timed(
        || rustix::net::connect(&socket, &vip),
        || {
            shows(&socket, vip)?;
            socket.send(&question).map_err(text)?;
            answer(&socket, form, vip, question)
        },
    )
}

fn udp(socket: &UdpSocket, form: Form, vip: SocketAddr, question: [u8; QUESTION_BYTES]) -> Attempt {
    timed(
        || rustix::net::sendto(socket, &question, rustix::net::SendFlags::empty(), &vip).map(drop),
        || answer(socket, form, vip, question),
    )
}

/// The answer to a datagram, whose source must be the address that the client has asked.
fn answer(socket: &UdpSocket, form: Form, vip: SocketAddr, question: [u8; QUESTION_BYTES]) -> Result<Backend, String> {
    let mut answer = [0; QUESTION_BYTES + ANSWER_BYTES];
    let (length, from) = socket.recv_from(&mut answer).map_err(text)?;
    let (repeated, server) = answer.split_first_chunk().unwrap();
    let server = decode(server.try_into().unwrap());
    if from != vip {
        return Err(format!("the answer of {server} shows {from}"));
    }
    if length != answer.len() || *repeated != question {
        return Err(format!("{server} has answered another question"));
    }
    form.backend(server, UDP_PORTS)
}

fn shows(socket: &impl AsFd, vip: SocketAddr) -> Result<(), String> {
    let peer = rustix::net::getpeername(socket).map_err(|error| format!("getpeername: {error}"))?;
    let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
    if peer == Some(vip) { Ok(()) } else { Err(format!("getpeername shows {peer:?}")) }
}

/// Times the translated call, and then finds its backend.
fn timed(call: impl FnOnce() -> Result<(), Errno>, find_out: impl FnOnce() -> Result<Backend, String>) -> Attempt {
    let from = Instant::now();
    let result = call();
    let to = Instant::now();
    let meeting = match result {
        Ok(()) => find_out().map(Meeting::Reached),
        Err(Errno::CONNREFUSED | Errno::ACCESS) => Ok(Meeting::Turned),
        Err(error) => Err(format!("the call failed: {error}")),
    };
    Attempt { from, to, meeting }
}

fn broken(error: &io::Error) -> Attempt {
    let now = Instant::now();
    Attempt { from: now, to: now, meeting: Err(format!("no socket: {error}")) }
}

fn text(error: io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock => format!("no answer within {PATIENCE:?}"),
        _ => error.to_string(),
    }
}
