//! `connect()`: the destination is rewritten before the kernel looks up a route, so no packet ever carries the VIP.
//!
//! An AF_INET6 socket that connects to an IPv4-mapped address runs connect6, not connect4 (`tcp_v6_pre_connect` and
//! `udpv6_pre_connect` in net/ipv6); both hooks use the one 16-byte address form, so they find the same frontend. So does
//! MSG_FASTOPEN, by which `sendto()` connects (`__inet_stream_connect` in net/ipv4/af_inet.c).

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use cproxy_ebpf::{Backend, Counter, PROTOCOL_UDP, Translation};

use crate::{
    endpoint::Endpoint,
    flows,
    lookup::{Service, look_up_if_service},
    maps::{backend, count},
    peer::{self, is_translated, is_untranslated},
    sock_addr::{ALLOW, Family, V4, V6, endpoint, protocol, rewrite},
    tcp,
};

#[cgroup_sock_addr(connect4)]
fn cproxy_connect4(ctx: SockAddrContext) -> i32 {
    connect::<V4>(&ctx)
}

#[cgroup_sock_addr(connect6)]
fn cproxy_connect6(ctx: SockAddrContext) -> i32 {
    connect::<V6>(&ctx)
}

#[inline(always)]
fn connect<F: Family>(ctx: &SockAddrContext) -> i32 {
    let Some(protocol) = protocol(ctx) else { return ALLOW };
    let destination = endpoint::<F>(ctx);
    let service = look_up_if_service(&destination, protocol);
    if service.is_none() {
        return to_other(ctx, &destination, protocol);
    }
    if is_agent(ctx) {
        return ALLOW;
    }
    if service.is_empty() {
        return service.deny();
    }
    to_service::<F>(ctx, &destination, protocol, &service)
}

#[inline(always)]
fn is_agent(ctx: &SockAddrContext) -> bool {
    peer::state(ctx).is_some_and(|state| is_untranslated(state))
}

/// Connect to an address that is no Service. A translation of an earlier connect must not be taken for the present peer.
#[inline(always)]
fn to_other(ctx: &SockAddrContext, destination: &Endpoint, protocol: u8) -> i32 {
    if protocol != PROTOCOL_UDP {
        if let Some(peer) = tcp::peer(ctx) {
            peer::set_untranslated(peer, destination);
        }
        return ALLOW;
    }
    match peer::state(ctx) {
        Some(state) if is_untranslated(state) => return ALLOW,
        Some(state) => {
            keep(ctx, &state.peer);
            peer::set_untranslated(&mut state.peer, destination);
        }
        // The socket has only ever been sent from; replies of an address that it has flows to are to show that address.
        None if flows::state(ctx).is_some() => {
            if let Some(state) = peer::state_or_new(ctx) {
                peer::set_untranslated(&mut state.peer, destination);
            }
        }
        None => return ALLOW,
    }
    if let Some(flows) = flows::state(ctx) {
        flows::shadow(flows, destination);
    }
    ALLOW
}

/// Every connect is a choice of its own.
#[inline(always)]
fn to_service<F: Family>(ctx: &SockAddrContext, vip: &Endpoint, protocol: u8, service: &Service) -> i32 {
    let slot = service.choose(ctx);
    let Some(backend) = backend(slot) else { return service.deny() };
    let peer = if protocol == PROTOCOL_UDP { new_udp_peer(ctx, vip, backend) } else { tcp::new_peer(ctx) };
    match peer {
        Some(peer) => peer::set_translated(peer, vip, &backend.address, backend.port, slot),
        None => count(Counter::StateLost),
    }
    count(Counter::Forwarded);
    rewrite::<F>(ctx, &backend.address, backend.port)
}

/// Storage for a UDP socket's new peer. The old translation becomes a flow: replies under way still show the VIP.
#[inline(always)]
fn new_udp_peer<'s>(ctx: &'s SockAddrContext, vip: &Endpoint, backend: &Backend) -> Option<&'s mut Translation> {
    let state = peer::state_or_new(ctx)?;
    keep(ctx, &state.peer);
    // The kernel takes only what comes from the new peer: what the socket sends to the VIP goes there, and what comes from
    // there belongs to no other VIP.
    if let Some(flows) = flows::state(ctx) {
        flows::retire_to(flows, vip);
        flows::shadow(flows, &Endpoint::new(&backend.address, backend.port));
    }
    Some(&mut state.peer)
}

/// The UDP socket was connected through us before: replies that are under way still show the VIP, and so does the peer
/// if this connect fails and the socket stays as it is.
#[inline(always)]
fn keep(ctx: &SockAddrContext, peer: &Translation) {
    if is_translated(peer)
        && let Some(flows) = flows::state_or_new(ctx)
    {
        flows::remember_past(flows, peer);
    }
}
