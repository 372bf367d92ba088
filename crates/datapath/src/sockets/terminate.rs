//! Passes over all sockets that close the stale ones. Their memory does not grow with the sockets of the machine.

use std::{
    collections::{HashMap, HashSet},
    io,
    ops::ControlFlow,
    path::Path,
    time::Duration,
};

use cproxy_core::{Frontend, Protocol, Retired};
use cproxy_ebpf::Translation;
use rustix::{fd::OwnedFd, net::sockopt::socket_cookie};

use super::{
    closing::{CloseCounts, KEPT_MAX, close_listed},
    error::{REPLACED_TRIES_MAX, SocketsError, no_proc},
    namespaces,
    owners::{self, Descriptor},
    socket_lists::{ListedSocket, SocketLists},
    staleness::{StaleCheck, endpoint, protocol_of},
    thread::{cpu_time, on_own_thread},
};
use crate::bpf::{KernelReader, PinDir, SocketStates, TableError};

/// Outcome of a pass over all sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Sockets that were closed.
    pub closed: u64,
    /// Sockets that are stale and still open: this kernel cannot close them.
    pub left: u64,
    /// Network namespaces that were searched.
    pub namespaces: u32,
    /// Network namespaces and processes without permission to search them.
    pub unseen: u32,
    /// First frontends of the stale sockets; the last one tells that there are more than the others.
    pub frontends: [Option<Frontend>; 4],
    /// CPU time of the pass.
    pub cpu: Duration,
}

/// Closes the stale sockets of the machine that are connected to backends that have retired, once. Blocks, usually for
/// a millisecond. It takes root: sockets of all processes, in all network namespaces.
///
/// Call it when the table is complete: to a UDP socket, a frontend that is missing is one that is gone.
///
/// # Errors
/// The table, /proc or the list of sockets could not be read.
pub fn terminate_stale(pins: &PinDir, retired: &Retired) -> Result<Outcome, SocketsError> {
    if retired.is_empty() {
        return Ok(Outcome::default());
    }
    let (mut closed, mut cpu, mut frontends) = (0, Duration::ZERO, Default::default());
    for _ in 0..REPLACED_TRIES_MAX {
        let (outcome, failure) = terminate_once(pins, retired)?;
        closed += outcome.closed;
        cpu += outcome.cpu;
        if outcome.closed != 0 {
            frontends = outcome.frontends;
        }
        match failure {
            Some(SocketsError::Table(TableError::Replaced)) => {}
            Some(error) => return Err(error),
            None => return Ok(Outcome { closed, cpu, frontends, ..outcome }),
        }
    }
    Err(TableError::Replaced.into())
}

fn terminate_once(pins: &PinDir, retired: &Retired) -> Result<(Outcome, Option<SocketsError>), SocketsError> {
    let (reader, states) = (KernelReader::open(pins)?, SocketStates::open(pins)?);
    on_own_thread(|| {
        let (outcome, failure) = TerminationPass::new(pins, &reader, &states, retired)?.run();
        Ok((Outcome { cpu: cpu_time(), ..outcome }, failure))
    })
}

/// A pass under way. It enters network namespaces: the calling thread ends in another one than it began.
struct TerminationPass<'t> {
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
    translations: Vec<Translation>,
}

impl<'t> TerminationPass<'t> {
    fn new(
        pins: &PinDir,
        reader: &'t KernelReader,
        states: &'t SocketStates,
        retired: &'t Retired,
    ) -> Result<Self, SocketsError> {
        // It is the same kernel in all network namespaces.
        let is_by_owners = |protocol: Protocol| match protocol {
            Protocol::Udp => true,
            Protocol::Tcp => !SocketLists::open(states.storage()).can_list(protocol),
        };
        let is_concerned = |protocol: &Protocol| !retired.of(*protocol).is_empty() && is_by_owners(*protocol);
        Ok(Self {
            check: StaleCheck::new(pins, reader, states)?,
            states,
            retired,
            by_owners: [Protocol::Udp, Protocol::Tcp].into_iter().filter(is_concerned).collect(),
            sought: SoughtInodes::These(HashSet::new()),
            suspects: HashMap::new(),
            has_mptcp: Path::new("/proc/sys/net/mptcp").exists(),
            outcome: Outcome::default(),
            failure: None,
        })
    }

    /// First the kernel's lists, then, where those name sockets, their owners.
    fn run(mut self) -> (Outcome, Option<SocketsError>) {
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
            let translation = check.translation_of_listed(entry);
            let is_stale =
                translation.and_then(|found| check.is_stale(found.as_slice(), entry.info.peer, Protocol::Tcp));
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
        let translations = self.check.translations_of(socket, protocol)?;
        if !self.check.may_be_stale(&translations, protocol)? {
            return Ok(None);
        }
        let cookie = socket_cookie(socket).map_err(|error| failed(error.into()))?;
        Ok(Some(OwnedSocket { protocol, cookie, translations }))
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
                        |suspect: &OwnedSocket| check.is_stale(&suspect.translations, entry.info.peer, protocol);
                    suspect.is_some_and(|suspect| or_record(is_stale(suspect), failure).unwrap_or_default())
                };
                let done = close_listed(&mut lists, protocol, retired.of(protocol), false, &mut is_stale);
                self.count(done);
            }
        });
        self.record(toured.map_err(no_proc));
    }

    fn count(&mut self, done: Result<CloseCounts, SocketsError>) {
        if let Some(CloseCounts { closed, left }) = self.record(done) {
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
