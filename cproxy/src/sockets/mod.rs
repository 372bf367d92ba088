//! Closing stale sockets: those connected through us to a backend that no longer serves.
//!
//! A connected UDP socket learns nothing when its backend goes: its datagrams vanish, for ever. So it is closed under the
//! application, which sees ECONNABORTED when it receives, or EDESTADDRREQ when it sends, and connects anew. One [`pass`] looks at the whole machine:
//!
//! 1. In each network namespace, the kernel lists the sockets that have a peer (`diag`), with the peer that the packets
//!    really go to, an inode and a cookie.
//! 2. By the inodes, their owners' descriptors are found, and by a duplicate of one the state that the programs keep with
//!    the socket (`owners`): which VIP the application asked for.
//! 3. Who was connected by us to where the socket is connected now, and is no longer in the set of that VIP, is closed by
//!    its addresses and its cookie: no other socket, nor one that has reconnected, is ever hit.
//!
//! A kernel that cannot list sockets shows them in `/proc/net` (`proc_net`); they are then counted, not closed.

mod diag;
mod message;
mod namespaces;
mod owners;
mod probe;
mod proc_net;

use std::{collections::HashMap, io, os::fd::OwnedFd, thread};

use cproxy_ebpf::{FrontendKey, PROTOCOL_TCP, PROTOCOL_UDP, Translation};
use rustix::{io::Errno, net::sockopt::socket_cookie};

use self::{
    diag::Diag,
    message::{INET, INET6, Kind, Peer, SocketId, Transport},
};
use crate::bpf::{Lookup, LookupError, PinDir, Serving, Snapshot, SocketStates};

pub use probe::{Abilities, probe};

/// Which stale sockets are closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// None.
    None,
    /// Connected UDP sockets.
    #[default]
    Udp,
    /// UDP and TCP. MPTCP connections are only counted: the kernel cannot close them from outside (net/mptcp/mptcp_diag.c
    /// has no `destroy`).
    All,
}

/// What a pass did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Sockets that were closed.
    pub closed: u64,
    /// Sockets that are stale and still open: this kernel cannot close them.
    pub left: u64,
    /// Network namespaces that were looked into.
    pub namespaces: u32,
    /// Network namespaces and processes that may not be looked into.
    pub unseen: u32,
}

/// Why there was no pass.
#[derive(Debug, thiserror::Error)]
pub enum SocketsError {
    /// The table could not be read.
    #[error("cannot tell stale sockets: {0}")]
    Table(#[from] LookupError),
    /// No thread, or no /proc.
    #[error("cannot look for stale sockets: {0}: {1}")]
    Io(&'static str, io::Error),
    /// The kernel failed to list sockets, although it can.
    #[error("cannot list sockets: {0}")]
    List(Errno),
}

/// Two sockets may have the same addresses (`SO_REUSEPORT`), and the kernel finds one of them at a time.
const ROUNDS_MAX: u32 = 64;

/// Closes every stale socket of the machine, once. Blocks, usually for milliseconds. It takes root: sockets of all
/// processes, in all network namespaces.
///
/// Call it when the table is complete: to a UDP socket, a frontend that is missing is one that is gone.
///
/// # Errors
/// The table, /proc or the list of sockets could not be read.
pub fn pass(pins: &PinDir, mode: Mode) -> Result<Outcome, SocketsError> {
    if mode == Mode::None {
        return Ok(Outcome::default());
    }
    let (table, states) = (Lookup::open(pins)?, SocketStates::open(pins)?);
    // A network namespace is a thread's own affair: this thread ends in another one than it began.
    let name = thread::Builder::new().name("stale-sockets".to_owned());
    thread::scope(|scope| {
        let running = name.spawn_scoped(scope, || all_rounds(&table, &states, mode));
        let running = running.map_err(|error| SocketsError::Io("no thread", error))?;
        running.join().unwrap_or_else(|_| Err(SocketsError::Io("thread", io::Error::other("ended early"))))
    })
}

fn all_rounds(table: &Lookup, states: &SocketStates, mode: Mode) -> Result<Outcome, SocketsError> {
    let mut outcome = Outcome::default();
    for number in 1..=ROUNDS_MAX {
        let mut round =
            Round { table: table.snapshot(), states, lists: Vec::new(), done: Outcome::default(), missed: 0 };
        round.run(mode)?;
        let Round { done, missed, .. } = round;
        outcome = Outcome { closed: outcome.closed + done.closed, left: done.left + missed, ..done };
        // What the first round missed has mostly gone by itself.
        if missed == 0 || (number > 1 && done.closed == 0) {
            break;
        }
    }
    Ok(outcome)
}

/// One look at every socket.
struct Round<'p> {
    table: Snapshot<'p>,
    states: &'p SocketStates,
    /// One for each network namespace that has connected sockets; it stays there.
    lists: Vec<Diag>,
    done: Outcome,
    /// Gone when they should have been closed, or hidden by another one with the same addresses.
    missed: u64,
}

/// A socket that has a peer.
#[derive(Clone, Copy, Debug)]
struct Connected {
    kind: Kind,
    peer: Peer,
    /// By what it can be closed, and in which list's network namespace.
    handle: Option<(SocketId, usize)>,
}

/// By inode, which no two sockets share; an MPTCP connection and its TCP subflows do, and what is listed last counts.
type ConnectedByInode = HashMap<u64, Connected>;

impl Round<'_> {
    fn run(&mut self, mode: Mode) -> Result<(), SocketsError> {
        let transports: &[Transport] = match mode {
            Mode::None => &[],
            Mode::Udp => &[Transport::Udp],
            Mode::All => &[Transport::Udp, Transport::Tcp, Transport::Mptcp],
        };
        let (mut connected, mut failure) = (ConnectedByInode::new(), None);
        let refused = namespaces::visit_all(|| {
            self.done.namespaces += 1;
            failure = failure.take().or(self.list(transports, &mut connected).err());
        });
        self.done.unseen += refused.map_err(|error| SocketsError::Io("/proc", error))?;
        let refused = owners::find(&mut connected, |socket, descriptor| {
            self.settle(socket, descriptor).unwrap_or_else(|error| {
                failure.get_or_insert(error);
                true
            })
        });
        self.done.unseen += refused.map_err(|error| SocketsError::Io("/proc", error))?;
        failure.map_or(Ok(()), Err)
    }

