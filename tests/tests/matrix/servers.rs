//! UDP servers in the hands of the test: it sees each datagram, and says when it is answered.

use std::net::{SocketAddr, UdpSocket};

use cproxy_tests::witness::Token;

use crate::{
    play::fresh_token,
    socket::{Socket, poll},
    world::{Host, POD_PORT, answer_lost, patience, pod},
};

/// Sockets of pods and hosts.
pub(crate) struct Servers {
    sockets: Vec<UdpSocket>,
}

/// A datagram that has reached a server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    /// Whom it has reached.
    pub(crate) server: SocketAddr,
    /// Where it came from.
    pub(crate) client: SocketAddr,
    /// What it says.
    pub(crate) token: Token,
}

impl Servers {
    /// Servers on both addresses of these hosts, on the port of pods.
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

    /// Waits for the next datagram to any of them.
    pub(crate) fn take(&self) -> Question {
        let ready = poll(&self.sockets, libc::POLLIN, patience()).unwrap();
        if ready.is_none() {
            answer_lost();
        }
        let socket = &self.sockets[ready.expect("nothing has reached a server")];
        let mut token = Token::default();
        let (_, client) = socket.recv_from(&mut token).unwrap();
        Question { server: socket.local_addr().unwrap(), client, token }
    }

    /// Answers with the same.
    pub(crate) fn answer(&self, question: &Question) {
        self.send(question.server, question.token, question.client);
    }

    /// Sends from one of the servers.
    pub(crate) fn send(&self, server: SocketAddr, token: Token, client: SocketAddr) {
        let socket = self.sockets.iter().find(|socket| socket.local_addr().unwrap() == server).unwrap();
        socket.send_to(&token, client).unwrap();
    }

    /// Lets `socket` ask, to somebody or to whom it is connected to: which server got it, and as whose the answer
    /// was shown.
    pub(crate) fn asked_by(&self, socket: &Socket, to: Option<SocketAddr>) -> (SocketAddr, SocketAddr) {
        let token = fresh_token();
        socket.send_one(&token, to).unwrap();
        let question = self.take();
        assert_eq!(question.token, token, "an earlier question was still there");
        self.answer(&question);
        (question.server, source_of(socket, token))
    }
}

/// Receives a datagram, which must be this one; as whose it is shown.
pub(crate) fn source_of(socket: &Socket, token: Token) -> SocketAddr {
    let (received, source) = receive(socket);
    assert_eq!(received, token, "another datagram has come, from {source}");
    source
}

/// Receives a datagram, and as whose it is shown.
pub(crate) fn receive(socket: &Socket) -> (Token, SocketAddr) {
    let buffer = socket.receive_one().inspect_err(|_| answer_lost()).unwrap();
    (buffer.bytes().try_into().unwrap(), buffer.name().unwrap())
}
