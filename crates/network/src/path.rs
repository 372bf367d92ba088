//! Path to a destination, as a connected UDP socket shows it: its source address and its MTU. Nothing is sent.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use rustix::net::{getsockname, sockopt};

use super::{
    route::{BEHIND_DEFAULT_ROUTE, connected},
    socket_setup::SocketSetup,
};

/// Path of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkPath {
    /// Source address of packets.
    pub source: IpAddr,
    /// Largest packet in bytes, as the kernel knows it: that of the device or route, or of a narrower path.
    pub mtu_bytes: u32,
}

impl NetworkPath {
    /// Path to a destination.
    ///
    /// # Errors
    /// There is no route, or the socket cannot be set up.
    pub fn to(destination: IpAddr, setup: &SocketSetup) -> io::Result<Self> {
        let socket = connected(destination, setup)?;
        let source = SocketAddr::try_from(getsockname(&socket)?)?.ip();
        let mtu_bytes = if destination.is_ipv4() { sockopt::ip_mtu(&socket) } else { sockopt::ipv6_mtu(&socket) }?;
        Ok(Self { source, mtu_bytes })
    }

    /// Path of the default route in a family.
    ///
    /// # Errors
    /// As [`Self::to`].
    pub fn default_route(is_ipv4: bool, setup: &SocketSetup) -> io::Result<Self> {
        let [v4, v6] = BEHIND_DEFAULT_ROUTE;
        Self::to(if is_ipv4 { v4 } else { v6 }, setup)
    }
}
