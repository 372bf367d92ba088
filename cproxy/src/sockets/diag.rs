//! A conversation with the kernel's socket monitoring, in the network namespace in which it was opened.

use std::os::fd::OwnedFd;

use rustix::{
    io::{Errno, retry_on_intr},
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with},
};

use super::message::{CONNECTED, Kind, Message, Shown, SocketId, destroy_request, dump_request, parse};

/// More than the kernel puts into one datagram of a dump (net/netlink/af_netlink.c, `netlink_dump`).
const DUMP_BYTES: usize = 64 * 1024;

/// More than an acknowledgement, which repeats the request.
const ACKNOWLEDGEMENT_BYTES: usize = 1024;

/// How often a dump is repeated that met a change.
const TRIES: u32 = 3;

/// An open netlink socket.
#[derive(Debug)]
pub(super) struct Diag {
    socket: OwnedFd,
    sequence: u32,
}

impl Diag {
    /// Opens one in the calling thread's network namespace.
    pub(super) fn open() -> Result<Self, Errno> {
        let protocol = Some(netlink::SOCK_DIAG);
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        Ok(Self { socket, sequence: 0 })
    }

    /// All sockets of a kind that have a peer. A socket that comes or goes meanwhile may be in it or not.
    pub(super) fn dump(&mut self, kind: Kind) -> Result<Vec<(SocketId, Shown)>, Errno> {
        let mut shown = Vec::new();
        for _ in 0..TRIES {
            shown.clear();
            if self.dump_states(kind, CONNECTED, &mut shown)? {
                break;
            }
        }
        Ok(shown)
    }

    /// Fails as a dump would, without looking at any socket.
    pub(super) fn try_dump(&mut self, kind: Kind) -> Result<(), Errno> {
        self.dump_states(kind, 0, &mut Vec::new()).map(drop)
    }

    /// Closes a socket under its owner, who sees ECONNABORTED. ENOENT: nobody has this id (any more).
    pub(super) fn destroy(&mut self, kind: Kind, id: &SocketId) -> Result<(), Errno> {
        let sequence = self.next();
        self.ask(&destroy_request(kind, id, sequence))?;
        self.answer(sequence, ACKNOWLEDGEMENT_BYTES, &mut Vec::new()).map(drop)
    }

    /// False when the dump met a change.
    fn dump_states(&mut self, kind: Kind, states: u32, shown: &mut Vec<(SocketId, Shown)>) -> Result<bool, Errno> {
        let sequence = self.next();
        self.ask(&dump_request(kind, states, sequence))?;
        self.answer(sequence, DUMP_BYTES, shown)
    }

    fn next(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    fn ask(&self, request: &[u8]) -> Result<(), Errno> {
        retry_on_intr(|| send(&self.socket, request, SendFlags::empty())).map(drop)
    }

    fn answer(&self, sequence: u32, datagram_bytes: usize, shown: &mut Vec<(SocketId, Shown)>) -> Result<bool, Errno> {
        let mut buffer = vec![0; datagram_bytes];
        let mut is_whole = true;
        loop {
            // With TRUNC the length is that of the datagram, also where it is longer than the buffer.
            let (_, length) = retry_on_intr(|| recv(&self.socket, buffer.as_mut_slice(), RecvFlags::TRUNC))?;
            let answer = buffer.get(..length).and_then(|bytes| parse(bytes, sequence)).ok_or(Errno::BADMSG)?;
            is_whole &= !answer.is_interrupted;
            for message in answer.messages {
                match message {
                    Message::Socket(id, socket) => shown.push((id, socket)),
                    Message::End(result) => return result.map(|()| is_whole),
                    Message::Other => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use cproxy_ebpf::v4_mapped;
    use rustix::net::sockopt::socket_cookie;

    use super::*;
    use crate::sockets::message::{INET, Transport};

    const UDP: Kind = Kind { family: INET, transport: Transport::Udp };

    #[test]
    fn a_connected_socket_is_listed_and_an_unconnected_one_is_not() {
        let sockets = [0, 4660].map(|port| {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            if port != 0 {
                socket.connect(("127.0.0.9", port)).unwrap();
            }
            socket
        });
        let shown = Diag::open().unwrap().dump(UDP).unwrap();
        let of = |socket: &UdpSocket| {
            let cookie = socket_cookie(socket).unwrap();
            shown.iter().find(|(id, _)| id.cookie() == cookie).map(|(_, shown)| shown.peer)
        };
        let peer = (v4_mapped(u32::from_ne_bytes([127, 0, 0, 9])), 4660u16.to_be());
        assert_eq!(sockets.each_ref().map(of), [None, Some(peer)]);
    }

    #[test]
    fn many_sockets_need_many_datagrams() {
        let sockets: Vec<_> = (0..600)
            .map(|_| {
                let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
                socket.connect(("127.0.0.9", 4661)).unwrap();
                socket_cookie(&socket).map(|cookie| (cookie, socket)).unwrap()
            })
            .collect();
        let mut diag = Diag::open().unwrap();
        for _ in 0..2 {
            let shown = diag.dump(UDP).unwrap();
            assert!(sockets.iter().all(|(cookie, _)| shown.iter().any(|(id, _)| id.cookie() == *cookie)));
        }
    }
}
