//! One pass that closes stale sockets. What it keeps does not grow with the sockets of the machine.

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
    Outcome, SocketsError,
    judge::{Judge, endpoint, protocol_of},
    lists::{Entry, Lists},
    namespaces, no_proc,
    owners::{self, Descriptor},
};
use crate::bpf::{Lookup, SocketStates};

/// Two sockets may have the same addresses (`SO_REUSEPORT`), and the kernel finds one of them at a time.
const ROUNDS_MAX: u32 = 64;
/// How many sockets are kept at a time: to be looked for, to be confirmed, to be closed.
const KEPT_MAX: usize = 2_048;

/// A pass under way. It enters network namespaces: the calling thread ends in another one than it began.
pub(super) struct Pass<'t> {
    judge: Judge<'t>,
    states: &'t SocketStates,
    retired: &'t Retired,
    /// The protocols of which the kernel does not show what is stored with a socket: owners are asked.
    by_owners: Vec<Protocol>,
    sought: Sought,
    /// By inode, which no two sockets share.
    suspects: HashMap<u64, Suspect>,
    has_mptcp: bool,
    outcome: Outcome,
    /// The first one, which is no reason to leave out the others.
    failure: Option<SocketsError>,
}

/// The sockets whose owners are looked for.
enum Sought {
    /// Sockets with these inodes.
    These(HashSet<u64>),
    /// All: they are too many to be kept.
    All,
}

/// A socket that is stale if it is connected to whom it got.
struct Suspect {
    protocol: Protocol,
    cookie: u64,
    asked: Vec<Translation>,
}

/// The fate of some stale sockets.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    closed: u64,
    left: u64,
}

impl<'t> Pass<'t> {
    pub(super) fn new(table: &'t Lookup, states: &'t SocketStates, retired: &'t Retired) -> Self {
        // It is the same kernel in all network namespaces.
        let is_by_owners = |protocol: Protocol| match protocol {
            Protocol::Udp => true,
            Protocol::Tcp => !Lists::open(states.storage()).can_list(protocol),
        };
        let is_concerned = |protocol: &Protocol| !retired.of(*protocol).is_empty() && is_by_owners(*protocol);
        Self {
            judge: Judge::new(table, states),
            states,
            retired,
            by_owners: [Protocol::Udp, Protocol::Tcp].into_iter().filter(is_concerned).collect(),
            sought: Sought::These(HashSet::new()),
            suspects: HashMap::new(),
            has_mptcp: Path::new("/proc/sys/net/mptcp").exists(),
            outcome: Outcome::default(),
            failure: None,
        }
    }

    /// First the kernel's lists, then, where those name somebody, the owners.
    pub(super) fn run(mut self) -> Result<Outcome, SocketsError> {
        let refused = namespaces::visit_all(|_| {
            self.outcome.namespaces += 1;
            self.visit();
        });
        self.outcome.unseen = refused.map_err(no_proc)?;
        if !self.sought.is_empty() {
            self.outcome.unseen += owners::each_socket(|descriptor| self.look_at(descriptor)).map_err(no_proc)?;
            self.close_suspects();
        }
        self.failure.map_or(Ok(self.outcome), Err)
    }

    /// In the network namespace that the thread is in.
    fn visit(&mut self) {
        let mut lists = Lists::open(self.states.storage());
        if !self.by_owners.contains(&Protocol::Tcp) {
            self.close_tcp(&mut lists);
        }
        for protocol in self.by_owners.clone() {
            let (peers, sought) = (self.retired.of(protocol), &mut self.sought);
            let listed = lists.each(protocol, peers, &mut |Entry { shown, .. }| {
                if peers.has(&endpoint(shown.peer)) {
                    sought.add(shown.inode);
                }
            });
            self.note(listed);
        }
    }

    /// Of TCP the kernel's list says it all.
    fn close_tcp(&mut self, lists: &mut Lists<'_>) {
        let (retired, has_mptcp) = (self.retired, self.has_mptcp);
        let peers = retired.of(Protocol::Tcp);
        let (judge, failure) = (&mut self.judge, &mut self.failure);
        let mut is_stale = |entry: &Entry| {
            let asked = judge.asked_by_listed(entry);
            let is_stale = asked.and_then(|asked| judge.is_stale(asked.as_slice(), entry.shown.peer, Protocol::Tcp));
            known(is_stale, failure).unwrap_or_default()
        };
        let done = close_listed(lists, Protocol::Tcp, peers, has_mptcp, &mut is_stale);
        self.count(done);
    }

