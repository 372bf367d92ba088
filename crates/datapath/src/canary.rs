//! Canary: calls through every hook to an address of the agent's own, which must reach a listener of the agent's own.
//!
//! All sockets are bound to the loopback device. Without the hooks no packet leaves the machine.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use cproxy_core::{Address, Family, Protocol};
use cproxy_ebpf::policy::{DENIED_CANARIES, DENIED_CANARY_PORT};
use cproxy_policy::Direction;
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, accept_with, bind, connect, getpeername,
        getsockname, listen, recvfrom, sendto, socket_with, sockopt,
    },
    time::Timespec,
};

use crate::bpf::{PinDir, PolicyPins, PolicyReader, ProcessCgroup, SocketStates, netns_cookie};

/// Longest time for one packet to cross the loopback device, on a machine without a free CPU.
const PACKET_TIMEOUT: Duration = Duration::from_millis(250);

/// Route of the canary: calls to a frontend reach a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Protocol of the calls.
    pub protocol: Protocol,
    /// Address to which the canary is sent, that of a Service.
    pub frontend: SocketAddr,
    /// Address that it must reach, on the loopback device.
    pub backend: SocketAddr,
}

/// Reason why a route cannot be walked, which says nothing about the hooks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// The backend's port is in use.
    #[error("the port of its listener is in use")]
    PortInUse,
    /// The machine has no such loopback address.
    #[error("the loopback device has no address")]
    NoAddress,
    /// Sockets cannot be opened.
    #[error("no socket can be opened: {0}")]
    NoSocket(Errno),
}

/// Failed walk of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WalkError {
    /// The route could not be walked.
    Obstacle(Obstacle),
    /// The call of a hook has not had its effect.
    Hook {
        /// The hooks that may be the cause.
        hooks: &'static str,
        /// The symptom.
        symptom: String,
    },
}

/// A port of this loopback address that is free for both protocols.
///
/// # Errors
/// There is none, or no such address.
pub fn free_port(address: IpAddr) -> Result<u16, Obstacle> {
    // Another process may take the number for the other protocol.
    for _ in 0..8 {
        let tcp = bound(SocketType::STREAM, SocketAddr::new(address, 0))?;
        let port = name(getsockname(&tcp)).map_err(Obstacle::NoSocket)?.port();
        match bound(SocketType::DGRAM, SocketAddr::new(address, port)) {
            Ok(_) => return Ok(port),
            Err(Obstacle::PortInUse) => {}
            Err(obstacle) => return Err(obstacle),
        }
    }
    Err(Obstacle::PortInUse)
}

/// Walks a route. Blocks for a fraction of a millisecond, or up to half a second if a packet is lost.
///
/// # Errors
/// The route cannot be walked, or a hook has not had its effect.
pub fn walk(route: &Route, pins: &PinDir) -> Result<(), WalkError> {
    match route.protocol {
        Protocol::Tcp => walk_tcp(route, pins),
        Protocol::Udp => walk_udp(route),
    }
}

/// Calls an address that network policy denies, where it does for this process. No packet leaves the machine.
///
/// # Errors
/// The call is not denied.
pub fn walk_denied(pins: &PinDir) -> Result<(), WalkError> {
    let state = PolicyReader::new(PolicyPins::new(pins)).and_then(|reader| Some((reader.state().ok()?, reader)));
    let Some((state, reader)) = state else { return Ok(()) };
    let own_cgroups = ProcessCgroup::of(None).map(|own| own.ids).unwrap_or_default();
    let is_exempt = state.exempt_cgroups.iter().any(|id| own_cgroups.contains(id));
    if state.is_audited || is_exempt || netns_cookie().ok() != Some(state.netns_cookie) {
        return Ok(());
    }
    for words in DENIED_CANARIES {
        let (address, hooks) = (Address::from_words(words), if is_v4(words) { "connect4" } else { "connect6" });
        let port = DENIED_CANARY_PORT;
        let decision = reader.decide(&state, Direction::Egress, address, cproxy_policy::Protocol::Tcp, port);
        let to = SocketAddr::new(address.into(), port);
        let loopback = if to.is_ipv4() { IpAddr::from(Ipv4Addr::LOCALHOST) } else { Ipv6Addr::LOCALHOST.into() };
        // A policy that is being replaced is another walk's.
        let is_denied = decision.is_ok_and(|decision| !decision.is_allowed);
        let Some(client) = is_denied.then(|| bound(SocketType::STREAM, SocketAddr::new(loopback, 0))) else { continue };
        let Ok(client) = client else { continue };
        match connect(&client, &to) {
            Err(Errno::PERM) => {}
            // It may have changed meanwhile.
            _ if reader.state().ok().as_ref() != Some(&state) => {}
            other => {
                let found = other.map_or_else(|error| error.to_string(), |()| "it succeeds".to_owned());
                return Err(hook(hooks, format!("connect to {to}, which network policy denies: {found}")));
            }
        }
    }
    Ok(())
}

