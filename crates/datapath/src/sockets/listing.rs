//! The sockets that are connected through us, for whoever asks; nothing is closed.

use std::{collections::HashMap, fs, io, ops::ControlFlow, os::fd::OwnedFd};

use cproxy_core::{Backend, Frontend, Protocol, RetiredBackends};
use rustix::{net::sockopt::socket_cookie, process::Pid};

use super::{
    SocketsError,
    judge::{Judge, Verdict, endpoint, is_stale},
    lists::{Entry, Lists},
    namespaces, no_proc, on_own_thread,
    owners::{self, Descriptor},
};
use crate::bpf::{Lookup, LookupError, PinDir, Serving, SocketStates};

/// How often the table is read before it counts as restless.
const TRIES: u32 = 10;

/// A socket that was connected through us to where it is connected now.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TranslatedSocket {
    /// Whom the application believes to be connected to.
    pub frontend: Frontend,
    /// Whom it is connected to.
    pub backend: Backend,
    /// Its own address and port.
    pub local: Backend,
    /// The inode number of its network namespace.
    pub netns: u64,
    /// Whether the backend still belongs to the frontend.
    pub state: BackendState,
    /// The user that owns it.
    pub uid: u32,
    /// A process that has it among its descriptors.
    pub pid: u32,
    /// What that process calls itself; `None` if it has ended meanwhile.
    pub command: Option<String>,
}

/// Whether a socket's backend still belongs to its frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BackendState {
    /// It does: for new connections, too, or only for those that it has.
    Serving,
    /// It does not, and the socket is one that is closed if `--terminate-sockets` says so.
    Stale,
    /// There is no such frontend any more, which leaves TCP connections as they are.
    NoFrontend,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// Sorted by frontend, backend and own address.
    pub sockets: Vec<TranslatedSocket>,
    /// Network namespaces and processes that may not be looked into.
    pub unseen: u32,
}

/// Lists the sockets of the machine that are connected through us. Blocks, usually for milliseconds. It takes root, as
/// [`super::pass`] does.
///
/// # Errors
/// The table, /proc, the list of sockets or what is kept with them could not be read.
pub fn list(pins: &PinDir) -> Result<Listing, SocketsError> {
    owners::probe().map_err(SocketsError::Owners)?;
    let mut tries = (0..TRIES).map(|_| list_once(pins));
    // The agent may replace the table meanwhile; it does so seldom.
    let settled = tries.find(|result| !matches!(result, Err(SocketsError::Table(LookupError::Replaced))));
    settled.unwrap_or(Err(SocketsError::Table(LookupError::Replaced)))
}

fn list_once(pins: &PinDir) -> Result<Listing, SocketsError> {
    let (table, states) = (Lookup::open(pins)?, SocketStates::open(pins)?);
    on_own_thread(|| Census::default().take(&mut Judge::new(&table, &states), &states))
}

/// Sockets whose owners are not known yet.
#[derive(Default)]
struct Census {
    /// By inode, which no two sockets share; subflows share that of their MPTCP connection, and one of them was connected
    /// through us.
    by_inode: HashMap<u64, Listed>,
    sockets: Vec<TranslatedSocket>,
    /// The first one, which is no reason to leave out the others.
    failure: Option<SocketsError>,
}

/// A socket that has a peer.
#[derive(Clone, Copy)]
struct Listed {
    entry: Entry,
    /// The inode number of its network namespace.
    netns: u64,
    /// The verdict by the list; without one, a descriptor is needed.
    verdict: Option<Verdict>,
}

impl Census {
    /// The calling thread ends in another network namespace. An error comes after all that could be shown.
    fn take(mut self, judge: &mut Judge<'_>, states: &SocketStates) -> Result<Listing, SocketsError> {
        let refused = namespaces::visit_all(|netns| {
            let mut lists = Lists::open(states.storage());
            for protocol in [Protocol::Udp, Protocol::Tcp] {
                let listed = self.list(judge, &mut lists, protocol, netns);
                self.note(listed);
            }
        });
        self.by_inode.remove(&0);
        let mut unseen = refused.map_err(no_proc)?;
        if !self.by_inode.is_empty() {
            unseen += owners::each_socket(|descriptor| self.look_at(judge, descriptor)).map_err(no_proc)?;
        }
        self.sockets.sort_unstable();
        self.failure.map_or(Ok(Listing { sockets: self.sockets, unseen }), Err)
    }

