//! One pass that closes stale sockets. Its memory does not grow with the sockets of the machine.

use std::{
    collections::{HashMap, HashSet},
    io,
    ops::ControlFlow,
    path::Path,
};

use cproxy_core::{Protocol, Retired, RetiredBackends};
use cproxy_ebpf::Translation;
use rustix::{fd::OwnedFd, io::Errno, net::sockopt::socket_cookie};

use super::{
    Outcome, SocketsError, namespaces, no_proc,
    owners::{self, Descriptor},
    processes::is_passing,
    socket_lists::{ListedSocket, SocketLists},
    staleness::{StaleCheck, endpoint, protocol_of},
};
use crate::bpf::{KernelReader, SocketStates};

/// Two sockets may have the same addresses (`SO_REUSEPORT`), and the kernel finds one of them at a time.
const ROUNDS_MAX: u32 = 64;
/// Maximum number of sockets in each collection: sought, suspected, to be closed.
const KEPT_MAX: usize = 2_048;

/// A pass under way. It enters network namespaces: the calling thread ends in another one than it began.
pub(super) struct TerminationPass<'t> {
    check: StaleCheck<'t>,
    states: &'t SocketStates,
    retired: &'t Retired,
    /// Protocols whose socket storage the kernel does not list: it is read through the owners.
    by_owners: Vec<Protocol>,
    sought: SoughtInodes,
    /// By inode, which no two sockets share.
    suspects: HashMap<u64, OwnedSocket>,
    has_mptcp: bool,
    outcome: Outcome,
    /// The first one, which is no reason to leave out the others.
    failure: Option<SocketsError>,
}

/// The sockets whose owners are looked for.
enum SoughtInodes {
    /// Sockets with these inodes.
    These(HashSet<u64>),
    /// All: they are too many to be kept.
    All,
}

/// A socket that was found by its owner: stale if it is connected to the backend of its translation.
struct OwnedSocket {
    protocol: Protocol,
    cookie: u64,
    asked: Vec<Translation>,
}

/// Numbers of stale sockets that were closed and left open.
#[derive(Clone, Copy, Debug, Default)]
struct Terminated {
    closed: u64,
    left: u64,
}

impl<'t> TerminationPass<'t> {
    pub(super) fn new(reader: &'t KernelReader, states: &'t SocketStates, retired: &'t Retired) -> Self {
        // It is the same kernel in all network namespaces.
        let is_by_owners = |protocol: Protocol| match protocol {
            Protocol::Udp => true,
            Protocol::Tcp => !SocketLists::open(states.storage()).can_list(protocol),
        };
        let is_concerned = |protocol: &Protocol| !retired.of(*protocol).is_empty() && is_by_owners(*protocol);
        Self {
            check: StaleCheck::new(reader, states),
            states,
            retired,
            by_owners: [Protocol::Udp, Protocol::Tcp].into_iter().filter(is_concerned).collect(),
            sought: SoughtInodes::These(HashSet::new()),
            suspects: HashMap::new(),
            has_mptcp: Path::new("/proc/sys/net/mptcp").exists(),
            outcome: Outcome::default(),
            failure: None,
        }
    }

    /// First the kernel's lists, then, where those name sockets, their owners.
    pub(super) fn run(mut self) -> (Outcome, Option<SocketsError>) {
        let refused = namespaces::visit_all(|_| {
            self.outcome.namespaces += 1;
            self.visit();
        });
        self.outcome.unseen = self.record(refused.map_err(no_proc)).unwrap_or_default();
        if !self.sought.is_empty() {
            let refused = owners::each_socket(|descriptor| self.inspect(descriptor));
            self.outcome.unseen += self.record(refused.map_err(no_proc)).unwrap_or_default();
            self.close_suspects();
        }
        self.outcome.frontends = self.check.stale_frontends;
        (self.outcome, self.failure)
    }

