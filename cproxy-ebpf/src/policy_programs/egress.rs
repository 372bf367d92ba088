//! `connect()` and `sendmsg()`: verdicts about the destination that the programs before have left.
//!
//! A denied call fails with EPERM, as connect(2) has it for a local firewall's rule. The `connect()` of a datagram
//! socket, which sends nothing, goes to an address of the VM at which nobody listens, as for a Service without
//! endpoints: the datagrams are refused.

use core::ptr::addr_of;

use aya_ebpf::{EbpfContext, helpers::generated::bpf_get_retval, macros::cgroup_sock_addr, programs::SockAddrContext};
use cproxy_ebpf::{
    PROTOCOL_UDP, V4_MAPPED_WORD,
    observation::Call,
    policy::{DENIED_CANARIES, DENIED_CANARY_PORT, EGRESS, POLICY_REFUSED_SLOT, ReplyKey, StateWord},
};

use crate::{
    decision::{INGRESS, Question, decide},
    denials,
    endpoint::Endpoint,
    events,
    exemption::is_policed,
    maps::state,
    own_address::own_address,
    peer::{self, backend_is},
    replies,
    sock_addr::{ALLOW, DENY, Family, V4, V6, is_current_peer, own_port, protocol, read_endpoint, rewrite},
    subprogram::opaque,
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
    if passage(ctx, state, &destination, protocol, Call::Connect, None) != Passage::Denied {
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
    if state.egress() {
        match passage(ctx, state, &destination, PROTOCOL_UDP, Call::Send, Some(&key)) {
            Passage::Allowed => {}
            Passage::Reply => return ALLOW,
            Passage::Denied => return DENY,
        }
    }
    if state.ingress() {
        let question = Question {
            peer: destination.address,
            port: u16::from_be(key.own_port),
            protocol: PROTOCOL_UDP,
            direction: INGRESS,
        };
        if !decide(state, &question).allows() {
            replies::record(&key, EGRESS);
        }
    }
    ALLOW
}

/// Whether a call may go on.
#[derive(PartialEq)]
enum Passage {
    Allowed,
    /// As the answer to a datagram.
    Reply,
    Denied,
}

#[inline(always)]
fn passage(
    ctx: &SockAddrContext,
    state: StateWord,
    destination: &Endpoint,
    protocol: u8,
    call: Call,
    reply: Option<&ReplyKey>,
) -> Passage {
    let question = Question {
        peer: or_loopback(&destination.address),
        port: u16::from_be(destination.port),
        protocol,
        direction: EGRESS,
    };
    let decision = decide(state, &question);
    if decision.allows() {
        return Passage::Allowed;
    }
    if reply.is_some_and(|reply| replies::may_reply(reply, EGRESS)) {
        return Passage::Reply;
    }
    // The rest costs denied calls alone.
    if peer::is_agents_socket(ctx) || !is_policed(ctx.as_ptr()) || is_refused_already() {
        return Passage::Allowed;
    }
    if is_canary(destination) {
        return if state.audit() { Passage::Allowed } else { Passage::Denied };
    }
    let is_denied = denials::record(state, &question, decision);
    events::call(ctx, &question, decision, call, !is_denied);
    if is_denied { Passage::Denied } else { Passage::Allowed }
}

/// The address, or that of the loopback device for the one that stands for it (`0.0.0.0`, `::`).
#[inline(always)]
fn or_loopback(address: &[u32; 4]) -> [u32; 4] {
    let [a, b, c, d] = *address;
    let is_any = opaque((a | b | c & !V4_MAPPED_WORD | d) as u64) == 0;
    let last = if c == 0 { 1u32.to_be() } else { u32::from_ne_bytes([127, 0, 0, 1]) };
    if is_any { [a, b, c, last] } else { *address }
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
