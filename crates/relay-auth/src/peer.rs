//! Peers of connections.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
};

use crate::{
    Identity, Refusal,
    certificate::{self, Certificate},
};

/// Other end of a connection: where it is, and the identity of its client certificate.
#[derive(Clone, Debug)]
pub struct Peer {
    address: PeerAddress,
    certificate: Option<Result<Certificate, Refusal>>,
}

/// Address of the other end of a connection.
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

/// Origin of connections: what one host, or one guest, cannot choose.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// IPv4 address. Many guests may share it, behind their node.
    V4(Ipv4Addr),
    /// The 64 bits of an IPv6 network: a host has all addresses in it.
    V6(u128),
    /// Path of a listener.
    Unix(Arc<Path>),
    /// Context id of a guest.
    Vsock(u32),
}

impl From<&PeerAddress> for Origin {
    fn from(address: &PeerAddress) -> Self {
        match address {
            PeerAddress::Tcp(address) => match address.ip().to_canonical() {
                IpAddr::V4(address) => Self::V4(address),
                IpAddr::V6(address) => Self::V6(address.to_bits() >> 64),
            },
            PeerAddress::Unix(path) => Self::Unix(path.clone()),
            PeerAddress::Vsock { cid } => Self::Vsock(*cid),
        }
    }
}

impl Peer {
    /// Peer of a new connection. `certificate` is the client's own certificate in DER, whose chain has been verified.
    #[must_use]
    pub fn new(address: PeerAddress, certificate: Option<&[u8]>) -> Self {
        Self { address, certificate: certificate.map(certificate::read) }
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> &PeerAddress {
        &self.address
    }

    /// Identity of the client certificate, if there is one, or the reason why it gives none now.
    pub(crate) fn certificate(&self) -> Option<Result<Arc<Identity>, Refusal>> {
        Some(match self.certificate.as_ref()? {
            Ok(certificate) if certificate.has_expired() => Err(certificate::expired()),
            Ok(certificate) => Ok(certificate.identity.clone()),
            Err(refusal) => Err(refusal.clone()),
        })
    }

    /// Whether the client certificate has expired since the connection began.
    #[must_use]
    pub fn has_expired(&self) -> bool {
        matches!(&self.certificate, Some(Ok(certificate)) if certificate.has_expired())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_one_origin() {
        let origin = |text: &str| Origin::from(&PeerAddress::Tcp(text.parse().unwrap()));
        assert_eq!(origin("[::ffff:10.0.0.1]:1"), origin("10.0.0.1:2"));
        assert_eq!(origin("[2001:db8::1]:1"), origin("[2001:db8::2:1]:1"));
        assert_ne!(origin("[2001:db8::1]:1"), origin("[2001:db8:0:1::1]:1"));
    }
}
