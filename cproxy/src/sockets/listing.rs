//! The sockets that are connected through us, for whoever asks; nothing is closed.

use std::fs;

use rustix::process::Pid;

use super::{
    SocketsError,
    connected::{Census, Found},
    is_stale,
    message::{AddressPort, Transport},
    on_own_thread, owners,
};
use crate::{
    bpf::{Lookup, LookupError, PinDir, Serving, SocketStates},
    model::{Address, Backend, Frontend, Protocol},
};

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
    on_own_thread(|| {
        let mut sockets = Vec::new();
        let mut census = Census::take(&[Transport::Udp, Transport::Tcp, Transport::Mptcp])?;
        census.show_translated(&mut table.snapshot(), &states, |found| sockets.push(TranslatedSocket::of(found)))?;
        sockets.sort_unstable();
        Ok(Listing { sockets, unseen: census.unseen })
    })
}

impl TranslatedSocket {
    fn of(found: &Found<'_>) -> Self {
        let Found { socket, frontend, serving, owner } = found;
        let transport = socket.kind.transport;
        let (address, port) = of_network((frontend.address, frontend.port));
        Self {
            frontend: Frontend { address, port, protocol: protocol(transport) },
            backend: endpoint(socket.shown.peer),
            local: endpoint(socket.shown.local),
            netns: socket.netns,
            state: BackendState::of(*serving, transport),
            uid: socket.shown.uid,
            pid: owner.as_raw_nonzero().get().unsigned_abs(),
            command: command(*owner),
        }
    }
}

impl BackendState {
    fn of(serving: Serving, transport: Transport) -> Self {
        match serving {
            _ if is_stale(serving, transport) => Self::Stale,
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

fn protocol(transport: Transport) -> Protocol {
    match transport {
        Transport::Udp => Protocol::Udp,
        Transport::Tcp | Transport::Mptcp => Protocol::Tcp,
    }
}

fn endpoint(end: AddressPort) -> Backend {
    let (address, port) = of_network(end);
    Backend { address, port }
}

fn of_network((address, port): AddressPort) -> (Address, u16) {
    (Address::from_words(address), u16::from_be(port))
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
            let of = [Transport::Udp, Transport::Tcp, Transport::Mptcp].map(|of| BackendState::of(serving, of));
            assert_eq!(of, [of_udp, of_tcp, of_tcp]);
        }
    }
}
