//! Closes sockets that we translated and whose backend left the VIP's set, matched by address and cookie.
//!
//! A connected UDP socket learns nothing when its backend goes: its datagrams vanish, for ever. So it is closed under
//! the application, which sees ECONNABORTED when it receives, or EDESTADDRREQ when it sends, and connects anew.
//! [`terminate_stale`] asks the whole machine for sockets that are connected to backends that have retired:
//!
//! 1. In each network namespace (`namespaces`), the kernel lists them (`socket_lists`), with the peer that the packets
//!    really go to, an inode and a cookie. For a TCP socket the cookie, or the socket storage that the kernel shows,
//!    leads to the VIP that the application connected to.
//! 2. For a UDP socket only a descriptor does: its owner is found by the inode, and a duplicate of the descriptor gives
//!    the state that the programs keep with the socket (`owners`).
//! 3. A socket whose present peer is the backend of its translation, and no longer in the set of that VIP
//!    (`staleness`), is closed by its addresses and its cookie: no other socket, nor one that has reconnected, is ever
//!    hit (`terminate`).
//!
//! A kernel that cannot list sockets shows them in `/proc/net` (`proc_net`); they are then counted, not closed.
//!
//! [`list`] shows all translated sockets, [`list_direct`] those that are connected to a frontend itself.
//! [`find_missing_owners`] finds places of TCP sockets that have gone.

mod diag;
pub mod diag_message;
mod direct;
mod filter;
mod listing;
mod namespaces;
mod older;
mod owners;
mod places;
mod probe;
pub mod proc_net;
mod processes;
mod socket_lists;
mod staleness;
mod terminate;

use std::{io, thread, time::Duration};

use cproxy_core::{Frontend, Protocol, Retired};
pub use direct::{DirectSocket, list_direct};
pub use listing::{BackendState, Listing, TranslatedSocket, list};
pub(crate) use older::has_older_socket;
pub use places::{GoneOwners, MissingOwners, find_missing_owners};
pub use probe::{Abilities, probe};
use rustix::{
    io::Errno,
    time::{ClockId, clock_gettime},
};

use self::terminate::TerminationPass;
use crate::bpf::{KernelReader, PinDir, SocketStates, TableError};

/// Stale sockets to close.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TerminateSockets {
    /// None.
    None,
    /// Connected UDP sockets.
    #[default]
    Udp,
    /// UDP and TCP, with MPTCP.
    All,
}

impl TerminateSockets {
    /// Whether stale sockets of a protocol are closed.
    #[must_use]
    pub fn closes(self, protocol: Protocol) -> bool {
        match self {
            Self::None => false,
            Self::Udp => protocol == Protocol::Udp,
            Self::All => true,
        }
    }
}

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

/// Failure to close or list sockets.
#[derive(Debug, thiserror::Error)]
pub enum SocketsError {
    /// The table could not be read.
    #[error("cannot tell stale sockets: {0}")]
    Table(#[from] TableError),
    /// No thread, or no /proc.
    #[error("cannot look for sockets: {0}: {1}")]
    Io(&'static str, io::Error),
    /// The kernel failed to list sockets, although it can.
    #[error("cannot list sockets: {0}; `cproxy check` tells what is missing for udp_sockets and tcp_sockets")]
    List(Errno),
    /// A socket could not be closed, although the kernel can.
    #[error("cannot close a socket: {0}")]
    Close(Errno),
    /// The storage of other processes' sockets cannot be read.
    #[error("cannot look into the sockets of processes: {0}")]
    Owners(String),
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
    for _ in 0..TRIES {
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
        let (outcome, failure) = TerminationPass::new(&reader, &states, retired).run();
        let cpu = clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default();
        Ok((Outcome { cpu, ..outcome }, failure))
    })
}

/// Maximum number of attempts while the agent replaces maps, which it does seldom.
const TRIES: u32 = 10;

/// A network namespace is a thread's own affair: this thread ends in another one than it began.
fn on_own_thread<R: Send>(work: impl FnOnce() -> Result<R, SocketsError> + Send) -> Result<R, SocketsError> {
    let name = thread::Builder::new().name("sockets".to_owned());
    thread::scope(|scope| {
        let running = name.spawn_scoped(scope, work).map_err(|error| SocketsError::Io("no thread", error))?;
        running.join().unwrap_or_else(|_| Err(SocketsError::Io("thread", io::Error::other("ended early"))))
    })
}

fn no_proc(error: io::Error) -> SocketsError {
    SocketsError::Io("/proc", error)
}
