//! DNS server that gives the same addresses for every name, and lies on command.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use crate::{manifest::write_text, sandbox::Sandbox, server::Server};

/// Length of the head of a DNS message (RFC 1035, 4.1.1).
const HEAD: usize = 12;

/// Type of a question for an IPv4 address.
const A: u8 = 1;

/// Answer to all questions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameAnswer {
    /// Names have these addresses, of which 30 fit into the answer.
    Addresses(Vec<Ipv4Addr>),
    /// There is no such name.
    NoName,
    /// There is no answer.
    Silence,
}

/// A running DNS server. Dropping it ends it.
pub struct Nameserver {
    answer: Arc<Mutex<NameAnswer>>,
    _server: Server,
}

impl Nameserver {
    /// Starts a server at port 53 of `address`.
    ///
    /// # Panics
    /// When the address cannot be bound.
    pub fn start(sandbox: &Sandbox, address: Ipv4Addr, answer: NameAnswer) -> Self {
        let address = SocketAddr::new(address.into(), 53);
        let socket = sandbox
            .netns()
            .run(|| UdpSocket::bind(address))
            .unwrap_or_else(|error| panic!("cannot bind UDP {address}: {error}"));
        // A datagram with a wrong checksum can end the wait without being there to read.
        socket.set_nonblocking(true).expect("a socket can be made non-blocking");
        let answer = Arc::new(Mutex::new(answer));
        let ours = answer.clone();
        let server = Server::start(address, move |signals| {
            let mut query = [0; 512];
            while signals.wait_for(&socket) {
                let Ok((length, client)) = socket.recv_from(&mut query) else { continue };
                let answer = ours.lock().unwrap_or_else(PoisonError::into_inner).clone();
                if let Some(response) = query.get(..length).and_then(|query| respond(query, &answer)) {
                    drop(socket.send_to(&response, client));
                }
            }
        });
        Self { answer, _server: server }
    }

    /// Changes the answer.
    pub fn set(&self, answer: NameAnswer) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = answer;
    }
}

/// Writes a program called `name` that runs another one with a nameserver of its own.
///
/// # Panics
/// When the sandbox cannot be written to.
pub fn program_with_nameserver(sandbox: &Sandbox, name: &str, program: &Path, nameserver: Ipv4Addr) -> PathBuf {
    let conf = format!("nameserver {nameserver}\noptions timeout:1 attempts:1\n");
    let conf = write_text(sandbox.dir(), "resolv.conf", &conf);
    let mount = format!("mount --bind {} /etc/resolv.conf", conf.display());
    let script =
        format!("#!/bin/sh\nexec unshare --mount sh -euc '{mount}; exec \"$@\"' sh {} \"$@\"\n", program.display());
    let path = write_text(sandbox.dir(), name, &script);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("cannot make a script executable");
    path
}

/// Response to a query of one question; `None`: there is none.
fn respond(query: &[u8], answer: &NameAnswer) -> Option<Vec<u8>> {
    let (head, rest) = query.split_at_checked(HEAD)?;
    // A name ends with an empty label; type and class follow.
    let question = rest.get(..rest.iter().position(|byte| *byte == 0)? + 5)?;
    let is_of_ipv4 = question.iter().rev().nth(2) == Some(&A);
    let (code, addresses) = match answer {
        NameAnswer::Addresses(addresses) if is_of_ipv4 => (0, addresses.as_slice()),
        NameAnswer::Addresses(_) => (0, &[][..]),
        NameAnswer::NoName => (3, &[][..]),
        NameAnswer::Silence => return None,
    };
    let count = u8::try_from(addresses.len()).ok()?;
    let mut response = [head.get(..2)?, &[0x81, 0x80 | code, 0, 1, 0, count, 0, 0, 0, 0], question].concat();
    for address in addresses {
        // The name of the question, type, class, a lifetime of 0 s, and the length.
        response.extend([0xc0, 12, 0, A, 0, 1, 0, 0, 0, 0, 0, 4]);
        response.extend(address.octets());
    }
    Some(response)
}