    fn look_at(&mut self, descriptor: &Descriptor<'_>) -> io::Result<ControlFlow<()>> {
        if self.sought.has(descriptor.inode)
            && let Some(socket) = descriptor.duplicate()?
        {
            self.sought.found(descriptor.inode);
            let suspected = self.suspect(&socket);
            if let Some(suspect) = self.note(suspected).flatten() {
                self.suspects.insert(descriptor.inode, suspect);
            }
            if self.suspects.len() >= KEPT_MAX {
                self.close_suspects();
            }
        }
        Ok(if self.sought.is_empty() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    fn suspect(&mut self, socket: &OwnedFd) -> Result<Option<Suspect>, SocketsError> {
        let failed = |error| SocketsError::Io("a socket", error);
        let Some(protocol) = protocol_of(socket).map_err(failed)? else { return Ok(None) };
        if !self.by_owners.contains(&protocol) {
            return Ok(None);
        }
        let asked = self.judge.asked_by(socket, protocol)?;
        if !self.judge.may_be_stale(&asked, protocol)? {
            return Ok(None);
        }
        let cookie = socket_cookie(socket).map_err(|error| failed(error.into()))?;
        Ok(Some(Suspect { protocol, cookie, asked }))
    }

    /// Closes those that the kernel lists with a peer that does not serve.
    fn close_suspects(&mut self) {
        let suspects = std::mem::take(&mut self.suspects);
        if suspects.is_empty() {
            return;
        }
        let toured = namespaces::visit_all(|_| {
            let mut lists = Lists::open(self.states.storage());
            for protocol in self.by_owners.clone() {
                let (retired, judge, failure) = (self.retired, &mut self.judge, &mut self.failure);
                let mut is_stale = |entry: &Entry| {
                    let suspect = suspects.get(&entry.shown.inode).filter(|suspect| suspect.is(entry));
                    let mut is_stale = |suspect: &Suspect| judge.is_stale(&suspect.asked, entry.shown.peer, protocol);
                    suspect.is_some_and(|suspect| known(is_stale(suspect), failure).unwrap_or_default())
                };
                let done = close_listed(&mut lists, protocol, retired.of(protocol), false, &mut is_stale);
                self.count(done);
            }
        });
        self.note(toured.map_err(no_proc));
    }

    fn count(&mut self, done: Result<Done, SocketsError>) {
        if let Some(Done { closed, left }) = self.note(done) {
            self.outcome.closed += closed;
            self.outcome.left += left;
        }
    }

    fn note<T>(&mut self, result: Result<T, SocketsError>) -> Option<T> {
        known(result, &mut self.failure)
    }
}

impl Sought {
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

impl Suspect {
    /// `/proc/net` tells no cookie.
    fn is(&self, entry: &Entry) -> bool {
        self.protocol == entry.kind.protocol && entry.id.is_none_or(|id| id.cookie() == self.cookie)
    }
}

/// Closes the stale ones among the sockets of a protocol that are connected to these peers.
fn close_listed(
    lists: &mut Lists<'_>,
    protocol: Protocol,
    peers: &RetiredBackends,
    has_subflows: bool,
    is_stale: &mut dyn FnMut(&Entry) -> bool,
) -> Result<Done, SocketsError> {
    let mut all = Done::default();
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
        let mut missed = 0;
        kept.retain(|entry| {
            // The list was long, and its backend may be back by now.
            if !is_stale(entry) {
                stale -= 1;
                return false;
            }
            match entry.id.map(|id| lists.destroy(entry.kind, &id)) {
                Some(Ok(())) => true,
                outcome => {
                    missed += u32::from(outcome == Some(Err(Errno::NOENT)));
                    false
                }
            }
        });
        let closed = kept.len() as u64;
        all = Done { closed: all.closed + closed, left: stale - closed };
        if has_subflows && closed != 0 {
            close_subflows(lists, protocol, kept.iter().map(|entry| entry.shown.inode).collect())?;
        }
        // Sockets that the first round missed have mostly ended by themselves.
        if !(is_more || missed != 0) || (number > 1 && closed == 0) {
            break;
        }
    }
    Ok(all)
}

/// An MPTCP connection goes on while it has any subflow. All of them have its inode; a TCP socket's is its own.
fn close_subflows(lists: &mut Lists<'_>, protocol: Protocol, mut of: HashSet<u64>) -> Result<(), SocketsError> {
    of.remove(&0);
    let mut others = Vec::new();
    lists.each(protocol, &RetiredBackends::Any, &mut |entry| {
        if of.contains(&entry.shown.inode) && others.len() < KEPT_MAX {
            others.push(*entry);
        }
    })?;
    for Entry { kind, id, .. } in others {
        // It may have gone by itself.
        id.and_then(|id| lists.destroy(kind, &id).ok());
    }
    Ok(())
}

/// A socket of which something could not be told is left alone, and all others are not.
fn known<T>(result: Result<T, SocketsError>, failure: &mut Option<SocketsError>) -> Option<T> {
    match result {
        Ok(known) => Some(known),
        Err(error) => {
            failure.get_or_insert(error);
            None
        }
    }
}
