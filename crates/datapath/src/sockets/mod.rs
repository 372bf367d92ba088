//! Closing stale sockets: those connected through us to a backend that no longer serves.
//!
//! A connected UDP socket learns nothing when its backend goes: its datagrams vanish, for ever. So it is closed under the
//! application, which sees ECONNABORTED when it receives, or EDESTADDRREQ when it sends, and connects anew. One [`pass`] asks
//! the whole machine for sockets that are connected to backends that have retired:
//!
//! 1. In each network namespace (`namespaces`), the kernel lists them (`lists`), with the peer that the packets really go to,
//!    an inode and a cookie. Of a TCP socket the cookie, or what the kernel shows that is stored with it, tells which VIP the
//!    application asked for.
//! 2. Of a UDP socket only a descriptor does: its owner is found by the inode, and by a duplicate the state that the programs
//!    keep with it (`owners`).
//! 3. Who was connected by us to where the socket is connected now, and is no longer in the set of that VIP (`judge`), is
//!    closed by its addresses and its cookie: no other socket, nor one that has reconnected, is ever hit (`closing`).
//!
//! A kernel that cannot list sockets shows them in `/proc/net` (`proc_net`); they are then counted, not closed.
//!
//! [`list`] shows all that were connected by us.

mod closing;
mod diag;
mod filter;
mod judge;
mod listing;
mod lists;
mod message;
mod namespaces;
mod owners;
mod probe;
mod proc_net;
mod processes;

use std::{io, thread, time::Duration};

use cproxy_core::{Protocol, Retired};
pub use listing::{BackendState, Listing, TranslatedSocket, list};
pub use probe::{Abilities, probe};
use rustix::{
    io::Errno,
    time::{ClockId, clock_gettime},
};

use self::closing::Pass;
use crate::bpf::{Lookup, LookupError, PinDir, SocketStates};

/// Which stale sockets are closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// None.
    None,
    /// Connected UDP sockets.
    #[default]
    Udp,
    /// UDP and TCP, with MPTCP.
    All,
}

impl Mode {
    /// Whether sockets of a protocol are.
    #[must_use]
    pub fn closes(self, protocol: Protocol) -> bool {
        match self {
            Self::None => false,
            Self::Udp => protocol == Protocol::Udp,
            Self::All => true,
        }
    }
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
    /// The time on a CPU that it took.
    pub cpu: Duration,
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

/// Closes the stale sockets of the machine that are connected to backends that have retired, once. Blocks, usually for a
/// millisecond. It takes root: sockets of all processes, in all network namespaces.
///
/// Call it when the table is complete: to a UDP socket, a frontend that is missing is one that is gone.
///
/// # Errors
/// The table, /proc or the list of sockets could not be read.
pub fn pass(pins: &PinDir, retired: &Retired) -> Result<Outcome, SocketsError> {
    if retired.is_empty() {
        return Ok(Outcome::default());
    }
    let (table, states) = (Lookup::open(pins)?, SocketStates::open(pins)?);
    on_own_thread(|| {
        let outcome = Pass::new(&table, &states, retired).run()?;
        let cpu = clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default();
        Ok(Outcome { cpu, ..outcome })
    })
}

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
