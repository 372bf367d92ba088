//! UDP servers that repeat the question, so that a client can match answers to its questions.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
};

use crate::{sandbox::Sandbox, server::Server};

/// The longest datagram that is answered.
const LONGEST: usize = 2_048;

/// Answers every UDP datagram to `address` with `name`, a space and the datagram. The address must not be a wildcard:
/// an answer must come from the address that the question was sent to.
///
/// # Panics
/// When `address` cannot be bound; add it to the sandbox first.
pub fn udp(sandbox: &Sandbox, address: SocketAddr, name: &str) -> Server {
    let bind = || UdpSocket::bind(address).and_then(|socket| socket.set_nonblocking(true).map(|()| socket));
    let socket = sandbox.netns().run(bind).unwrap_or_else(|error| panic!("cannot bind UDP {address}: {error}"));
    let name = name.to_owned();
    Server::start(address, move |signals| {
        let mut question = [0; LONGEST];
        while signals.wait_for(&socket) {
            // An error here belongs to an earlier answer that had no receiver.
            let Ok((length, client)) = socket.recv_from(&mut question) else { continue };
            signals.count();
            let answer = [name.as_bytes(), b" ", question.get(..length).unwrap_or_default()].concat();
            drop(socket.send_to(&answer, client));
        }
    })
}

/// Sends `question` to a [`udp`] server.
pub fn ask(socket: &UdpSocket, question: &str, server: SocketAddr) -> io::Result<()> {
    socket.send_to(question.as_bytes(), server).map(drop)
}

/// Receives the next answer: the server's name, the question, and the source of the answer.
pub fn receive(socket: &UdpSocket) -> io::Result<(String, String, SocketAddr)> {
    let mut answer = [0; LONGEST];
    let (length, from) = socket.recv_from(&mut answer)?;
    let text = String::from_utf8_lossy(answer.get(..length).unwrap_or_default()).into_owned();
    let (name, question) = text.split_once(' ').ok_or_else(|| io::Error::other(format!("no answer: {text}")))?;
    Ok((name.to_owned(), question.to_owned(), from))
}
