//! Addresses of peers, and the origins that they show.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
};

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
