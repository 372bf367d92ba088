//! `sendto()`, `sendmsg()`, `sendmmsg()` on UDP sockets: rewrite the destination of each datagram. A socket keeps its
//! backend for a VIP as long as that backend serves.
//!
//! An AF_INET6 socket that sends to an IPv4-mapped address runs sendmsg4 (`udpv6_sendmsg` calls `udp_sendmsg`). It does
//! so even when it is connected and names no address; the program then sees the backend's. A connected socket that
//! sends with control data runs the program with address and port 0.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use cproxy_ebpf::{
    Counter, PROTOCOL_UDP, Translation,
    observation::{Call, Reason},
};

use crate::{
    endpoint::Endpoint,
    exclude::is_in_own_netns,
    flows,
    lookup::{FoundSet, SERVES_OWN_NETNS, cproxy_flow_serves, look_up_unfiltered, passes_filter},
    maps::{backend, count, count_forwarded},
    observe,
    peer::{self, is_agents, vip_is},
    search::NO_SLOT,
    sock_addr::{ALLOW, Family, V4, V6, is_current_peer, protocol, read_endpoint, rewrite},
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
    let destination = read_endpoint::<F>(ctx);
    if destination.port == 0 || protocol(ctx) != Some(PROTOCOL_UDP) {
        return ALLOW;
    }
    if is_current_peer::<F>(ctx, &destination) {
        return ALLOW;
    }
    let mut set = FoundSet::NONE;
    if passes_filter(&destination) {
        if let Some(state) = flows::udp_state(ctx)
            && let Some((index, flow)) = flows::find_by_vip(state, &destination)
        {
            let serves = cproxy_flow_serves(flow, &destination);
            if serves == 1 || serves == SERVES_OWN_NETNS && is_in_own_netns(ctx) {
                rewrite::<F>(ctx, &flow.translation.backend, flow.translation.backend_port);
                flows::record_use(state, index);
                return ALLOW;
            }
            flows::retire(state, index);
        }
        set = look_up_unfiltered(ctx, &destination, PROTOCOL_UDP);
    }
    if set.is_none() {
        observe::direct(ctx, Call::Send, PROTOCOL_UDP, &destination, set.id);
        return send_directly(ctx, &destination);
    }
    if let Some(state) = peer::socket_state(ctx) {
        if is_agents(state) {
            return ALLOW;
        }
        if vip_is(&state.peer, &destination) && set.confirm_backend(&mut state.peer) {
            if let Some(flows) = flows::udp_state(ctx) {
                flows::unclaim_backend(flows, &Endpoint::new(&state.peer.backend, state.peer.backend_port));
            }
            return rewrite::<F>(ctx, &state.peer.backend, state.peer.backend_port);
        }
    }
    if set.is_empty() {
        observe::denied(ctx, Call::Send, PROTOCOL_UDP, &destination, &set, Reason::None);
        return set.deny();
    }
    send_to_service::<F>(ctx, &destination, &set)
}

/// Sends to an address that is not a Service's. If it is also a backend of the socket, replies show the address itself
/// from now on.
#[inline(always)]
fn send_directly(ctx: &SockAddrContext, destination: &Endpoint) -> i32 {
    if let Some(state) = peer::socket_state(ctx) {
        peer::cproxy_record_direct_send(&mut state.peer, destination);
    }
    if let Some(state) = flows::udp_state(ctx) {
        flows::unclaim_backend(state, destination);
        flows::unclaim_overflow_backend(ctx, state, destination);
    }
    ALLOW
}

/// Sends to a backend: the one that `UDP_FLOWS` has for this VIP, else a new one.
#[inline(always)]
fn send_to_service<F: Family>(ctx: &SockAddrContext, vip: &Endpoint, set: &FoundSet) -> i32 {
    // Without memory for a flow, replies would show the backend, and an application that waits for replies of the VIP
    // would hang. A refusal is better.
    let Some(state) = flows::udp_state_or_new(ctx) else {
        count(Counter::StateLost);
        observe::denied(ctx, Call::Send, PROTOCOL_UDP, vip, set, Reason::NoMemory);
        return set.deny();
    };
    let known = flows::find_overflow_slot(ctx, state, vip, set);
    let slot = if known == NO_SLOT { set.choose_slot_apart_from(ctx, state) } else { known };
    let Some(backend) = backend(slot) else {
        observe::denied(ctx, Call::Send, PROTOCOL_UDP, vip, set, Reason::TableReplaced);
        return set.deny();
    };
    if known == NO_SLOT {
        let (vip_port, backend_port) = (vip.port, backend.port);
        let flow = Translation { vip: vip.address, backend: backend.address, vip_port, backend_port, slot };
        flows::insert(ctx, state, &flow, set);
        count_forwarded(backend);
        observe::translated(ctx, Call::Send, PROTOCOL_UDP, vip, backend, set);
    }
    rewrite::<F>(ctx, &backend.address, backend.port)
}