fn is_v4(words: [u32; 4]) -> bool {
    Address::from_words(words).family() == Family::V4
}

/// connect, getpeername and the release of the socket.
fn walk_tcp(route: &Route, pins: &PinDir) -> Result<(), WalkError> {
    let is_v4 = route.frontend.is_ipv4();
    let connects = if is_v4 { "connect4" } else { "connect6" };
    let listener = bound(SocketType::STREAM, route.backend).map_err(WalkError::Obstacle)?;
    listen(&listener, 1).map_err(obstacle)?;
    let client = bound(SocketType::STREAM, SocketAddr::new(route.backend.ip(), 0)).map_err(WalkError::Obstacle)?;
    // Closing sends a reset, and leaves no socket in TIME_WAIT.
    sockopt::set_socket_linger(&client, Some(Duration::ZERO)).map_err(obstacle)?;
    match connect(&client, &route.frontend) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        Err(error) => return Err(hook(connects, format!("connect to {}: {error}", route.frontend))),
    }
    let accepted = loop {
        match accept_with(&listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(accepted) => break accepted,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(error) => return Err(obstacle(error)),
        }
        if !is_readable(&listener) {
            let error = sockopt::socket_error(&client).ok().and_then(Result::err);
            let symptom = error.map_or_else(|| "no connection arrives".to_owned(), |error| error.to_string());
            return Err(hook(connects, format!("connect to {}: {symptom}", route.frontend)));
        }
    };
    // Another process may have connected to the listener; the canary is then walked another time.
    if peer(&accepted).map_err(obstacle)? != name(getsockname(&client)).map_err(obstacle)? {
        return Err(WalkError::Obstacle(Obstacle::PortInUse));
    }
    let shown = peer(&client);
    if shown != Ok(route.frontend) {
        let shown = shown.map_or_else(|error| error.to_string(), |address| address.to_string());
        let hooks = if is_v4 { "getpeername4" } else { "getpeername6" };
        return Err(hook(hooks, format!("a connection to {} shows the peer {shown}", route.frontend)));
    }
    let cookie = sockopt::socket_cookie(&client).map_err(obstacle)?;
    drop(client);
    let owners = SocketStates::open(pins).ok().and_then(|states| states.tcp_owners().ok());
    if owners.is_some_and(|owners| owners.iter().any(|place| place.owner == cookie)) {
        return Err(hook("sock_release", "the place of a closed connection is not freed".to_owned()));
    }
    Ok(())
}

