//! `recvfrom()`, `recvmsg()`, `recvmmsg()` on UDP sockets: show the VIP as the source of a backend's datagram. The
//! kernel runs the programs only if the caller asks for the source, and after it has taken the datagram from the queue.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};

use cproxy_ebpf::{PROTOCOL_UDP, observation::Call};

use crate::{
    flows, observe,
    peer::{self, backend_is},
    sock_addr::{ALLOW, Family, V4, V6, read_endpoint, rewrite},
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
    let source = read_endpoint::<F>(ctx);
    let flows = flows::udp_state(ctx);
    if let Some(state) = &flows
        && let Some(flow) = flows::find_by_backend(state, &source)
    {
        observe::reversed(ctx, Call::Receive, PROTOCOL_UDP, &source, &flow.vip, flow.vip_port);
        return rewrite::<F>(ctx, &flow.vip, flow.vip_port);
    }
    if let Some(state) = peer::socket_state(ctx)
        && backend_is(&state.peer, &source)
    {
        observe::reversed(ctx, Call::Receive, PROTOCOL_UDP, &source, &state.peer.vip, state.peer.vip_port);
        return rewrite::<F>(ctx, &state.peer.vip, state.peer.vip_port);
    }
    match flows.and_then(|state| flows::find_overflow_vip(ctx, state, &source)) {
        Some(vip) => {
            observe::reversed(ctx, Call::Receive, PROTOCOL_UDP, &source, &vip.address, vip.port);
            rewrite::<F>(ctx, &vip.address, vip.port)
        }
        None => ALLOW,
    }
}
