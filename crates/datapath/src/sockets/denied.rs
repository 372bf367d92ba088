//! Closes connections of the pod that its network policy does not allow, though one before has.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    path::{Path, PathBuf},
    time::Duration,
};

use cproxy_core::{Backend, Protocol, RetiredBackends};
use cproxy_policy::Direction;

use super::{
    closing::close_listed,
    error::SocketsError,
    owners,
    socket_lists::{ListedSocket, SocketLists},
    staleness::endpoint,
    thread::{cpu_time, on_own_thread},
};
use crate::bpf::{PinDir, PolicyInForce, PolicyPins, PolicyReader, SocketStates, cgroups_below};

/// Outcome of a pass over the pod's sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClosedDenied {
    /// Sockets that were closed.
    pub closed: u64,
    /// Sockets that are denied and still open: this kernel cannot close them.
    pub left: u64,
    /// CPU time of the pass.
    pub cpu: Duration,
}

/// Closes sockets in the calling process' network namespace, which is the pod's, that the policy in force does not
/// allow. Sockets of this process stay, and those that were made in or below an exempt cgroup. A policy that is only
/// audited closes none. Blocks, usually for milliseconds.
///
/// The kernel does not tell who has begun a TCP connection: it is one to the pod if a socket listens on its port. A
/// datagram socket stays if one of the directions allows its peer, since replies pass.
///
/// # Errors
/// The policy, /proc or the list of sockets could not be read, or a socket could not be closed.
pub fn close_denied(pins: &PinDir, exempt: &[PathBuf]) -> Result<ClosedDenied, SocketsError> {
    let Some(reader) = PolicyReader::new(PolicyPins::new(pins)) else { return Ok(ClosedDenied::default()) };
    let state = reader.state().map_err(|error| SocketsError::Policy(error.into()))?;
    if state.is_audited || state.directions == Default::default() {
        return Ok(ClosedDenied::default());
    }
    let states = SocketStates::open(pins)?;
    let kept_cgroups = exempt.iter().map(|dir| cgroups_below(dir)).collect::<Result<Vec<_>, _>>();
    let kept_cgroups = kept_cgroups.map_err(|error| SocketsError::Io("cgroups", error))?;
    let own = owners::own_inodes().map_err(|error| SocketsError::Io("/proc/self/fd", error))?;
    on_own_thread(|| {
        let mut lists = SocketLists::open(states.storage());
        let mut listening = HashSet::new();
        lists.each_listener(&mut |port| {
            listening.insert(u16::from_be(port));
        })?;
        let mut verdicts = Verdicts { reader: &reader, state: &state, known: HashMap::new() };
        let mut is_denied = |entry: &ListedSocket| {
            // Without an inode, its application has closed it already.
            let is_kept = entry.info.inode == 0
                || own.contains(&entry.info.inode)
                || kept_cgroups.iter().any(|ids| ids.contains(&entry.info.cgroup));
            !is_kept && verdicts.deny(entry, &listening)
        };
        let mut outcome = ClosedDenied::default();
        let has_mptcp = Path::new("/proc/sys/net/mptcp").exists();
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let has_subflows = has_mptcp && protocol == Protocol::Tcp;
            let counts = close_listed(&mut lists, protocol, &RetiredBackends::Any, has_subflows, &mut is_denied)?;
            outcome.closed += counts.closed;
            outcome.left += counts.left;
        }
        Ok(ClosedDenied { cpu: cpu_time(), ..outcome })
    })
}

/// Verdicts of the policy in force. While it is being replaced, nothing is denied: another pass follows.
struct Verdicts<'p> {
    reader: &'p PolicyReader,
    state: &'p PolicyInForce,
    known: HashMap<(Direction, Protocol, Backend), bool>,
}

impl Verdicts<'_> {
    fn deny(&mut self, entry: &ListedSocket, listening: &HashSet<u16>) -> bool {
        let (local, peer) = (endpoint(entry.info.local), endpoint(entry.info.peer));
        let to_the_pod = Backend { address: peer.address, port: local.port };
        match entry.kind.protocol {
            Protocol::Tcp if listening.contains(&local.port) => {
                !self.allow(Direction::Ingress, Protocol::Tcp, to_the_pod)
            }
            Protocol::Tcp => !self.allow(Direction::Egress, Protocol::Tcp, peer),
            Protocol::Udp => {
                !self.allow(Direction::Egress, Protocol::Udp, peer)
                    && !self.allow(Direction::Ingress, Protocol::Udp, to_the_pod)
            }
        }
    }

    /// `port` is the one that was called.
    fn allow(&mut self, direction: Direction, protocol: Protocol, called: Backend) -> bool {
        let of_policy = match protocol {
            Protocol::Tcp => cproxy_policy::Protocol::Tcp,
            Protocol::Udp => cproxy_policy::Protocol::Udp,
        };
        match self.known.entry((direction, protocol, called)) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(unknown) => {
                let decision = self.reader.decide(self.state, direction, called.address, of_policy, called.port);
                *unknown.insert(decision.map_or(true, |decision| decision.is_allowed))
            }
        }
    }
}
