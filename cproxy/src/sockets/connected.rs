//! Every socket of the machine that has a peer, and what those asked for that were connected through us.

use std::{collections::HashMap, io::Error, os::fd::OwnedFd};

use cproxy_ebpf::{FrontendKey, PROTOCOL_TCP, PROTOCOL_UDP, Translation};
use rustix::{io::Errno, net::sockopt::socket_cookie, process::Pid};

use super::{
    SocketsError,
    diag::Diag,
    message::{AddressPort, INET, INET6, Kind, Shown, SocketId, Transport},
    namespaces, owners, proc_net,
};
use crate::bpf::{Serving, Snapshot, SocketStates};

/// A socket that has a peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Connected {
    pub(super) kind: Kind,
    pub(super) shown: Shown,
    /// The inode number of its network namespace.
    pub(super) netns: u64,
    /// By what it can be closed, and in which list's network namespace.
    pub(super) handle: Option<(SocketId, usize)>,
}

/// A socket that was connected through us to where it is connected now.
#[derive(Debug)]
pub(super) struct Found<'s> {
    pub(super) socket: &'s Connected,
    pub(super) frontend: FrontendKey,
    pub(super) serving: Serving,
    /// A process that has it among its descriptors.
    pub(super) owner: Pid,
}

/// The connected sockets of all network namespaces.
#[derive(Debug, Default)]
pub(super) struct Census {
    /// By inode, which no two sockets share; an MPTCP connection and its TCP subflows do, and what is listed last counts.
    by_inode: HashMap<u64, Connected>,
    /// One for each network namespace that has connected sockets; it stays there.
    pub(super) lists: Vec<Diag>,
    /// Network namespaces that were looked into.
    pub(super) namespaces: u32,
    /// Network namespaces and processes that may not be looked into.
    pub(super) unseen: u32,
    /// The first one, which is no reason to leave out the others.
    failure: Option<SocketsError>,
}

impl Census {
    /// Lists the sockets. The calling thread ends in another network namespace.
    pub(super) fn take(transports: &[Transport]) -> Result<Self, SocketsError> {
        let mut census = Self::default();
        let refused = namespaces::visit_all(|netns| {
            census.namespaces += 1;
            let failure = census.list(netns, transports).err();
            census.failure = census.failure.take().or(failure);
        });
        census.unseen = refused.map_err(no_proc)?;
        Ok(census)
    }

    /// Lists the connected sockets of the network namespace that the thread is in.
    fn list(&mut self, netns: u64, transports: &[Transport]) -> Result<(), SocketsError> {
        let mut diag = Diag::open();
        let before = self.by_inode.len();
        for &transport in transports {
            for family in [INET, INET6] {
                let kind = Kind { family, transport };
                let connected = |shown: Shown, handle| (shown.inode, Connected { kind, shown, netns, handle });
                match diag.as_mut().map_err(|error| *error).and_then(|diag| diag.dump(kind)) {
                    Ok(shown) => {
                        let list = self.lists.len();
                        self.by_inode.extend(shown.into_iter().map(|(id, shown)| connected(shown, Some((id, list)))));
                    }
                    Err(error) if is_unable(error) => {
                        self.by_inode.extend(proc_net::list(kind).into_iter().map(|shown| connected(shown, None)));
                    }
                    Err(error) => return Err(SocketsError::List(error)),
                }
            }
        }
        self.by_inode.remove(&0);
        if self.by_inode.len() > before {
            self.lists.extend(diag.ok());
        }
        Ok(())
    }

    /// Shows those that were connected through us, once each. An error comes after all that could be shown.
    pub(super) fn show_translated(
        &mut self,
        table: &mut Snapshot<'_>,
        states: &SocketStates,
        mut show: impl FnMut(&Found<'_>),
    ) -> Result<(), SocketsError> {
        let Self { by_inode, failure, .. } = self;
        let refused = owners::find(by_inode, |socket, descriptor, owner| {
            if !socket.has(descriptor) {
                return false;
            }
            match socket.found(table, states, descriptor, owner) {
                Ok(found) => found.iter().for_each(&mut show),
                Err(error) => drop(failure.get_or_insert(error)),
            }
            true
        });
        self.unseen += refused.map_err(no_proc)?;
        self.failure.take().map_or(Ok(()), Err)
    }
}

impl Connected {
    /// Whether the descriptor is of the socket that was listed.
    fn has(&self, descriptor: &OwnedFd) -> bool {
        self.handle.is_none_or(|(id, _)| socket_cookie(descriptor) == Ok(id.cookie()))
    }

    fn found(
        &self,
        table: &mut Snapshot<'_>,
        states: &SocketStates,
        descriptor: &OwnedFd,
        owner: Pid,
    ) -> Result<Option<Found<'_>>, SocketsError> {
        let states = states.get(descriptor).map_err(|error| SocketsError::Io("SOCKETS", error))?;
        let Some(asked) = asked_for(&states, self.shown.peer) else { return Ok(None) };
        let frontend = frontend(&asked, self.kind.transport);
        let serving = table.serves(frontend, self.shown.peer)?;
        Ok(Some(Found { socket: self, frontend, serving, owner }))
    }
}

fn no_proc(error: Error) -> SocketsError {
    SocketsError::Io("/proc", error)
}

/// Whether the kernel has no such list.
fn is_unable(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::OPNOTSUPP | Errno::PROTONOSUPPORT | Errno::AFNOSUPPORT)
}

/// What the socket asked for when it was connected to this peer, if that was something else. The last `connect()` comes
/// first: whoever connected to the peer itself is not ours, whatever came before.
fn asked_for(states: &[Translation], peer: AddressPort) -> Option<Translation> {
    let asked = *states.iter().find(|asked| (asked.backend, asked.backend_port) == peer)?;
    ((asked.vip, asked.vip_port) != peer).then_some(asked)
}

fn frontend(asked: &Translation, transport: Transport) -> FrontendKey {
    let protocol = match transport {
        Transport::Udp => PROTOCOL_UDP,
        Transport::Tcp | Transport::Mptcp => PROTOCOL_TCP,
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
}
