//! Source address that the kernel selects for a destination: a connected UDP socket has it, without sending anything.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::OwnedFd,
};

use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, getsockname, socket_with};

use super::socket_setup::SocketSetup;

/// Addresses that no network has, one of each family: only the default route leads to them (RFC 5737, RFC 9637).
pub(super) const BEHIND_DEFAULT_ROUTE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(198, 51, 100, 254)),
    IpAddr::V6(Ipv6Addr::new(0x3fff, 0xfff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xfffe)),
];

/// Arbitrary port.
const PORT: u16 = 9;

/// Source address of packets to `destination`.
///
/// # Errors
/// There is no route, or the socket cannot be set up.
pub(super) fn source_address(destination: IpAddr, setup: &SocketSetup) -> io::Result<IpAddr> {
    Ok(SocketAddr::try_from(getsockname(connected(destination, setup)?)?)?.ip())
}

/// UDP socket that is connected to `destination`.
///
/// # Errors
/// As [`source_address`].
pub(super) fn connected(destination: IpAddr, setup: &SocketSetup) -> io::Result<OwnedFd> {
    let family = if destination.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    setup.apply(&socket)?;
    connect(&socket, &SocketAddr::new(destination, PORT))?;
    Ok(socket)
}

/// Whether other machines can know the address as the VM's.
pub(super) fn is_usable(address: &IpAddr) -> bool {
    let is_link_local = matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
    !(address.is_loopback() || address.is_unspecified() || is_link_local)
}
