//! `sk_lookup`: what comes in and belongs to no connection. Policy decides first, with the client's own address and the
//! pod's port; then the socket is chosen.

use core::ptr::addr_of;

use aya_ebpf::{
    bindings::{bpf_sk_lookup, sk_action},
    macros::sk_lookup,
    programs::SkLookupContext,
};
use cproxy_ebpf::{
    PROTOCOL_TCP, PROTOCOL_UDP, is_v4,
    receive::{ANY_V6_ONLY, DatagramKey, LISTENER_SLOTS, ListenerKey, ReceiveCounter, ReceivedKey},
    v4_mapped,
};

use crate::{
    datagrams,
    endpoint::Endpoint,
    ingress::{Packet, is_denied},
    own_address::own_address,
    receive_maps::{LISTENERS, count, has_listener, has_source, netns_cookie, received},
};

const PASS: u32 = sk_action::SK_PASS;
const DROP: u32 = sk_action::SK_DROP;

#[sk_lookup]
fn cproxy_receive_in(ctx: SkLookupContext) -> u32 {
    let mut packet = Packet::read(ctx.lookup);
    let to = local_address(ctx.lookup, packet.is_v4);
    let called = packet.port;
    let key = ReceivedKey { address: to, port: called, protocol: packet.protocol, padding: 0 };
    let target = cproxy_receive_target(&key, &Endpoint::new(&packet.peer, 0));
    if target == REFUSED {
        return DROP;
    }
    let is_received = target != NOT_RECEIVED;
    packet.port = if is_received { target as u16 } else { called };
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

/// Results of [`cproxy_receive_target`] that are no port.
const NOT_RECEIVED: u32 = 1 << 16;
const REFUSED: u32 = 2 << 16;

/// Port of the pod for an address and port that a client has called.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_receive_target(called: *const ReceivedKey, client: *const Endpoint) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointers.
    let (Some(called), Some(client)) = (unsafe { (called.as_ref(), client.as_ref()) }) else { return NOT_RECEIVED };
    let key = ReceivedKey { address: called.address, port: called.port, protocol: called.protocol, padding: 0 };
    if received(&ReceivedKey::of_address(key.address)).is_none() {
        return NOT_RECEIVED;
    }
    let Some(word) = received(&key) else {
        count(ReceiveCounter::OtherPorts);
        return REFUSED;
    };
    if word.group() != 0 && !has_source(word.group(), &client.address) {
        count(ReceiveCounter::OtherSources);
        return REFUSED;
    }
    word.port().into()
}

/// Chooses a socket that listens. Without one, the kernel looks for a socket on all addresses that has listened before
/// these programs were attached.
#[inline(always)]
fn choose_listener(ctx: &SkLookupContext, to: &[u32; 4], called: u16, packet: &Packet) -> u32 {
    let to = Endpoint::new(to, packet.port);
    // The socket that was found may close before it is chosen; another one of its group does as well.
    for _ in 0..2 {
        let mut key = ListenerKey { netns_cookie: 0, address: [0; 4], port: 0, slot: 0, padding: 0 };
        if cproxy_receive_find(&to, &mut key) == 0 {
            break;
        }
        // Of a reuseport group the kernel then chooses one itself.
        if LISTENERS.redirect_sk_lookup(SkLookupContext::new(ctx.lookup), &key, 0).is_ok() {
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

/// Finds a socket for a received address and a port of the pod: one that listens on the pod's address, on all addresses
/// of the family, or on all addresses. Returns 1 if there is one.
///
/// The caller chooses it: a kernel without BTF takes no context as the argument of a subprogram.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_receive_find(to: *const Endpoint, found: *mut ListenerKey) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointers.
    let (Some(to), Some(found)) = (unsafe { (to.as_ref(), found.as_mut()) }) else { return 0 };
    let own = own_address(&Endpoint::new(&to.address, 0)).map_or([0; 4], |own| own.address);
    let any = if is_v4(&to.address) { v4_mapped(0) } else { ANY_V6_ONLY };
    for address in [own, any, [0; 4]] {
        let slot = cproxy_receive_slot(&Endpoint { address, ..*to });
        if slot < LISTENER_SLOTS.into() {
            *found =
                ListenerKey { netns_cookie: netns_cookie(), address, port: to.port, slot: slot as u16, padding: 0 };
            return 1;
        }
    }
    0
}

/// The first slot with a socket that listens at an address and port; `LISTENER_SLOTS` if there is none.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_receive_slot(at: *const Endpoint) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(at) = (unsafe { at.as_ref() }) else { return LISTENER_SLOTS.into() };
    let mut key = ListenerKey { netns_cookie: netns_cookie(), address: at.address, port: at.port, slot: 0, padding: 0 };
    for slot in 0..LISTENER_SLOTS {
        key.slot = slot;
        if has_listener(&key) {
            return slot.into();
        }
    }
    LISTENER_SLOTS.into()
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
