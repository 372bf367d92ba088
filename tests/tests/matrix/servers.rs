//! UDP servers controlled by the test, which sees each datagram and decides when to answer it.

use std::net::{SocketAddr, UdpSocket};

use cproxy_tests::witness::Token;

use crate::{
    play::fresh_token,
    socket::{Socket, poll},
    world::{Host, POD_PORT, count_lost_answer, patience, pod},
};

/// Sockets of pods and hosts.
pub(crate) struct Servers {
    sockets: Vec<UdpSocket>,
}

/// A datagram that has reached a server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    /// Receiving server.
    pub(crate) server: SocketAddr,
    /// Source of the datagram.
    pub(crate) client: SocketAddr,
    /// Content of the datagram.
    pub(crate) token: Token,
}

impl Servers {
    /// Servers on both addresses of these hosts, at the pods' port.
    pub(crate) fn on(hosts: impl IntoIterator<Item = Host>) -> Self {
        let addresses = hosts.into_iter().flat_map(Host::addresses);
        let bind = |address| {
            let socket = UdpSocket::bind((address, POD_PORT)).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        };
        Self { sockets: addresses.map(bind).collect() }
    }

    /// Servers of these pods.
    pub(crate) fn of_pods(numbers: impl IntoIterator<Item = u8>) -> Self {
        Self::on(numbers.into_iter().map(pod))
    }

    /// Waits for the next datagram to any server.
    pub(crate) fn receive(&self) -> Question {
        let ready = poll(&self.sockets, libc::POLLIN, patience()).unwrap();
        if ready.is_none() {
            count_lost_answer();
        }
        let socket = &self.sockets[ready.expect("nothing has reached a server")];
        let mut token = Token::default();
        let (_, client) = socket.recv_from(&mut token).unwrap();
        Question { server: socket.local_addr().unwrap(), client, token }
    }

    /// Answers with the same content.
    pub(crate) fn respond(&self, question: &Question) {
        self.send(question.server, question.token, question.client);
    }

    /// Sends from one of the servers.
    pub(crate) fn send(&self, server: SocketAddr, token: Token, client: SocketAddr) {
        let socket = self.sockets.iter().find(|socket| socket.local_addr().unwrap() == server).unwrap();
        socket.send_to(&token, client).unwrap();
    }

    /// Sends from `socket` to `to` or to its peer. Returns the server that received it, and the answer's source as
    /// shown.
    pub(crate) fn asked_by(&self, socket: &Socket, to: Option<SocketAddr>) -> (SocketAddr, SocketAddr) {
        let token = fresh_token();
        socket.send_one(&token, to).unwrap();
        let question = self.receive();
        assert_eq!(question.token, token, "an earlier question was still there");
        self.respond(&question);
        (question.server, source_of(socket, token))
    }
}

/// Receives a datagram with this token and returns its source as shown.
pub(crate) fn source_of(socket: &Socket, token: Token) -> SocketAddr {
    let (received, source) = receive(socket);
    assert_eq!(received, token, "another datagram has come, from {source}");
    source
}

/// Receives a datagram and returns it with its source as shown.
pub(crate) fn receive(socket: &Socket) -> (Token, SocketAddr) {
    let buffer = socket.receive_one().inspect_err(|_| count_lost_answer()).unwrap();
    (buffer.bytes().try_into().unwrap(), buffer.name().unwrap())
}
