//! Peers of connections.

use std::{fmt, net::SocketAddr, path::Path, sync::Arc};

use crate::{Identity, Refusal, certificate};

/// Other end of a connection: where it is, and the identity of its client certificate.
#[derive(Clone, Debug)]
pub struct Peer {
    address: PeerAddress,
    certificate: Option<Result<Arc<Identity>, Refusal>>,
}

/// Place of the other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PeerAddress {
    /// Address of a TCP connection.
    Tcp(SocketAddr),
    /// Path of the listener that a connection came in on.
    Unix(Arc<Path>),
    /// Context id of a guest.
    Vsock {
        /// The id.
        cid: u32,
    },
}

impl Peer {
    /// Peer of a new connection. `certificate` is the client's own certificate in DER, whose chain has been verified.
    #[must_use]
    pub fn new(address: PeerAddress, certificate: Option<&[u8]>) -> Self {
        Self { address, certificate: certificate.map(|der| certificate::identity(der).map(Arc::new)) }
    }

    /// Its place.
    #[must_use]
    pub fn address(&self) -> &PeerAddress {
        &self.address
    }

    /// Identity of the client certificate, if there is one, or why it names nobody.
    pub(crate) fn certificate(&self) -> Option<&Result<Arc<Identity>, Refusal>> {
        self.certificate.as_ref()
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix {path:?}"),
            Self::Vsock { cid } => write!(f, "vsock {cid}"),
        }
    }
}
