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
//!
//! The first two steps (`connected`) serve [`list`], too, which shows all that were connected by us.

mod connected;
mod diag;
mod listing;
mod message;
mod namespaces;
mod owners;
mod probe;
mod proc_net;

use std::{io, mem, thread};

use rustix::io::Errno;

use self::{
    connected::{Census, Connected},
    diag::Diag,
    message::Transport,
};
use crate::bpf::{Lookup, LookupError, PinDir, Serving, SocketStates};

pub use listing::{BackendState, Listing, TranslatedSocket, list};
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

/// Why there was no pass, or no list.
#[derive(Debug, thiserror::Error)]
pub enum SocketsError {
    /// The table could not be read.
    #[error("cannot tell stale sockets: {0}")]
    Table(#[from] LookupError),
    /// No thread, or no /proc.
    #[error("cannot look for sockets: {0}: {1}")]
    Io(&'static str, io::Error),
    /// The kernel failed to list sockets, although it can.
    #[error("cannot list sockets: {0}; `cproxy check` tells what is missing for udp_sockets and tcp_sockets")]
    List(Errno),
    /// What is kept with other processes' sockets cannot be read.
    #[error("cannot look into the sockets of processes: {0}")]
    Owners(String),
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
    on_own_thread(|| all_rounds(&table, &states, mode))
}

/// A network namespace is a thread's own affair: this thread ends in another one than it began.
fn on_own_thread<R: Send>(work: impl FnOnce() -> Result<R, SocketsError> + Send) -> Result<R, SocketsError> {
    let name = thread::Builder::new().name("sockets".to_owned());
    thread::scope(|scope| {
        let running = name.spawn_scoped(scope, work).map_err(|error| SocketsError::Io("no thread", error))?;
        running.join().unwrap_or_else(|_| Err(SocketsError::Io("thread", io::Error::other("ended early"))))
    })
}

fn all_rounds(table: &Lookup, states: &SocketStates, mode: Mode) -> Result<Outcome, SocketsError> {
    let mut outcome = Outcome::default();
    for number in 1..=ROUNDS_MAX {
        let Round { done, missed, .. } = Round::run(table, states, mode)?;
        outcome = Outcome { closed: outcome.closed + done.closed, left: done.left + missed, ..done };
        // What the first round missed has mostly gone by itself.
        if missed == 0 || (number > 1 && done.closed == 0) {
            break;
        }
    }
    Ok(outcome)
}

/// One look at every socket.
#[derive(Default)]
struct Round {
    /// As [`Census::lists`].
    lists: Vec<Diag>,
    done: Outcome,
    /// Gone when they should have been closed, or hidden by another one with the same addresses.
    missed: u64,
}

impl Round {
    fn run(table: &Lookup, states: &SocketStates, mode: Mode) -> Result<Self, SocketsError> {
        let transports: &[Transport] = match mode {
            Mode::None => &[],
            Mode::Udp => &[Transport::Udp],
            Mode::All => &[Transport::Udp, Transport::Tcp, Transport::Mptcp],
        };
        let mut census = Census::take(transports)?;
        let mut round = Self { lists: mem::take(&mut census.lists), ..Self::default() };
        census.show_translated(&mut table.snapshot(), states, |found| {
            if is_stale(found.serving, found.socket.kind.transport) {
                round.close(found.socket);
            }
        })?;
        (round.done.namespaces, round.done.unseen) = (census.namespaces, census.unseen);
        Ok(round)
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
    use super::*;

    #[test]
    fn only_udp_goes_with_its_frontend() {
        for transport in [Transport::Udp, Transport::Tcp, Transport::Mptcp] {
            assert!(is_stale(Serving::No, transport) && !is_stale(Serving::Yes, transport));
            assert_eq!(is_stale(Serving::NoFrontend, transport), transport == Transport::Udp);
        }
    }
}
