//! `getpeername()`: shows the VIP that the application has connected to.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use cproxy_ebpf::{PROTOCOL_TCP, PROTOCOL_UDP, Translation, observation::Call};

use crate::{
    endpoint::Endpoint,
    flows, observe,
    peer::{self, backend_is},
    sock_addr::{ALLOW, Family, V4, V6, protocol, read_endpoint, rewrite},
    tcp,
};

#[cgroup_sock_addr(getpeername4)]
fn cproxy_peer4(ctx: SockAddrContext) -> i32 {
    peer_name::<V4>(&ctx)
}

#[cgroup_sock_addr(getpeername6)]
fn cproxy_peer6(ctx: SockAddrContext) -> i32 {
    peer_name::<V6>(&ctx)
}

/// Shows the stored VIP only if the stored backend is the kernel's peer. If it is not, the last `connect()` of a UDP
/// socket has failed, and the peer before it is among the flows.
#[inline(always)]
fn peer_name<F: Family>(ctx: &SockAddrContext) -> i32 {
    let peer = read_endpoint::<F>(ctx);
    if protocol(ctx) == Some(PROTOCOL_TCP) {
        return tcp::peer(ctx).map_or(ALLOW, |known| show_vip::<F>(ctx, known, &peer));
    }
    let Some(state) = peer::socket_state(ctx) else { return ALLOW };
    if backend_is(&state.peer, &peer) {
        observe::reversed(ctx, Call::PeerName, PROTOCOL_UDP, &peer, &state.peer.vip, state.peer.vip_port);
        return rewrite::<F>(ctx, &state.peer.vip, state.peer.vip_port);
    }
    let Some(state) = flows::udp_state(ctx) else { return ALLOW };
    let Some(flow) = flows::find_by_backend(state, &peer) else { return ALLOW };
    observe::reversed(ctx, Call::PeerName, PROTOCOL_UDP, &peer, &flow.vip, flow.vip_port);
    rewrite::<F>(ctx, &flow.vip, flow.vip_port)
}

#[inline(always)]
fn show_vip<F: Family>(ctx: &SockAddrContext, known: &Translation, peer: &Endpoint) -> i32 {
    if !backend_is(known, peer) {
        return ALLOW;
    }
    observe::reversed(ctx, Call::PeerName, PROTOCOL_TCP, peer, &known.vip, known.vip_port);
    rewrite::<F>(ctx, &known.vip, known.vip_port)
}
