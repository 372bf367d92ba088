//! `sk_lookup`: what comes in and belongs to no connection. A denied SYN is answered with RST, a denied datagram with
//! port unreachable. Where egress alone is isolated, it records datagrams, whose replies pass.

use core::ptr::addr_of;

use aya_ebpf::{
    bindings::{bpf_sk_lookup, sk_action},
    macros::sk_lookup,
    programs::SkLookupContext,
};
use cproxy_ebpf::{
    PROTOCOL_TCP, PROTOCOL_UDP,
    policy::{EGRESS, ReplyKey},
    v4_mapped,
};

use crate::{
    decision::{Decision, Question, decide},
    denials, events,
    maps::state,
    replies,
};

const AF_INET: u32 = 2;

const PASS: u32 = sk_action::SK_PASS;
const DROP: u32 = sk_action::SK_DROP;

#[sk_lookup]
fn cproxy_policy_in(ctx: SkLookupContext) -> u32 {
    ingress(ctx.lookup)
}

#[inline(always)]
fn ingress(lookup: *mut bpf_sk_lookup) -> u32 {
    let state = state();
    // All fields are read at first: the verifier wants each read from the context itself.
    // SAFETY: the verifier checks every access to the context.
    let (family, protocol, port, peer_port, v4) = unsafe {
        (
            addr_of!((*lookup).family).read_volatile(),
            addr_of!((*lookup).protocol).read_volatile() as u8,
            addr_of!((*lookup).local_port).read_volatile() as u16,
            addr_of!((*lookup).remote_port).read_volatile(),
            addr_of!((*lookup).remote_ip4).read_volatile(),
        )
    };
    let mut v6 = [0; 4];
    for (word, value) in v6.iter_mut().enumerate() {
        // SAFETY: as above; the words are zero for IPv4.
        *value = unsafe { addr_of!((*lookup).remote_ip6[word]).read_volatile() };
    }
    if protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP {
        return PASS;
    }
    let peer = if family == AF_INET { v4_mapped(v4) } else { v6 };
    let key = ReplyKey { peer, peer_port, own_port: port.to_be() };
    let question = Question { peer, port, protocol, direction: 0 };
    let decision = if state.ingress() { decide(state, &question) } else { Decision::ALLOWED };
    if decision.allows() {
        if protocol == PROTOCOL_UDP && state.egress() {
            let back = Question { peer, port: u16::from_be(peer_port), protocol, direction: EGRESS };
            if !decide(state, &back).allows() {
                replies::record(&key);
            }
        }
        return PASS;
    }
    if protocol == PROTOCOL_UDP && replies::may_reply(&key) {
        return PASS;
    }
    if port == 0 {
        // No packet: a question whether sockets can be closed (sock_diag(7)).
        return if state.audit() { PASS } else { DROP };
    }
    let is_denied = denials::record(state, &question, decision);
    events::incoming(&question, decision, !is_denied);
    if is_denied { DROP } else { PASS }
}
