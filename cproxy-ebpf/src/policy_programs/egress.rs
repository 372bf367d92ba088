//! `connect()` and `sendmsg()`: verdicts about the destination that the programs before have left.
//!
//! A denied call fails with EPERM, as connect(2) has it for a local firewall's rule. The `connect()` of a datagram
//! socket, which sends nothing, goes to an address of the VM at which nobody listens, as for a Service without
//! endpoints: the datagrams are refused.

use core::ptr::addr_of;

use aya_ebpf::{EbpfContext, helpers::generated::bpf_get_retval, macros::cgroup_sock_addr, programs::SockAddrContext};
use cproxy_ebpf::{
    PROTOCOL_UDP,
    observation::Call,
    policy::{DENIED_CANARIES, DENIED_CANARY_PORT, EGRESS, POLICY_REFUSED_SLOT, ReplyKey, StateWord},
};

use crate::{
    decision::{Question, decide},
    denials,
    endpoint::Endpoint,
    events,
    exemption::is_policed,
    maps::state,
    own_address::own_address,
    peer::{self, backend_is},
    replies,
    sock_addr::{ALLOW, DENY, Family, V4, V6, is_current_peer, own_port, protocol, read_endpoint, rewrite},
};

/// 1 if this kernel has `bpf_get_retval` for these hooks (Linux 5.18). The agent sets it before it loads the programs.
#[unsafe(no_mangle)]
static ERRNO_HELPER: u8 = 1;

#[cgroup_sock_addr(connect4)]
fn cproxy_policy_c4(ctx: SockAddrContext) -> i32 {
    connect::<V4>(&ctx)
}

#[cgroup_sock_addr(connect6)]
fn cproxy_policy_c6(ctx: SockAddrContext) -> i32 {
    connect::<V6>(&ctx)
}

#[cgroup_sock_addr(sendmsg4)]
fn cproxy_policy_s4(ctx: SockAddrContext) -> i32 {
    send::<V4>(&ctx)
}

#[cgroup_sock_addr(sendmsg6)]
fn cproxy_policy_s6(ctx: SockAddrContext) -> i32 {
    send::<V6>(&ctx)
}

#[inline(always)]
fn connect<F: Family>(ctx: &SockAddrContext) -> i32 {
    let state = state();
    if !state.egress() {
        return ALLOW;
    }
    let Some(protocol) = protocol(ctx) else { return ALLOW };
    let destination = read_endpoint::<F>(ctx);
    if is_allowed(ctx, state, &destination, protocol, Call::Connect, None) {
        return ALLOW;
    }
    if protocol == PROTOCOL_UDP { connect_to_nobody::<F>(ctx, &destination) } else { DENY }
}

#[inline(always)]
fn send<F: Family>(ctx: &SockAddrContext) -> i32 {
    let state = state();
    let destination = read_endpoint::<F>(ctx);
    // With control data, a connected socket names no address.
    if destination.port == 0 || protocol(ctx) != Some(PROTOCOL_UDP) || is_current_peer::<F>(ctx, &destination) {
        return ALLOW;
    }
    let key = ReplyKey { peer: destination.address, peer_port: destination.port, own_port: own_port(ctx) };
    if state.egress() && !is_allowed(ctx, state, &destination, PROTOCOL_UDP, Call::Send, Some(&key)) {
        return DENY;
    }
    if state.ingress() {
        let question = Question {
            peer: destination.address,
            port: u16::from_be(key.own_port),
            protocol: PROTOCOL_UDP,
            direction: 0,
        };
        if !decide(state, &question).allows() {
            replies::record(&key);
        }
    }
    ALLOW
}

/// True if the call may go on.
#[inline(always)]
fn is_allowed(
    ctx: &SockAddrContext,
    state: StateWord,
    destination: &Endpoint,
    protocol: u8,
    call: Call,
    reply: Option<&ReplyKey>,
) -> bool {
    let question =
        Question { peer: destination.address, port: u16::from_be(destination.port), protocol, direction: EGRESS };
    let decision = decide(state, &question);
    if decision.allows() || reply.is_some_and(replies::may_reply) {
        return true;
    }
    // The rest costs denied calls alone.
    if peer::is_agents_socket(ctx) || !is_policed(ctx.as_ptr()) || is_refused_already() {
        return true;
    }
    if is_canary(destination) {
        return state.audit();
    }
    let is_denied = denials::record(state, &question, decision);
    events::call(ctx, &question, decision, call, !is_denied);
    !is_denied
}

/// True for the agent's own test of a denial.
#[inline(always)]
fn is_canary(destination: &Endpoint) -> bool {
    destination.port == DENIED_CANARY_PORT.to_be() && DENIED_CANARIES.contains(&destination.address)
}

/// True if a program before has refused the call: it fails anyway.
#[inline(always)]
fn is_refused_already() -> bool {
    // SAFETY: a helper without arguments.
    knows_process() && unsafe { bpf_get_retval() != 0 }
}

/// True if the hooks have the helpers for process and command, which came with that for the error's number.
#[inline(always)]
pub(crate) fn knows_process() -> bool {
    // SAFETY: a static; volatile, because the agent changes it in the object file.
    unsafe { addr_of!(ERRNO_HELPER).read_volatile() != 0 }
}

/// Connects a datagram socket to an address at which nobody listens. Without one the call fails.
#[inline(always)]
fn connect_to_nobody<F: Family>(ctx: &SockAddrContext, destination: &Endpoint) -> i32 {
    let Some(own) = own_address(destination) else { return DENY };
    let Some(socket) = peer::socket_state_or_new(ctx) else { return DENY };
    let peer = &mut socket.peer;
    let mut shown = Endpoint::new(&destination.address, destination.port);
    if backend_is(peer, destination) {
        for word in 0..4 {
            shown.address[word] = peer.vip[word];
        }
        shown.port = peer.vip_port;
    }
    peer::record_translated(peer, &shown, &own.address, own.port, POLICY_REFUSED_SLOT);
    rewrite::<F>(ctx, &own.address, own.port)
}
