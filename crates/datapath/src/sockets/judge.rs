//! Whether a socket was connected through us, and whether whom it got still serves.

use std::io;

use cproxy_core::{Address, Backend, Protocol};
use cproxy_ebpf::{FrontendKey, PROTOCOL_TCP, PROTOCOL_UDP, Translation};
use rustix::{fd::OwnedFd, net::sockopt::socket_protocol};

use super::{SocketsError, lists::Entry, message::AddressPort};
use crate::bpf::{Lookup, Serving, Snapshot, SocketStates};

/// The table as of now, and what the programs know of sockets.
pub(super) struct Judge<'t> {
    table: Snapshot<'t>,
    states: &'t SocketStates,
}

/// The frontend that a socket was connected to, and whether whom it got there still serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) frontend: FrontendKey,
    pub(super) serving: Serving,
}

impl<'t> Judge<'t> {
    pub(super) fn new(table: &'t Lookup, states: &'t SocketStates) -> Self {
        Self { table: table.snapshot(), states }
    }

    /// The wish of a TCP socket, or of the first subflow of an MPTCP connection, from the kernel's list: that shows the cookie,
    /// and what is stored with the socket. Without an inode it has none: its application has closed it, and what it has written
    /// is still on its way. (A subflow shows the inode that its connection had, closed or not.)
    pub(super) fn asked_by_listed(&self, entry: &Entry) -> Result<Option<Translation>, SocketsError> {
        let Some(id) = entry.id.filter(|_| entry.shown.inode != 0) else { return Ok(None) };
        let place = self.states.at_place(id.cookie()).map_err(|error| SocketsError::Io("TCP_OWNERS", error))?;
        Ok(place.or(entry.stored))
    }

    /// The wishes of a socket, by a descriptor: that of the last `connect()` comes first.
    pub(super) fn asked_by(&self, socket: &OwnedFd, protocol: Protocol) -> Result<Vec<Translation>, SocketsError> {
        let asked = match protocol {
            Protocol::Tcp => self.states.of_tcp(socket).map(|asked| asked.into_iter().collect()),
            Protocol::Udp => self.states.of_udp(socket),
        };
        asked.map_err(|error| SocketsError::Io("SOCKETS", error))
    }

    /// Nothing if the socket is not connected through us.
    pub(super) fn verdict(
        &mut self,
        asked: &[Translation],
        peer: AddressPort,
        protocol: Protocol,
    ) -> Result<Option<Verdict>, SocketsError> {
        let Some(asked) = asked_for(asked, peer) else { return Ok(None) };
        let frontend = frontend(&asked, protocol);
        Ok(Some(Verdict { frontend, serving: self.table.serves(frontend, peer)? }))
    }

    /// Whether a socket is connected through us to a peer that does not serve.
    pub(super) fn is_stale(
        &mut self,
        asked: &[Translation],
        peer: AddressPort,
        protocol: Protocol,
    ) -> Result<bool, SocketsError> {
        let verdict = self.verdict(asked, peer, protocol)?;
        Ok(verdict.is_some_and(|verdict| is_stale(verdict.serving, protocol)))
    }

    /// Whether a socket is stale if it is connected to one of those that it got.
    pub(super) fn may_be_stale(&mut self, asked: &[Translation], protocol: Protocol) -> Result<bool, SocketsError> {
        for one in asked {
            if self.is_stale(&[*one], (one.backend, one.backend_port), protocol)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Without its frontend a UDP socket is stale, as kube-proxy then drops conntrack's entries of it; a TCP connection is
/// not: a Service's deletion touches no connection that stands.
pub(super) fn is_stale(serving: Serving, protocol: Protocol) -> bool {
    match serving {
        Serving::Yes => false,
        Serving::No => true,
        Serving::NoFrontend => protocol == Protocol::Udp,
    }
}

/// The socket's protocol; `None` if it is not ours to look at. An MPTCP connection speaks TCP by its subflows alone.
pub(super) fn protocol_of(socket: &OwnedFd) -> io::Result<Option<Protocol>> {
    Ok(match socket_protocol(socket)? {
        Some(rustix::net::ipproto::TCP) => Some(Protocol::Tcp),
        Some(rustix::net::ipproto::UDP) => Some(Protocol::Udp),
        _ => None,
    })
}

/// From the kernel's order of bytes.
pub(super) fn endpoint((address, port): AddressPort) -> Backend {
    Backend { address: Address::from_words(address), port: u16::from_be(port) }
}

/// The translation that led the socket to its present peer. The last `connect()` comes first: a socket that connected to
/// the peer itself is not ours, whatever came before.
fn asked_for(asked: &[Translation], peer: AddressPort) -> Option<Translation> {
    let asked = *asked.iter().find(|asked| (asked.backend, asked.backend_port) == peer)?;
    ((asked.vip, asked.vip_port) != peer).then_some(asked)
}

fn frontend(asked: &Translation, protocol: Protocol) -> FrontendKey {
    let protocol = match protocol {
        Protocol::Udp => PROTOCOL_UDP,
        Protocol::Tcp => PROTOCOL_TCP,
    };
    FrontendKey { address: asked.vip, port: asked.vip_port, protocol, zero: 0 }
}

#[cfg(test)]
mod tests {
    use cproxy_ebpf::v4_mapped;

    use super::*;

    const VIP: AddressPort = (v4_mapped(1), 80);
    const BACKEND: AddressPort = (v4_mapped(2), 8080);

    fn state(vip: AddressPort, backend: AddressPort) -> Translation {
        Translation { vip: vip.0, vip_port: vip.1, backend: backend.0, backend_port: backend.1, slot: 0 }
    }

    #[test]
    fn only_who_was_translated_to_the_present_peer_is_ours() {
        let translated = state(VIP, BACKEND);
        assert_eq!(asked_for(&[translated], BACKEND), Some(translated));
        let same_port_elsewhere = (v4_mapped(3), 8080);
        for (state, peer, why) in [
            (translated, same_port_elsewhere, "it has reconnected"),
            (translated, (BACKEND.0, 8081), "it has reconnected to another port"),
            (translated, VIP, "it went to the VIP itself"),
            (state(BACKEND, BACKEND), BACKEND, "it went to the backend itself"),
            (Translation::default(), BACKEND, "it is only marked"),
        ] {
            assert_eq!(asked_for(&[state], peer), None, "{why}");
        }
        // The Service and its backend differ in the port alone.
        assert!(asked_for(&[state((BACKEND.0, 80), BACKEND)], BACKEND).is_some());
        // The last connect has failed, and the socket stays what it was; or it has gone to the backend itself.
        let elsewhere = state((v4_mapped(9), 80), same_port_elsewhere);
        assert_eq!(asked_for(&[elsewhere, translated], BACKEND), Some(translated));
        assert_eq!(asked_for(&[state(BACKEND, BACKEND), translated], BACKEND), None);
    }

    #[test]
    fn only_udp_goes_with_its_frontend() {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            assert!(is_stale(Serving::No, protocol) && !is_stale(Serving::Yes, protocol));
            assert_eq!(is_stale(Serving::NoFrontend, protocol), protocol == Protocol::Udp);
        }
    }
}
