//! Calls to backends themselves, for `cproxy explain --probe`, and without it a look at the routes to them.

use std::{
    fmt,
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    thread,
    time::Duration,
};

use cproxy_core::{Backend, Protocol};
use cproxy_network::{NetworkPath, SocketSetup};

/// Time for one call.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of backends that are called.
pub(super) const PROBES_MAX: usize = 32;

/// Maximum number of backends whose routes are looked up.
const ROUTES_MAX: usize = 256;

/// Call to a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The backend.
    pub backend: Backend,
    /// Protocol of the call.
    pub protocol: Protocol,
    /// Outcome of the call.
    pub outcome: ProbeOutcome,
}

/// Outcome of a call to a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// A TCP connection was made.
    Accepts,
    /// Nothing came back for an empty datagram, which proves nothing.
    Silent,
    /// The call failed.
    Fails(String),
}

impl ProbeOutcome {
    /// Whether nothing speaks against the backend.
    #[must_use]
    pub fn is_good(&self) -> bool {
        !matches!(self, Self::Fails(_))
    }
}

impl fmt::Display for ProbeOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accepts => f.write_str("accepts connections"),
            Self::Silent => f.write_str("did not refuse an empty datagram within a second"),
            Self::Fails(error) => f.write_str(error),
        }
    }
}

/// Calls each backend once, all at the same time.
pub(super) fn probe(backends: &[(Backend, Protocol)]) -> Vec<Probe> {
    thread::scope(|scope| {
        let call = |&(backend, protocol): &(Backend, Protocol)| {
            let spawned = thread::Builder::new().spawn_scoped(scope, move || match protocol {
                Protocol::Tcp => connect(backend),
                Protocol::Udp => send(backend),
            });
            (backend, protocol, spawned)
        };
        let calls: Vec<_> = backends.iter().take(PROBES_MAX).map(call).collect();
        let probe = |(backend, protocol, spawned): (_, _, std::io::Result<thread::ScopedJoinHandle<'_, _>>)| {
            let outcome = spawned.ok().and_then(|thread| thread.join().ok());
            outcome.map(|outcome| Probe { backend, protocol, outcome })
        };
        calls.into_iter().filter_map(probe).collect()
    })
}

/// Backends without a route, of the first [`ROUTES_MAX`]. Nothing is sent.
pub(super) fn without_route(backends: &[(Backend, Protocol)], setup: &SocketSetup) -> Vec<Probe> {
    let look = |&(backend, protocol): &(Backend, Protocol)| {
        let error = NetworkPath::to(backend.address.into(), setup).err()?;
        Some(Probe { backend, protocol, outcome: ProbeOutcome::Fails(format!("cannot be reached: {error}")) })
    };
    backends.iter().take(ROUTES_MAX).filter_map(look).collect()
}

fn connect(backend: Backend) -> ProbeOutcome {
    let address = SocketAddr::new(backend.address.into(), backend.port);
    match TcpStream::connect_timeout(&address, TIMEOUT) {
        Ok(_) => ProbeOutcome::Accepts,
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            ProbeOutcome::Fails("refuses connections: nothing listens there".to_owned())
        }
        Err(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => {
            ProbeOutcome::Fails("does not answer within a second".to_owned())
        }
        Err(error) => ProbeOutcome::Fails(format!("cannot be reached: {error}")),
    }
}

/// Sends an empty datagram. A host without a receiver answers it with an ICMP error.
fn send(backend: Backend) -> ProbeOutcome {
    let address = SocketAddr::new(backend.address.into(), backend.port);
    let any = if address.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let sent = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect(address)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        socket.send(&[])?;
        socket.recv(&mut [0])
    });
    match sent {
        Ok(_) => ProbeOutcome::Silent,
        Err(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => ProbeOutcome::Silent,
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            ProbeOutcome::Fails("refuses datagrams: nothing listens there".to_owned())
        }
        Err(error) => ProbeOutcome::Fails(format!("cannot be reached: {error}")),
    }
}
