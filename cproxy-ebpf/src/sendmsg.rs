//! `sendto()`, `sendmsg()`, `sendmmsg()` on UDP sockets: each datagram's destination is rewritten, and one socket keeps
//! its backend for each VIP as long as that backend serves.
//!
//! To an IPv4-mapped address an AF_INET6 socket sends through sendmsg4 (`udpv6_sendmsg` hands over to `udp_sendmsg`), also
//! when it is connected and names no address: the hook then sees the backend's. A connected socket that sends with control
//! data runs the hook with address and port 0.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use cproxy_ebpf::{Counter, PROTOCOL_UDP, Translation};

use crate::{
    endpoint::Endpoint,
    flows,
    lookup::{Service, cproxy_flow_serves, look_up, may_be_service},
    maps::{backend, count},
    peer::{self, is_for, is_untranslated},
    search::NOWHERE,
    sock_addr::{ALLOW, Family, V4, V6, endpoint, is_current_peer, protocol, rewrite},
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
    let mut service = Service::NONE;
    if may_be_service(&destination) {
        if let Some(state) = flows::state(ctx)
            && let Some((index, flow)) = flows::to(state, &destination)
        {
            if cproxy_flow_serves(flow, &destination) != 0 {
                rewrite::<F>(ctx, &flow.translation.backend, flow.translation.backend_port);
                flows::touch(state, index);
                return ALLOW;
            }
            flows::retire(state, index);
        }
        service = look_up(&destination, PROTOCOL_UDP);
    }
    if service.is_none() {
        return to_other(ctx, &destination);
    }
    if let Some(state) = peer::state(ctx) {
        if is_untranslated(state) {
            return ALLOW;
        }
        if is_for(&state.peer, &destination) && service.still_has(&mut state.peer) {
            if let Some(flows) = flows::state(ctx) {
                flows::shadow(flows, &Endpoint::new(&state.peer.backend, state.peer.backend_port));
            }
            return rewrite::<F>(ctx, &state.peer.backend, state.peer.backend_port);
        }
    }
    if service.is_empty() {
        return service.deny();
    }
    to_service::<F>(ctx, &destination, &service)
}

/// No Service. Replies of this address, if it is also a backend of the socket's, are now to show the address itself.
#[inline(always)]
fn to_other(ctx: &SockAddrContext, destination: &Endpoint) -> i32 {
    if let Some(state) = peer::state(ctx) {
        peer::cproxy_sent_directly(&mut state.peer, destination);
    }
    if let Some(state) = flows::state(ctx) {
        flows::shadow(state, destination);
        flows::forget_overflowed(ctx, state, destination);
    }
    ALLOW
}

#[inline(always)]
fn to_service<F: Family>(ctx: &SockAddrContext, vip: &Endpoint, service: &Service) -> i32 {
    // Without memory for the flow its answers would show the backend, and an application that waits for the VIP's would wait in vain.
    let Some(state) = flows::state_or_new(ctx) else {
        count(Counter::StateLost);
        return service.deny();
    };
    let known = flows::overflowed_to(ctx, state, vip, service);
    let slot = if known == NOWHERE { service.choose_beside(ctx, state) } else { known };
    let Some(backend) = backend(slot) else { return service.deny() };
    if known == NOWHERE {
        let (vip_port, backend_port) = (vip.port, backend.port);
        let flow = Translation { vip: vip.address, backend: backend.address, vip_port, backend_port, slot };
        flows::remember(ctx, state, &flow, service);
        count(Counter::Forwarded);
    }
    rewrite::<F>(ctx, &backend.address, backend.port)
}
