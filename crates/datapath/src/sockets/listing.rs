//! The list of translated sockets; nothing is closed.

use std::{collections::HashMap, io, ops::ControlFlow, os::fd::OwnedFd};

use cproxy_core::{Backend, Frontend, Protocol, RetiredBackends};
use rustix::net::sockopt::socket_cookie;

use super::{
    error::{REPLACED_TRIES_MAX, SocketsError, no_proc},
    namespaces,
    owners::{self, Descriptor, is_borrower},
    socket_lists::{ListedSocket, SocketLists},
    staleness::{StaleCheck, TranslationState, endpoint, is_stale},
    thread::on_own_thread,
};
use crate::bpf::{KernelReader, PinDir, Serving, SocketStates, TableError};

/// A socket that was connected through us to where it is connected now.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TranslatedSocket {
    /// The frontend that the application connected to.
    pub frontend: Frontend,
    /// The backend that it is connected to.
    pub backend: Backend,
    /// Its own address and port.
    pub local: Backend,
    /// The inode number of its network namespace.
    pub netns: u64,
    /// Whether the backend still belongs to the frontend.
    pub state: BackendState,
    /// Times that what it has sent last was sent again, so far without an acknowledgement; 0 for UDP.
    pub retransmits: u8,
    /// The user that owns it.
    pub uid: u32,
    /// A process that has it among its descriptors, and is none of cproxy.
    pub pid: u32,
    /// Name of that process; `None` if it has ended meanwhile.
    pub command: Option<String>,
}

/// Whether a socket's backend still belongs to its frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BackendState {
    /// It does: for new connections, too, or only for those that it has.
    Serving,
    /// The frontend had no backend when the socket connected, and has none now: its datagrams are refused.
    Refused,
    /// It does not, and the socket is one that is closed if `--terminate-sockets` says so.
    Stale,
    /// There is no such frontend any more, which leaves TCP connections as they are.
    NoFrontend,
}

/// All translated sockets that were found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// Sorted by frontend, backend and own address.
    pub sockets: Vec<TranslatedSocket>,
    /// Network namespaces and processes without permission to search them.
    pub unseen: u32,
}

/// Lists the translated sockets of the machine. Blocks, usually for milliseconds. It takes root, as
/// [`super::terminate_stale`] does.
///
/// # Errors
/// The table, /proc, the list of sockets or their storage could not be read.
pub fn list(pins: &PinDir) -> Result<Listing, SocketsError> {
    owners::check_access().map_err(SocketsError::Owners)?;
    let mut tries = (0..REPLACED_TRIES_MAX).map(|_| list_once(pins));
    let settled = tries.find(|result| !matches!(result, Err(SocketsError::Table(TableError::Replaced))));
    settled.unwrap_or(Err(SocketsError::Table(TableError::Replaced)))
}

fn list_once(pins: &PinDir) -> Result<Listing, SocketsError> {
    let (reader, states) = (KernelReader::open(pins)?, SocketStates::open(pins)?);
    on_own_thread(|| ListingPass::default().run(&mut StaleCheck::new(pins, &reader, &states)?, &states))
}

/// Sockets whose owners are not known yet.
#[derive(Default)]
struct ListingPass {
    /// By inode, which no two sockets share; subflows share that of their MPTCP connection, and one of them was
    /// connected through us.
    by_inode: HashMap<u64, PendingSocket>,
    sockets: Vec<TranslatedSocket>,
    /// The first one, which is no reason to leave out the others.
    failure: Option<SocketsError>,
}

/// A socket that has a peer.
#[derive(Clone, Copy)]
struct PendingSocket {
    entry: ListedSocket,
    /// The inode number of its network namespace.
    netns: u64,
    /// The state that the list gave; without it, a descriptor is needed.
    state: Option<TranslationState>,
}

impl ListingPass {
    /// The calling thread ends in another network namespace. An error comes after all that could be shown.
    fn run(mut self, check: &mut StaleCheck<'_>, states: &SocketStates) -> Result<Listing, SocketsError> {
        let refused = namespaces::visit_all(|netns| {
            let mut lists = SocketLists::open(states.storage());
            for protocol in [Protocol::Udp, Protocol::Tcp] {
                let listed = self.list(check, &mut lists, protocol, netns);
                self.record(listed);
            }
        });
        self.by_inode.remove(&0);
        let mut unseen = refused.map_err(no_proc)?;
        if !self.by_inode.is_empty() {
            unseen += owners::each_socket(|descriptor| self.inspect(check, descriptor)).map_err(no_proc)?;
        }
        self.sockets.sort_unstable();
        self.failure.map_or(Ok(Listing { sockets: self.sockets, unseen }), Err)
    }

