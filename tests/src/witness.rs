//! Servers that record received messages, so that a test knows every receiver of a message and not only the one that
//! answered.

use std::{
    collections::HashMap,
    io::{Read, Write},
    net::{SocketAddr, UdpSocket},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::{
    echo::{self, Server},
    sandbox::Sandbox,
};

/// A client's message, different for each.
pub type Token = [u8; 8];

/// Length of an answer: the token, and the server's name padded with spaces.
pub const ANSWER_BYTES: usize = 24;

/// Receipt of a message by a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The server's name.
    pub server: String,
    /// The client's address as the server sees it.
    pub client: SocketAddr,
}

/// A record shared by any number of servers.
#[derive(Clone, Debug, Default)]
pub struct Witness {
    record: Arc<Record>,
}

#[derive(Debug, Default)]
struct Record {
    receipts: Mutex<HashMap<Token, Vec<Receipt>>>,
    added: Condvar,
}

impl Witness {
    /// Answers every token on a TCP connection to `address`.
    ///
    /// # Panics
    /// When `address` cannot be listened on; add it to the sandbox first.
    pub fn tcp(&self, sandbox: &Sandbox, address: SocketAddr, name: &str) -> Server {
        let (witness, name) = (self.clone(), name.to_owned());
        echo::listen(sandbox, address, move |mut stream, client, signals| {
            let mut token = Token::default();
            while signals.wait_for(&stream) {
                stream.read_exact(&mut token)?;
                witness.add(token, &name, client);
                stream.write_all(&response(token, &name))?;
            }
            Ok(())
        })
    }

    /// Answers every UDP datagram to `address` that is a token.
    ///
    /// # Panics
    /// When `address` cannot be bound; add it to the sandbox first.
    pub fn udp(&self, sandbox: &Sandbox, address: SocketAddr, name: &str) -> Server {
        let (witness, name) = (self.clone(), name.to_owned());
        let socket = sandbox
            .netns()
            .run(|| UdpSocket::bind(address))
            .unwrap_or_else(|error| panic!("cannot bind UDP {address}: {error}"));
        socket.set_nonblocking(true).expect("a socket can be made non-blocking");
        Server::start(address, move |signals| {
            let mut token = Token::default();
            while signals.wait_for(&socket) {
                // An error here belongs to an earlier answer that had no receiver.
                if let Ok((_, client)) = socket.recv_from(&mut token) {
                    witness.add(token, &name, client);
                    drop(socket.send_to(&response(token, &name), client));
                }
            }
        })
    }

    /// The servers that have received a token so far.
    pub fn receipts(&self, token: Token) -> Vec<Receipt> {
        self.lock().get(&token).cloned().unwrap_or_default()
    }

    /// The servers that have received a token, once there is one; none after `timeout`.
    pub fn wait(&self, token: Token, timeout: Duration) -> Vec<Receipt> {
        drop(self.record.added.wait_timeout_while(self.lock(), timeout, |receipts| !receipts.contains_key(&token)));
        self.receipts(token)
    }

    fn add(&self, token: Token, server: &str, client: SocketAddr) {
        self.lock().entry(token).or_default().push(Receipt { server: server.to_owned(), client });
        self.record.added.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Token, Vec<Receipt>>> {
        self.record.receipts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The answer of the server `name` to a token.
pub fn response(token: Token, name: &str) -> [u8; ANSWER_BYTES] {
    let mut answer = [b' '; ANSWER_BYTES];
    let bytes = token.iter().chain(name.as_bytes());
    answer.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    answer
}

/// The token and the server's name in an answer.
pub fn parse_answer(answer: &[u8]) -> Option<(Token, String)> {
    let (token, name) = answer.split_first_chunk()?;
    Some((*token, std::str::from_utf8(name).ok()?.trim_end().to_owned()))
}
