//! Staleness of a socket: its translation, and whether the backend still serves.

use std::io;

use cproxy_core::{Address, Backend, Frontend, Protocol};
use cproxy_ebpf::{FrontendKey, PROTOCOL_TCP, PROTOCOL_UDP, REFUSED_SLOT, Translation, policy::POLICY_REFUSED_SLOT};
use cproxy_policy::Direction;
use rustix::{fd::OwnedFd, net::sockopt::socket_protocol};

use super::{diag_message::AddressPort, error::SocketsError, socket_lists::ListedSocket};
use crate::bpf::{
    KernelReader, PinDir, PolicyInForce, PolicyPins, PolicyReader, Serving, SetCache, SocketStates, encoding,
};

/// The sets as of now, and the state that the programs keep of sockets.
pub(super) struct StaleCheck<'t> {
    sets: SetCache<'t>,
    states: &'t SocketStates,
    /// Network policy, if there is one.
    policy: Option<(PolicyReader, PolicyInForce)>,
    /// The first frontends of stale sockets; the last one tells that there are more than the others.
    pub(super) stale_frontends: [Option<Frontend>; 4],
}

/// The frontend of a translated socket, and whether its backend still serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TranslationState {
    pub(super) frontend: FrontendKey,
    pub(super) serving: Serving,
}

impl<'t> StaleCheck<'t> {
    pub(super) fn new(pins: &PinDir, reader: &'t KernelReader, states: &'t SocketStates) -> Result<Self, SocketsError> {
        let policy = PolicyReader::new(PolicyPins::new(pins));
        let policy = policy.map(|reader| {
            let state = reader.state();
            state.map(|state| (reader, state)).map_err(|error| SocketsError::Policy(error.into()))
        });
        let policy = policy.transpose()?;
        Ok(Self { sets: reader.sets(), states, policy, stale_frontends: [None; 4] })
    }

    /// The translation of a TCP socket, or of the first subflow of an MPTCP connection, from the kernel's list: that
    /// shows the cookie, and what is stored with the socket. Without an inode it has none: its application has closed
    /// it, and what it has written is still on its way. (A subflow shows the inode that its connection had, closed or
    /// not.)
    pub(super) fn translation_of_listed(&self, entry: &ListedSocket) -> Result<Option<Translation>, SocketsError> {
        let Some(id) = entry.id.filter(|_| entry.info.inode != 0) else { return Ok(None) };
        let place = self.states.at_place(id.cookie()).map_err(|error| SocketsError::Io("TCP_OWNERS", error))?;
        Ok(place.or(entry.stored))
    }

    /// The translations of a socket, by a descriptor: that of the last `connect()` comes first.
    pub(super) fn translations_of(
        &self,
        socket: &OwnedFd,
        protocol: Protocol,
    ) -> Result<Vec<Translation>, SocketsError> {
        let translations = match protocol {
            Protocol::Tcp => self.states.of_tcp(socket).map(|translation| translation.into_iter().collect()),
            Protocol::Udp => self.states.of_udp(socket),
        };
        translations.map_err(|error| SocketsError::Io("SOCKETS", error))
    }

    /// Nothing if the socket is not connected through us, or network policy refuses its datagrams.
    pub(super) fn resolve(
        &mut self,
        translations: &[Translation],
        peer: AddressPort,
        protocol: Protocol,
    ) -> Result<Option<TranslationState>, SocketsError> {
        let translation = current_translation(translations, peer).filter(|found| found.slot != POLICY_REFUSED_SLOT);
        let Some(translation) = translation else { return Ok(None) };
        let frontend = frontend(&translation, protocol);
        let backend = (translation.slot != REFUSED_SLOT).then_some(peer);
        Ok(Some(TranslationState { frontend, serving: self.sets.serving(frontend, backend)? }))
    }