    fn list(
        &mut self,
        check: &mut StaleCheck<'_>,
        lists: &mut SocketLists<'_>,
        protocol: Protocol,
        netns: u64,
    ) -> Result<(), SocketsError> {
        let mut failed = Ok(());
        lists.each(protocol, &RetiredBackends::Any, &mut |entry| {
            let mut state = None;
            if protocol == Protocol::Tcp && entry.id.is_some() {
                let translation = check.translation_of_listed(entry);
                match translation.and_then(|found| check.resolve(found.as_slice(), entry.info.peer, protocol)) {
                    Ok(None) => return,
                    Ok(known) => state = known,
                    Err(error) => return failed = Err(error),
                }
            }
            self.by_inode.insert(entry.info.inode, PendingSocket { entry: *entry, netns, state });
        })?;
        failed
    }

    fn inspect(&mut self, check: &mut StaleCheck<'_>, descriptor: &Descriptor<'_>) -> io::Result<ControlFlow<()>> {
        if let Some(&pending) = self.by_inode.get(&descriptor.inode)
            && let Some(socket) = descriptor.duplicate()?
            && pending.is(&socket)
            && let name = descriptor.owner_name()
            && !is_borrower(name.as_deref())
        {
            self.by_inode.remove(&descriptor.inode);
            let state = pending.resolve_by(check, &socket);
            let found = state.map(|state| Some(TranslatedSocket::of(&pending, &state?, descriptor, name)));
            let noted = found.map(|found| self.sockets.extend(found));
            self.record(noted);
        }
        Ok(if self.by_inode.is_empty() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    fn record(&mut self, result: Result<(), SocketsError>) {
        if let Err(error) = result {
            self.failure.get_or_insert(error);
        }
    }
}

impl PendingSocket {
    /// Whether the descriptor is of the socket that was listed. That of an MPTCP connection is of none of its subflows.
    fn is(&self, socket: &OwnedFd) -> bool {
        self.state.is_some() || self.entry.id.is_none_or(|id| socket_cookie(socket) == Ok(id.cookie()))
    }

    fn resolve_by(
        &self,
        check: &mut StaleCheck<'_>,
        socket: &OwnedFd,
    ) -> Result<Option<TranslationState>, SocketsError> {
        let ListedSocket { kind, info, .. } = self.entry;
        if self.state.is_some() {
            return Ok(self.state);
        }
        let translations = check.translations_of(socket, kind.protocol)?;
        check.resolve(&translations, info.peer, kind.protocol)
    }
}

impl TranslatedSocket {
    fn of(
        PendingSocket { entry, netns, .. }: &PendingSocket,
        state: &TranslationState,
        descriptor: &Descriptor<'_>,
        command: Option<String>,
    ) -> Self {
        let protocol = entry.kind.protocol;
        let Backend { address, port } = endpoint((state.frontend.address, state.frontend.port));
        Self {
            frontend: Frontend { address, port, protocol },
            backend: endpoint(entry.info.peer),
            local: endpoint(entry.info.local),
            netns: *netns,
            state: BackendState::of(state.serving, protocol),
            retransmits: entry.info.retransmits,
            uid: entry.info.uid,
            pid: descriptor.owner().as_raw_nonzero().get().unsigned_abs(),
            command,
        }
    }
}

impl BackendState {
    fn of(serving: Serving, protocol: Protocol) -> Self {
        match serving {
            _ if is_stale(serving, protocol) => Self::Stale,
            Serving::Refused => Self::Refused,
            Serving::NoFrontend => Self::NoFrontend,
            Serving::Yes | Serving::No => Self::Serving,
        }
    }

    /// As commands print it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Refused => "refused",
            Self::Stale => "stale",
            Self::NoFrontend => "no-frontend",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_that_is_gone_makes_udp_stale_and_leaves_tcp() {
        for (serving, of_udp, of_tcp) in [
            (Serving::Yes, BackendState::Serving, BackendState::Serving),
            (Serving::No, BackendState::Stale, BackendState::Stale),
            (Serving::Refused, BackendState::Refused, BackendState::Refused),
            (Serving::NoFrontend, BackendState::Stale, BackendState::NoFrontend),
        ] {
            let of = [Protocol::Udp, Protocol::Tcp].map(|protocol| BackendState::of(serving, protocol));
            assert_eq!(of, [of_udp, of_tcp]);
        }
    }
}