    fn list(
        &mut self,
        judge: &mut Judge<'_>,
        lists: &mut Lists<'_>,
        protocol: Protocol,
        netns: u64,
    ) -> Result<(), SocketsError> {
        let mut failed = Ok(());
        lists.each(protocol, &RetiredBackends::Any, &mut |entry| {
            let mut verdict = None;
            if protocol == Protocol::Tcp && entry.id.is_some() {
                let asked = judge.asked_by_listed(entry);
                match asked.and_then(|asked| judge.verdict(asked.as_slice(), entry.shown.peer, protocol)) {
                    Ok(None) => return,
                    Ok(known) => verdict = known,
                    Err(error) => return failed = Err(error),
                }
            }
            self.by_inode.insert(entry.shown.inode, Listed { entry: *entry, netns, verdict });
        })?;
        failed
    }

    fn look_at(&mut self, judge: &mut Judge<'_>, descriptor: &Descriptor<'_>) -> io::Result<ControlFlow<()>> {
        if let Some(&listed) = self.by_inode.get(&descriptor.inode)
            && let Some(socket) = descriptor.duplicate()?
            && listed.is(&socket)
        {
            self.by_inode.remove(&descriptor.inode);
            let verdict = listed.verdict_by(judge, &socket);
            let found = verdict.map(|verdict| Some(TranslatedSocket::of(&listed, &verdict?, descriptor.owner())));
            let noted = found.map(|found| self.sockets.extend(found));
            self.note(noted);
        }
        Ok(if self.by_inode.is_empty() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    fn note(&mut self, result: Result<(), SocketsError>) {
        if let Err(error) = result {
            self.failure.get_or_insert(error);
        }
    }
}

impl Listed {
    /// Whether the descriptor is of the socket that was listed. That of an MPTCP connection is of none of its subflows.
    fn is(&self, socket: &OwnedFd) -> bool {
        self.verdict.is_some() || self.entry.id.is_none_or(|id| socket_cookie(socket) == Ok(id.cookie()))
    }

    fn verdict_by(&self, judge: &mut Judge<'_>, socket: &OwnedFd) -> Result<Option<Verdict>, SocketsError> {
        let Entry { kind, shown, .. } = self.entry;
        if self.verdict.is_some() {
            return Ok(self.verdict);
        }
        let asked = judge.asked_by(socket, kind.protocol)?;
        judge.verdict(&asked, shown.peer, kind.protocol)
    }
}

impl TranslatedSocket {
    fn of(Listed { entry, netns, .. }: &Listed, verdict: &Verdict, owner: Pid) -> Self {
        let protocol = entry.kind.protocol;
        let Backend { address, port } = endpoint((verdict.frontend.address, verdict.frontend.port));
        Self {
            frontend: Frontend { address, port, protocol },
            backend: endpoint(entry.shown.peer),
            local: endpoint(entry.shown.local),
            netns: *netns,
            state: BackendState::of(verdict.serving, protocol),
            uid: entry.shown.uid,
            pid: owner.as_raw_nonzero().get().unsigned_abs(),
            command: command(owner),
        }
    }
}

impl BackendState {
    fn of(serving: Serving, protocol: Protocol) -> Self {
        match serving {
            _ if is_stale(serving, protocol) => Self::Stale,
            Serving::NoFrontend => Self::NoFrontend,
            Serving::Yes | Serving::No => Self::Serving,
        }
    }

    /// As commands print it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Stale => "stale",
            Self::NoFrontend => "no-frontend",
        }
    }
}

/// proc_pid_comm(5); whatever bytes the process likes.
fn command(owner: Pid) -> Option<String> {
    let bytes = fs::read(format!("/proc/{owner}/comm")).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim_end_matches('\n').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_that_is_gone_makes_udp_stale_and_leaves_tcp() {
        for (serving, of_udp, of_tcp) in [
            (Serving::Yes, BackendState::Serving, BackendState::Serving),
            (Serving::No, BackendState::Stale, BackendState::Stale),
            (Serving::NoFrontend, BackendState::Stale, BackendState::NoFrontend),
        ] {
            let of = [Protocol::Udp, Protocol::Tcp].map(|protocol| BackendState::of(serving, protocol));
            assert_eq!(of, [of_udp, of_tcp]);
        }
    }
}
