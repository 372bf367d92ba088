//! A conversation with the kernel's socket monitoring, in the network namespace in which it was opened.

use std::os::fd::OwnedFd;

use cproxy_ebpf::Translation;
use rustix::{
    io::{Errno, retry_on_intr},
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with},
};

use super::message::{Kind, Message, Shown, SocketId, Wanted, destroy_request, dump_request, parse};

/// More than the kernel puts into one datagram (net/netlink/af_netlink.c, `netlink_dump`).
const DATAGRAM_BYTES: usize = 64 * 1024;

/// A socket that has a peer, as a dump has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) id: SocketId,
    pub(super) shown: Shown,
    /// Its socket storage, if the request asked for it.
    pub(super) stored: Option<Translation>,
}

/// An open netlink socket.
#[derive(Debug)]
pub(super) struct Diag {
    socket: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Diag {
    /// Opens one in the calling thread's network namespace.
    pub(super) fn open() -> Result<Self, Errno> {
        let protocol = Some(netlink::SOCK_DIAG);
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        Ok(Self { socket, sequence: 0, buffer: vec![0; DATAGRAM_BYTES] })
    }

    /// Shows the sockets that are wanted, as they come. One that comes or goes meanwhile may be shown or not.
    pub(super) fn dump(&mut self, wanted: &Wanted<'_>, show: &mut dyn FnMut(&Listed)) -> Result<(), Errno> {
        let sequence = self.next();
        self.ask(&dump_request(wanted, sequence))?;
        self.answer(sequence, show)
    }

    /// Fails as a dump would, without looking at any socket.
    pub(super) fn try_dump(&mut self, kind: Kind) -> Result<(), Errno> {
        self.dump(&Wanted { kind, states: 0, filter: None, storage: None }, &mut |_| {})
    }

    /// Closes a socket under its owner, who sees ECONNABORTED. ENOENT: nobody has this id (any more).
    pub(super) fn destroy(&mut self, kind: Kind, id: &SocketId) -> Result<(), Errno> {
        let sequence = self.next();
        self.ask(&destroy_request(kind, id, sequence))?;
        self.answer(sequence, &mut |_| {})
    }

    fn next(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    fn ask(&self, request: &[u8]) -> Result<(), Errno> {
        retry_on_intr(|| send(&self.socket, request, SendFlags::empty())).map(drop)
    }

    fn answer(&mut self, sequence: u32, show: &mut dyn FnMut(&Listed)) -> Result<(), Errno> {
        loop {
            let buffer = &mut self.buffer;
            // With TRUNC the length is that of the datagram, also where it is longer than the buffer.
            let (_, length) = retry_on_intr(|| recv(&self.socket, buffer.as_mut_slice(), RecvFlags::TRUNC))?;
            for message in buffer.get(..length).and_then(|bytes| parse(bytes, sequence)).ok_or(Errno::BADMSG)? {
                match message {
                    Message::Socket(id, shown, stored) => show(&Listed { id, shown, stored }),
                    Message::End(result) => return result,
                    Message::Other => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, net::UdpSocket};

    use cproxy_core::Protocol;
    use cproxy_ebpf::v4_mapped;
    use rustix::net::sockopt::socket_cookie;

    use super::*;
    use crate::sockets::message::{AddressPort, CONNECTED, INET};

    /// The peers of all connected UDP sockets, by cookie.
    fn peers(diag: &mut Diag) -> HashMap<u64, AddressPort> {
        let mut peers = HashMap::new();
        let kind = Kind { family: INET, protocol: Protocol::Udp };
        let wanted = Wanted { kind, states: CONNECTED, filter: None, storage: None };
        diag.dump(&wanted, &mut |socket| peers.extend([(socket.id.cookie(), socket.shown.peer)])).unwrap();
        peers
    }

    #[test]
    fn a_connected_socket_is_listed_and_an_unconnected_one_is_not() {
        let sockets = [0, 4660].map(|port| {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            if port != 0 {
                socket.connect(("127.0.0.9", port)).unwrap();
            }
            socket
        });
        let peers = peers(&mut Diag::open().unwrap());
        let of = |socket: &UdpSocket| peers.get(&socket_cookie(socket).unwrap()).copied();
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
            let peers = peers(&mut diag);
            assert!(sockets.iter().all(|(cookie, _)| peers.contains_key(cookie)));
        }
    }
}