    /// In the network namespace that the thread is in.
    fn visit(&mut self) {
        let mut lists = SocketLists::open(self.states.storage());
        if !self.by_owners.contains(&Protocol::Tcp) {
            self.close_tcp(&mut lists);
        }
        for protocol in self.by_owners.clone() {
            let (peers, sought) = (self.retired.of(protocol), &mut self.sought);
            let listed = lists.each(protocol, peers, &mut |ListedSocket { info, .. }| {
                if peers.has(&endpoint(info.peer)) {
                    sought.add(info.inode);
                }
            });
            self.record(listed);
        }
    }

    /// For TCP the kernel's list suffices.
    fn close_tcp(&mut self, lists: &mut SocketLists<'_>) {
        let (retired, has_mptcp) = (self.retired, self.has_mptcp);
        let peers = retired.of(Protocol::Tcp);
        let (check, failure) = (&mut self.check, &mut self.failure);
        let mut is_stale = |entry: &ListedSocket| {
            let asked = check.translation_of_listed(entry);
            let is_stale = asked.and_then(|asked| check.is_stale(asked.as_slice(), entry.info.peer, Protocol::Tcp));
            or_record(is_stale, failure).unwrap_or_default()
        };
        let done = close_listed(lists, Protocol::Tcp, peers, has_mptcp, &mut is_stale);
        self.count(done);
    }

