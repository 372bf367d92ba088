//! `sk_lookup`: what comes in and belongs to no connection. Policy decides first, with the client's own address and the
//! pod's port; then the socket is chosen.

use core::ptr::addr_of;

use aya_ebpf::{
    bindings::{bpf_sk_lookup, sk_action},
    macros::sk_lookup,
    programs::SkLookupContext,
};
use cproxy_ebpf::{
    PROTOCOL_TCP, PROTOCOL_UDP,
    receive::{DatagramKey, LISTENER_SLOTS, ListenerKey, ReceiveCounter, ReceivedKey},
    v4_mapped,
};

use crate::{
    datagrams,
    endpoint::Endpoint,
    ingress::{Packet, is_denied},
    own_address::own_address,
    receive_maps::{LISTENERS, count, has_source, netns_cookie, received},
};

const PASS: u32 = sk_action::SK_PASS;
const DROP: u32 = sk_action::SK_DROP;

#[sk_lookup]
fn cproxy_receive_in(ctx: SkLookupContext) -> u32 {
    let mut packet = Packet::read(ctx.lookup);
    let to = local_address(ctx.lookup, packet.is_v4);
    let called = packet.port;
    let is_received = received(&ReceivedKey::of_address(to)).is_some();
    if is_received {
        let key = ReceivedKey { address: to, port: called, protocol: packet.protocol, padding: 0 };
        let Some(word) = received(&key) else {
            count(ReceiveCounter::OtherPorts);
            return DROP;
        };
        if word.group() != 0 && !has_source(word.group(), &packet.peer) {
            count(ReceiveCounter::OtherSources);
            return DROP;
        }
        packet.port = word.port();
    }
    if is_denied(&packet) {
        return DROP;
    }
    match packet.protocol {
        PROTOCOL_TCP if is_received => choose_listener(&ctx, &to, called, &packet),
        PROTOCOL_UDP => {
            let key = DatagramKey { peer: packet.peer, peer_port: packet.peer_port, own_port: packet.port.to_be() };
            if is_received {
                count(ReceiveCounter::Datagrams);
            }
            datagrams::record(&key, &to, is_received);
            PASS
        }
        _ => PASS,
    }
}

/// Chooses a socket that listens: on the pod's address, on all addresses of the family, or on all addresses. Without
/// one, the kernel looks for a socket on all addresses that has listened before these programs were attached.
#[inline(always)]
fn choose_listener(ctx: &SkLookupContext, to: &[u32; 4], called: u16, packet: &Packet) -> u32 {
    const ANY_V4: [u32; 4] = v4_mapped(0);
    let own = own_address(&Endpoint::new(to, 0)).map_or([0; 4], |own| own.address);
    let any = if packet.is_v4 { ANY_V4 } else { [0; 4] };
    for address in [own, any, [0; 4]] {
        if cproxy_receive_choose(ctx.lookup, &Endpoint { address, port: packet.port, zero: 0 }) != 0 {
            count(ReceiveCounter::Connections);
            return PASS;
        }
    }
    if called == packet.port {
        count(ReceiveCounter::Connections);
        return PASS;
    }
    count(ReceiveCounter::NoListener);
    DROP
}

/// Chooses a socket that listens at an address and port, in host order. Returns 1 if there is one. Of a reuseport group
/// the kernel then chooses one itself.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_receive_choose(lookup: *mut bpf_sk_lookup, at: *const Endpoint) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(at) = (unsafe { at.as_ref() }) else { return 0 };
    let netns_cookie = netns_cookie();
    let mut key = ListenerKey { netns_cookie, address: at.address, port: at.port, slot: 0, padding: 0 };
    for slot in 0..LISTENER_SLOTS {
        key.slot = slot;
        // One of another family does not do: an IPv6 socket for IPv6 alone.
        if LISTENERS.redirect_sk_lookup(SkLookupContext::new(lookup), &key, 0).is_ok() {
            return 1;
        }
    }
    0
}

/// Address to which a packet goes.
#[inline(always)]
fn local_address(lookup: *mut bpf_sk_lookup, is_v4: bool) -> [u32; 4] {
    // SAFETY: the verifier checks every access to the context.
    let v4 = unsafe { addr_of!((*lookup).local_ip4).read_volatile() };
    let mut v6 = [0; 4];
    for (word, value) in v6.iter_mut().enumerate() {
        // SAFETY: as above; the words are zero for IPv4.
        *value = unsafe { addr_of!((*lookup).local_ip6[word]).read_volatile() };
    }
    if is_v4 { v4_mapped(v4) } else { v6 }
}
