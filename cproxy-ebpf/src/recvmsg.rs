//! `recvfrom()`, `recvmsg()`, `recvmmsg()` on UDP sockets: a datagram of a backend shows the VIP that the socket has sent
//! to. The hook runs only where the caller wants the source, and only after the datagram has been taken from the queue.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};

use crate::{
    flows,
    peer::{self, leads_to},
    sock_addr::{ALLOW, Family, V4, V6, endpoint, rewrite},
};

#[cgroup_sock_addr(recvmsg4)]
fn cproxy_recv4(ctx: SockAddrContext) -> i32 {
    receive::<V4>(&ctx)
}

#[cgroup_sock_addr(recvmsg6)]
fn cproxy_recv6(ctx: SockAddrContext) -> i32 {
    receive::<V6>(&ctx)
}

#[inline(always)]
fn receive<F: Family>(ctx: &SockAddrContext) -> i32 {
    let source = endpoint::<F>(ctx);
    let flows = flows::state(ctx);
    if let Some(state) = &flows
        && let Some(flow) = flows::from(state, &source)
    {
        return rewrite::<F>(ctx, &flow.vip, flow.vip_port);
    }
    if let Some(state) = peer::state(ctx)
        && leads_to(&state.peer, &source)
    {
        return rewrite::<F>(ctx, &state.peer.vip, state.peer.vip_port);
    }
    match flows.and_then(|state| flows::overflowed_from(ctx, state, &source)) {
        Some(vip) => rewrite::<F>(ctx, &vip.address, vip.port),
        None => ALLOW,
    }
}
