//! Verdicts about what comes in and belongs to no connection. Where egress alone is isolated, datagrams are recorded,
//! whose replies pass.

use core::ptr::addr_of;

use aya_ebpf::bindings::bpf_sk_lookup;
use cproxy_ebpf::{
    PROTOCOL_TCP, PROTOCOL_UDP,
    policy::{EGRESS, ReplyKey},
    v4_mapped,
};

use crate::{
    decision::{Decision, INGRESS, Question, decide},
    denials, incoming_events,
    maps::state,
    replies,
};

const AF_INET: u32 = 2;

/// First packet of a connection, or a datagram.
pub(crate) struct Packet {
    pub(crate) is_v4: bool,
    pub(crate) protocol: u8,
    pub(crate) peer: [u32; 4],
    /// In network order.
    pub(crate) peer_port: u16,
    /// Port of the pod to which it goes, in host order. 0: no packet, but a question whether sockets can be closed
    /// (sock_diag(7)).
    pub(crate) port: u16,
}

impl Packet {
    /// Reads all fields at once: the verifier wants each read from the context itself.
    #[inline(always)]
    pub(crate) fn read(lookup: *mut bpf_sk_lookup) -> Self {
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
        let is_v4 = family == AF_INET;
        Self { is_v4, protocol, peer: if is_v4 { v4_mapped(v4) } else { v6 }, peer_port, port }
    }
}

/// Whether the policy denies a packet. A denied SYN is answered with RST, a denied datagram with port unreachable.
#[inline(always)]
pub(crate) fn is_denied(packet: &Packet) -> bool {
    let state = state();
    let Packet { protocol, peer, peer_port, port, .. } = *packet;
    if !state.ingress() && !state.egress() || protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP {
        return false;
    }
    let key = ReplyKey { peer, peer_port, own_port: port.to_be() };
    let question = Question { peer, port, protocol, direction: INGRESS };
    let decision = if state.ingress() { decide(state, &question) } else { Decision::ALLOWED };
    if decision.allows() {
        if protocol == PROTOCOL_UDP && state.egress() {
            let back = Question { peer, port: u16::from_be(peer_port), protocol, direction: EGRESS };
            if !decide(state, &back).allows() {
                replies::record(&key, INGRESS);
            }
        }
        return false;
    }
    if protocol == PROTOCOL_UDP && replies::may_reply(&key, INGRESS) {
        return false;
    }
    if port == 0 {
        return !state.audit();
    }
    let is_denied = denials::record(state, &question, decision);
    incoming_events::report(&question, decision, !is_denied);
    is_denied
}