/// sendmsg and recvmsg.
fn walk_udp(route: &Route) -> Result<(), WalkError> {
    let is_v4 = route.frontend.is_ipv4();
    let (sends, receives) = if is_v4 { ("sendmsg4", "recvmsg4") } else { ("sendmsg6", "recvmsg6") };
    let server = bound(SocketType::DGRAM, route.backend).map_err(WalkError::Obstacle)?;
    let client = bound(SocketType::DGRAM, SocketAddr::new(route.backend.ip(), 0)).map_err(WalkError::Obstacle)?;
    let own = name(getsockname(&client)).map_err(obstacle)?;
    if let Err(error) = sendto(&client, &[0], SendFlags::empty(), &route.frontend) {
        return Err(hook(sends, format!("sendto {}: {error}", route.frontend)));
    }
    if !receives_from(&server, own) {
        return Err(hook(sends, format!("sendto {}: no datagram arrives", route.frontend)));
    }
    sendto(&server, &[0], SendFlags::empty(), &own).map_err(obstacle)?;
    // Whatever arrives first is the answer: only the server knows the client's address.
    let mut byte = [0; 1];
    if !is_readable(&client) {
        return Err(hook(receives, format!("no answer of {} arrives", route.frontend)));
    }
    let (_, _, source) = recvfrom(&client, &mut byte[..], RecvFlags::empty()).map_err(obstacle)?;
    let source = source.and_then(|source| SocketAddr::try_from(source).ok());
    if source != Some(route.frontend) {
        let shown = source.map_or_else(|| "nobody".to_owned(), |address| address.to_string());
        return Err(hook(receives, format!("an answer of {} seems to come from {shown}", route.frontend)));
    }
    Ok(())
}

/// Whether a datagram from `expected` arrives; others may come from other processes.
fn receives_from(server: &OwnedFd, expected: SocketAddr) -> bool {
    let end = Instant::now() + PACKET_TIMEOUT;
    let mut byte = [0; 1];
    while Instant::now() < end && is_readable(server) {
        if let Ok((_, _, Some(source))) = recvfrom(server, &mut byte[..], RecvFlags::empty())
            && SocketAddr::try_from(source) == Ok(expected)
        {
            return true;
        }
    }
    false
}

/// A socket that is bound to an address of the loopback device.
fn bound(kind: SocketType, address: SocketAddr) -> Result<OwnedFd, Obstacle> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = match socket_with(family, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None) {
        Ok(socket) => socket,
        Err(Errno::AFNOSUPPORT) => return Err(Obstacle::NoAddress),
        Err(error) => return Err(Obstacle::NoSocket(error)),
    };
    // Before Linux 5.7 this takes CAP_NET_RAW. Without it, the loopback address alone keeps packets in the machine.
    bind_to_loopback(&socket).ok();
    // A listener of an earlier walk may have left connections in TIME_WAIT.
    sockopt::set_socket_reuseaddr(&socket, kind == SocketType::STREAM).map_err(Obstacle::NoSocket)?;
    match bind(&socket, &address) {
        Ok(()) => Ok(socket),
        Err(Errno::ADDRINUSE) => Err(Obstacle::PortInUse),
        Err(Errno::ADDRNOTAVAIL) => Err(Obstacle::NoAddress),
        Err(error) => Err(Obstacle::NoSocket(error)),
    }
}

fn bind_to_loopback(socket: &OwnedFd) -> io::Result<()> {
    let name = b"lo";
    // SAFETY: the name is live and as long as the length says.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_BINDTODEVICE,
            name.as_ptr().cast(),
            name.len() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Waits until a packet has arrived. A signal ends the wait early, and so does an error.
fn is_readable(socket: &OwnedFd) -> bool {
    let timeout = Timespec::try_from(PACKET_TIMEOUT).ok();
    let mut wanted = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut wanted, timeout.as_ref())).is_ok_and(|ready| ready != 0)
}

fn name(address: rustix::io::Result<rustix::net::SocketAddrAny>) -> rustix::io::Result<SocketAddr> {
    address.and_then(SocketAddr::try_from)
}

fn peer(socket: &OwnedFd) -> rustix::io::Result<SocketAddr> {
    getpeername(socket)?.ok_or(Errno::AFNOSUPPORT).and_then(SocketAddr::try_from)
}

fn hook(hooks: &'static str, symptom: String) -> WalkError {
    WalkError::Hook { hooks, symptom }
}

fn obstacle(error: Errno) -> WalkError {
    WalkError::Obstacle(Obstacle::NoSocket(error))
}