    /// Whether a socket is connected through us to a peer that does not serve, or network policy has refused its
    /// datagrams and allows them by now.
    pub(super) fn is_stale(
        &mut self,
        translations: &[Translation],
        peer: AddressPort,
        protocol: Protocol,
    ) -> Result<bool, SocketsError> {
        let refused = current_translation(translations, peer).filter(|found| found.slot == POLICY_REFUSED_SLOT);
        let stale = match refused {
            Some(refused) => {
                let to = frontend(&refused, protocol);
                self.policy_allows(&to)?.then_some(to)
            }
            None => {
                let state = self.resolve(translations, peer, protocol)?;
                state.filter(|state| is_stale(state.serving, protocol)).map(|state| state.frontend)
            }
        };
        if let Some(frontend) = stale.and_then(|frontend| encoding::frontend(&frontend)) {
            let place = self.stale_frontends.iter_mut().find(|place| place.is_none_or(|known| known == frontend));
            place.into_iter().for_each(|place| *place = Some(frontend));
        }
        Ok(stale.is_some())
    }

    /// Whether policy allows datagrams to an address, or to a backend of a frontend there. While the policy changes its
    /// maps, it does not; the change is followed by another pass.
    fn policy_allows(&mut self, to: &FrontendKey) -> Result<bool, SocketsError> {
        let backends = self.sets.backends(*to)?;
        let Some((policy, state)) = &self.policy else { return Ok(true) };
        let mut peers = backends.unwrap_or_else(|| vec![(to.address, to.port)]).into_iter();
        Ok(peers.any(|(address, port)| {
            let (peer, port) = (Address::from_words(address), u16::from_be(port));
            let decision = policy.decide(state, Direction::Egress, peer, cproxy_policy::Protocol::Udp, port);
            decision.is_ok_and(|decision| decision.is_allowed)
        }))
    }

    /// Whether a socket is stale if it is connected to one of those that it got.
    pub(super) fn may_be_stale(
        &mut self,
        translations: &[Translation],
        protocol: Protocol,
    ) -> Result<bool, SocketsError> {
        for one in translations {
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
        Serving::Yes | Serving::Refused => false,
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

/// A peer, from network order.
pub(super) fn endpoint((address, port): AddressPort) -> Backend {
    Backend { address: Address::from_words(address), port: u16::from_be(port) }
}

/// The translation that led the socket to its present peer. The last `connect()` comes first: a socket that connected
/// to the peer itself is not ours, whatever came before.
fn current_translation(translations: &[Translation], peer: AddressPort) -> Option<Translation> {
    let found = *translations.iter().find(|found| (found.backend, found.backend_port) == peer)?;
    ((found.vip, found.vip_port) != peer).then_some(found)
}

fn frontend(translation: &Translation, protocol: Protocol) -> FrontendKey {
    let protocol = match protocol {
        Protocol::Udp => PROTOCOL_UDP,
        Protocol::Tcp => PROTOCOL_TCP,
    };
    FrontendKey { address: translation.vip, port: translation.vip_port, protocol, zero: 0 }
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
    fn only_a_translation_to_the_present_peer_counts() {
        let translated = state(VIP, BACKEND);
        assert_eq!(current_translation(&[translated], BACKEND), Some(translated));
        let same_port_elsewhere = (v4_mapped(3), 8080);
        for (state, peer, why) in [
            (translated, same_port_elsewhere, "it has reconnected"),
            (translated, (BACKEND.0, 8081), "it has reconnected to another port"),
            (translated, VIP, "it went to the VIP itself"),
            (state(BACKEND, BACKEND), BACKEND, "it went to the backend itself"),
            (Translation::default(), BACKEND, "it is only marked"),
        ] {
            assert_eq!(current_translation(&[state], peer), None, "{why}");
        }
        // The Service and its backend differ in the port alone.
        assert!(current_translation(&[state((BACKEND.0, 80), BACKEND)], BACKEND).is_some());
        // The last connect has failed, and the socket stays what it was; or it has gone to the backend itself.
        let elsewhere = state((v4_mapped(9), 80), same_port_elsewhere);
        assert_eq!(current_translation(&[elsewhere, translated], BACKEND), Some(translated));
        assert_eq!(current_translation(&[state(BACKEND, BACKEND), translated], BACKEND), None);
    }

    #[test]
    fn only_udp_goes_with_its_frontend() {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let of = [Serving::No, Serving::Yes, Serving::Refused].map(|serving| is_stale(serving, protocol));
            assert_eq!(of, [true, false, false]);
            assert_eq!(is_stale(Serving::NoFrontend, protocol), protocol == Protocol::Udp);
        }
    }
}
