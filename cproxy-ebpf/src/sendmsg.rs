//! `sendto()`, `sendmsg()`, `sendmmsg()` on UDP sockets: each datagram's destination is rewritten, and one socket keeps
//! its backend for each VIP as long as that backend serves.
//!
//! To an IPv4-mapped address an AF_INET6 socket sends through sendmsg4 (`udpv6_sendmsg` hands over to `udp_sendmsg`), also
//! when it is connected and names no address: the hook then sees the backend's. A connected socket that sends with control
//! data runs the hook with address and port 0.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use cproxy_ebpf::{Counter, PROTOCOL_UDP};

use crate::{
    flows,
    maps::count,
    peer::{self, Relation, is_untranslated},
    sock_addr::{ALLOW, Endpoint, Family, V4, V6, endpoint, is_current_peer, protocol, rewrite},
    table::{Service, backend, look_up},
};

#[cgroup_sock_addr(sendmsg4)]
fn cproxy_send4(ctx: SockAddrContext) -> i32 {
    send::<V4>(&ctx)
}

#[cgroup_sock_addr(sendmsg6)]
fn cproxy_send6(ctx: SockAddrContext) -> i32 {
    send::<V6>(&ctx)
}

#[inline(always)]
fn send<F: Family>(ctx: &SockAddrContext) -> i32 {
    let destination = endpoint::<F>(ctx);
    if destination.port == 0 || protocol(ctx) != Some(PROTOCOL_UDP) {
        return ALLOW;
    }
    if is_current_peer::<F>(ctx, &destination) {
        return ALLOW;
    }
    let service = look_up(&destination, PROTOCOL_UDP);
    if let Some(state) = peer::state(ctx) {
        if is_untranslated(state) {
            return ALLOW;
        }
        let relation = Relation::of(&state.peer, &destination);
        if service.is_none() && relation.is_backend() {
            peer::set_untranslated(&mut state.peer, &destination);
        }
        if !service.is_none() && relation.is_vip() && service.still_has(&mut state.peer) {
            return rewrite::<F>(ctx, &state.peer.backend, state.peer.backend_port);
        }
    }
    if service.is_none() {
        return to_other(ctx, &destination);
    }
    if service.is_empty() {
        return service.deny();
    }
    to_service::<F>(ctx, &destination, &service)
}

/// No Service. Replies of this address, if it is also a backend of the socket's, are now to show the address itself.
#[inline(always)]
fn to_other(ctx: &SockAddrContext, destination: &Endpoint) -> i32 {
    if let Some(state) = flows::state(ctx) {
        flows::shadow(state, destination);
    }
    ALLOW
}

#[inline(always)]
fn to_service<F: Family>(ctx: &SockAddrContext, vip: &Endpoint, service: &Service) -> i32 {
    let Some(state) = flows::state_or_new(ctx) else {
        count(Counter::StateLost);
        let Some(backend) = backend(service.any()) else { return service.deny() };
        return rewrite::<F>(ctx, &backend.address, backend.port);
    };
    if let Some(index) = flows::to(state, vip) {
        // SAFETY: the index is in range.
        let flow = unsafe { state.flows.get_unchecked_mut(index) };
        if service.still_has(flow) {
            rewrite::<F>(ctx, &flow.backend, flow.backend_port);
            flows::touch(state, index);
            return ALLOW;
        }
        flows::retire(state, index);
    }
    let mut flow = peer::untranslated(vip);
    if flows::overflowed_to(ctx, state, vip, service, &mut flow) {
        return rewrite::<F>(ctx, &flow.backend, flow.backend_port);
    }
    let slot = if service.has_affinity() { service.choose(ctx) } else { service.choose_beside(state) };
    let Some(backend) = backend(slot) else { return service.deny() };
    peer::set_translated(&mut flow, vip, &backend.address, backend.port, slot);
    flows::remember(ctx, state, &flow);
    count(Counter::Forwarded);
    rewrite::<F>(ctx, &flow.backend, flow.backend_port)
}