    /// Lists the connected sockets of the network namespace that the thread is in.
    fn list(&mut self, transports: &[Transport], connected: &mut ConnectedByInode) -> Result<(), SocketsError> {
        let mut diag = Diag::open();
        let before = connected.len();
        for &transport in transports {
            for family in [INET, INET6] {
                let kind = Kind { family, transport };
                match diag.as_mut().map_err(|error| *error).and_then(|diag| diag.dump(kind)) {
                    Ok(shown) => connected.extend(shown.into_iter().map(|socket| {
                        let handle = Some((socket.id, self.lists.len()));
                        (socket.inode.into(), Connected { kind, peer: socket.peer, handle })
                    })),
                    Err(error) if is_unable(error) => connected.extend(
                        proc_net::list(kind).map(|(peer, inode)| (inode, Connected { kind, peer, handle: None })),
                    ),
                    Err(error) => return Err(SocketsError::List(error)),
                }
            }
        }
        connected.remove(&0);
        if connected.len() > before {
            self.lists.extend(diag.ok());
        }
        Ok(())
    }

    /// Closes a socket if it is stale. False when the descriptor is not of the socket that was listed.
    fn settle(&mut self, socket: &Connected, descriptor: &OwnedFd) -> Result<bool, SocketsError> {
        if socket.handle.is_some_and(|(id, _)| socket_cookie(descriptor) != Ok(id.cookie())) {
            return Ok(false);
        }
        let states = self.states.get(descriptor).map_err(|error| SocketsError::Io("SOCKETS", error))?;
        let Some(asked) = asked_for(&states, socket.peer) else { return Ok(true) };
        let serving = self.table.serves(frontend(&asked, socket.kind.transport), socket.peer)?;
        if is_stale(serving, socket.kind.transport) {
            self.close(socket);
        }
        Ok(true)
    }

    fn close(&mut self, socket: &Connected) {
        let closed = socket.handle.and_then(|(id, list)| Some(self.lists.get_mut(list)?.destroy(socket.kind, &id)));
        match closed {
            Some(Ok(())) => self.done.closed += 1,
            Some(Err(Errno::NOENT)) => self.missed += 1,
            Some(Err(_)) | None => self.done.left += 1,
        }
    }
}

/// Whether the kernel has no such list.
fn is_unable(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::OPNOTSUPP | Errno::PROTONOSUPPORT | Errno::AFNOSUPPORT)
}

/// What the socket asked for when it was connected to this peer, if that was something else. The last `connect()` comes
/// first: whoever connected to the peer itself is not ours, whatever came before.
fn asked_for(states: &[Translation], peer: Peer) -> Option<Translation> {
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

/// Without its frontend a UDP socket is stale, as kube-proxy then drops conntrack's entries of it; a TCP connection is
/// not: a Service's deletion touches no connection that stands.
fn is_stale(serving: Serving, transport: Transport) -> bool {
    match serving {
        Serving::Yes => false,
        Serving::No => true,
        Serving::NoFrontend => transport == Transport::Udp,
    }
}

#[cfg(test)]
mod tests {
    use cproxy_ebpf::v4_mapped;

    use super::*;

    const VIP: Peer = (v4_mapped(1), 80);
    const BACKEND: Peer = (v4_mapped(2), 8080);

    fn state(vip: Peer, backend: Peer) -> Translation {
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
        for transport in [Transport::Udp, Transport::Tcp, Transport::Mptcp] {
            assert!(is_stale(Serving::No, transport) && !is_stale(Serving::Yes, transport));
            assert_eq!(is_stale(Serving::NoFrontend, transport), transport == Transport::Udp);
        }
    }
}
