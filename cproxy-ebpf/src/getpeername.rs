//! `getpeername()`: the VIP that the application connected to.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use cproxy_ebpf::{PROTOCOL_TCP, Translation};

use crate::{
    endpoint::Endpoint,
    flows,
    peer::{self, leads_to},
    sock_addr::{ALLOW, Family, V4, V6, endpoint, protocol, rewrite},
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

/// The state is believed only where it matches what the kernel has. Where it does not, the last `connect()` of a UDP
/// socket has failed, and the one before it is among the flows.
#[inline(always)]
fn peer_name<F: Family>(ctx: &SockAddrContext) -> i32 {
    let peer = endpoint::<F>(ctx);
    if protocol(ctx) == Some(PROTOCOL_TCP) {
        return tcp::peer(ctx).map_or(ALLOW, |known| show::<F>(ctx, known, &peer));
    }
    let Some(state) = peer::state(ctx) else { return ALLOW };
    if leads_to(&state.peer, &peer) {
        return rewrite::<F>(ctx, &state.peer.vip, state.peer.vip_port);
    }
    let Some(state) = flows::state(ctx) else { return ALLOW };
    let Some(flow) = flows::from(state, &peer) else { return ALLOW };
    rewrite::<F>(ctx, &flow.vip, flow.vip_port)
}

#[inline(always)]
fn show<F: Family>(ctx: &SockAddrContext, known: &Translation, peer: &Endpoint) -> i32 {
    if leads_to(known, peer) { rewrite::<F>(ctx, &known.vip, known.vip_port) } else { ALLOW }
}