    fn inspect(&mut self, descriptor: &Descriptor<'_>) -> io::Result<ControlFlow<()>> {
        if self.sought.has(descriptor.inode)
            && let Some(socket) = descriptor.duplicate()?
        {
            self.sought.found(descriptor.inode);
            let suspected = self.suspect(&socket);
            if let Some(suspect) = self.record(suspected).flatten() {
                self.suspects.insert(descriptor.inode, suspect);
            }
            if self.suspects.len() >= KEPT_MAX {
                self.close_suspects();
            }
        }
        Ok(if self.sought.is_empty() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    fn suspect(&mut self, socket: &OwnedFd) -> Result<Option<OwnedSocket>, SocketsError> {
        let failed = |error| SocketsError::Io("a socket", error);
        let Some(protocol) = protocol_of(socket).map_err(failed)? else { return Ok(None) };
        if !self.by_owners.contains(&protocol) {
            return Ok(None);
        }
        let asked = self.check.translations_of(socket, protocol)?;
        if !self.check.may_be_stale(&asked, protocol)? {
            return Ok(None);
        }
        let cookie = socket_cookie(socket).map_err(|error| failed(error.into()))?;
        Ok(Some(OwnedSocket { protocol, cookie, asked }))
    }

    /// Closes those that the kernel lists with a peer that does not serve.
    fn close_suspects(&mut self) {
        let suspects = std::mem::take(&mut self.suspects);
        if suspects.is_empty() {
            return;
        }
        let toured = namespaces::visit_all(|_| {
            let mut lists = SocketLists::open(self.states.storage());
            for protocol in self.by_owners.clone() {
                let (retired, check, failure) = (self.retired, &mut self.check, &mut self.failure);
                let mut is_stale = |entry: &ListedSocket| {
                    let suspect = suspects.get(&entry.info.inode).filter(|suspect| suspect.is(entry));
                    let mut is_stale =
                        |suspect: &OwnedSocket| check.is_stale(&suspect.asked, entry.info.peer, protocol);
                    suspect.is_some_and(|suspect| or_record(is_stale(suspect), failure).unwrap_or_default())
                };
                let done = close_listed(&mut lists, protocol, retired.of(protocol), false, &mut is_stale);
                self.count(done);
            }
        });
        self.record(toured.map_err(no_proc));
    }

    fn count(&mut self, done: Result<Terminated, SocketsError>) {
        if let Some(Terminated { closed, left }) = self.record(done) {
            self.outcome.closed += closed;
            self.outcome.left += left;
        }
    }

    fn record<T>(&mut self, result: Result<T, SocketsError>) -> Option<T> {
        or_record(result, &mut self.failure)
    }
}

impl SoughtInodes {
    fn add(&mut self, inode: u64) {
        let Self::These(inodes) = self else { return };
        // 0 is that of sockets that have none.
        if inode != 0 {
            inodes.insert(inode);
        }
        if inodes.len() > KEPT_MAX {
            *self = Self::All;
        }
    }

    fn has(&self, inode: u64) -> bool {
        match self {
            Self::These(inodes) => inodes.contains(&inode),
            Self::All => true,
        }
    }

    fn found(&mut self, inode: u64) {
        if let Self::These(inodes) = self {
            inodes.remove(&inode);
        }
    }

    fn is_empty(&self) -> bool {
        matches!(self, Self::These(inodes) if inodes.is_empty())
    }
}

impl OwnedSocket {
    /// `/proc/net` shows no cookie.
    fn is(&self, entry: &ListedSocket) -> bool {
        self.protocol == entry.kind.protocol && entry.id.is_none_or(|id| id.cookie() == self.cookie)
    }
}

/// Closes the stale ones among the sockets of a protocol that are connected to these peers.
fn close_listed(
    lists: &mut SocketLists<'_>,
    protocol: Protocol,
    peers: &RetiredBackends,
    has_subflows: bool,
    is_stale: &mut dyn FnMut(&ListedSocket) -> bool,
) -> Result<Terminated, SocketsError> {
    let mut all = Terminated::default();
    for number in 1..=ROUNDS_MAX {
        let (mut stale, mut kept) = (0, Vec::new());
        lists.each(protocol, peers, &mut |entry| {
            if is_stale(entry) {
                stale += 1;
                if kept.len() < KEPT_MAX {
                    kept.push(*entry);
                }
            }
        })?;
        let is_more = stale > kept.len() as u64;
        let (mut missed, mut failure) = (0, None);
        kept.retain(|entry| {
            // The list was long, and its backend may be back by now.
            if !is_stale(entry) {
                stale -= 1;
                return false;
            }
            match entry.id.map(|id| lists.destroy(entry.kind, &id)) {
                Some(Ok(())) => true,
                outcome => {
                    let error = outcome.and_then(Result::err);
                    missed += u32::from(error == Some(Errno::NOENT));
                    failure = failure.or(error.filter(|error| is_passing(&(*error).into())));
                    false
                }
            }
        });
        if let Some(error) = failure {
            return Err(SocketsError::Close(error));
        }
        let closed = kept.len() as u64;
        all = Terminated { closed: all.closed + closed, left: stale - closed };
        if has_subflows && closed != 0 {
            close_subflows(lists, protocol, kept.iter().map(|entry| entry.info.inode).collect())?;
        }
        // Sockets that the first round missed have mostly ended by themselves.
        if !(is_more || missed != 0) || (number > 1 && closed == 0) {
            break;
        }
    }
    Ok(all)
}

/// An MPTCP connection goes on while it has any subflow. All of them have its inode; a TCP socket's is its own.
fn close_subflows(lists: &mut SocketLists<'_>, protocol: Protocol, mut of: HashSet<u64>) -> Result<(), SocketsError> {
    of.remove(&0);
    let mut others = Vec::new();
    lists.each(protocol, &RetiredBackends::Any, &mut |entry| {
        if of.contains(&entry.info.inode) && others.len() < KEPT_MAX {
            others.push(*entry);
        }
    })?;
    for ListedSocket { kind, id, .. } in others {
        // It may have gone by itself.
        id.and_then(|id| lists.destroy(kind, &id).ok());
    }
    Ok(())
}

/// Records the first failure: the socket that it concerns is left alone, and all others are not.
fn or_record<T>(result: Result<T, SocketsError>, failure: &mut Option<SocketsError>) -> Option<T> {
    match result {
        Ok(known) => Some(known),
        Err(error) => {
            failure.get_or_insert(error);
            None
        }
    }
}
