//! Backend of a new connection without any server.

use std::net::{IpAddr, SocketAddr};

use crate::socket::Socket;

/// Connects a new UDP socket and returns the address of its backend, in IPv6's form if the socket is IPv6. All pods are
/// on this host, and a connection to one of its own addresses has just that address as its source (net/ipv4/route.c,
/// `ip_route_output_key_hash_rcu`), which no program hides.
pub(crate) fn backend(to: SocketAddr) -> IpAddr {
    let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let socket = Socket::new(family, libc::SOCK_DGRAM).unwrap();
    socket.connect(to).unwrap();
    socket.local().unwrap().ip()
}
