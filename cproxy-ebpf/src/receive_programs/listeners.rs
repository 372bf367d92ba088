//! `listen()`: the TCP sockets that may be chosen for a connection to a received address.
//!
//! A socket on a loopback address stays out, so that it stays unreachable from outside, and so does one of another
//! network namespace. The kernel removes sockets that are closed.

use core::ptr::addr_of;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{BPF_ANY, BPF_NOEXIST, BPF_SOCK_OPS_TCP_LISTEN_CB, bpf_sock_ops},
    helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie, bpf_getsockopt},
    macros::sock_ops,
    programs::SockOpsContext,
};
use cproxy_ebpf::{
    V4_MAPPED_WORD,
    receive::{ANY_V6_ONLY, LISTENER_SLOTS, ListenerKey, ReceiveCounter},
    v4_mapped,
};

use crate::receive_maps::{self, LISTENERS, count};

const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;

/// Of `<linux/in6.h>`.
const IPPROTO_IPV6: i32 = 41;
const IPV6_V6ONLY: i32 = 26;

/// The kernel reads no answer to `listen()`.
const ANSWER: u32 = 1;

/// `-EEXIST`.
const IN_USE: i32 = -17;

#[sock_ops]
fn cproxy_receive_so(ctx: SockOpsContext) -> u32 {
    if ctx.op() != BPF_SOCK_OPS_TCP_LISTEN_CB {
        return ANSWER;
    }
    let address = match (ctx.family(), local_addresses(ctx.ops)) {
        (AF_INET, (v4, _)) => v4_mapped(v4),
        (AF_INET6, (_, [0, 0, 0, 0])) if is_v6_only(ctx.ops) => ANY_V6_ONLY,
        (AF_INET6, (_, v6)) => v6,
        _ => return ANSWER,
    };
    if is_loopback(&address) {
        return ANSWER;
    }
    // SAFETY: helpers that take the context.
    let (netns_cookie, cookie) =
        unsafe { (bpf_get_netns_cookie(ctx.as_ptr()), bpf_get_socket_cookie(ctx.as_ptr()) as u16) };
    if netns_cookie != receive_maps::netns_cookie() || is_bound_to_device(ctx.ops) {
        return ANSWER;
    }
    let mut key = ListenerKey { netns_cookie, address, port: ctx.local_port() as u16, slot: 0, padding: 0 };
    // The first free slot, or else that of an older socket, so that the latest ones are known.
    let slots = (0..LISTENER_SLOTS).map(|slot| (slot, BPF_NOEXIST));
    for (slot, flags) in slots.chain([(cookie % LISTENER_SLOTS, BPF_ANY)]) {
        key.slot = slot;
        // SAFETY: the context is alive; the kernel alone looks behind the pointer.
        match LISTENERS.update(&mut key, unsafe { &mut *ctx.ops }, flags.into()) {
            Err(IN_USE) => {}
            Ok(()) => return ANSWER,
            Err(_) => {
                count(ReceiveCounter::ListenersLost);
                return ANSWER;
            }
        }
    }
    ANSWER
}

/// Whether a socket takes what comes in by one interface alone. Where another listens, too, the kernel's own choice is
/// the right one.
#[inline(always)]
fn is_bound_to_device(ops: *mut bpf_sock_ops) -> bool {
    // SAFETY: the verifier checks every access to the context.
    let socket = unsafe { addr_of!((*ops).__bindgen_anon_2.sk).read_volatile() };
    // SAFETY: as above; the socket is there for as long as the program runs.
    !socket.is_null() && unsafe { addr_of!((*socket).bound_dev_if).read_volatile() } != 0
}

/// The socket's address as one of each family, of which one counts. Both are read: the verifier wants each read from
/// the context itself.
#[inline(always)]
fn local_addresses(ops: *mut bpf_sock_ops) -> (u32, [u32; 4]) {
    // SAFETY: the verifier checks every access to the context.
    let v4 = unsafe { addr_of!((*ops).local_ip4).read_volatile() };
    let mut v6 = [0; 4];
    for (word, value) in v6.iter_mut().enumerate() {
        // SAFETY: as above.
        *value = unsafe { addr_of!((*ops).local_ip6[word]).read_volatile() };
    }
    (v4, v6)
}

/// Whether an IPv6 socket takes no IPv4. Linux before 6.1 does not tell; such a socket is then chosen for IPv6 alone
/// all the same, since the kernel lets no other be.
#[inline(always)]
fn is_v6_only(ops: *mut bpf_sock_ops) -> bool {
    let mut value = 0_u32;
    // SAFETY: the context, and a value of the size that is given.
    let result = unsafe {
        bpf_getsockopt(ops.cast(), IPPROTO_IPV6, IPV6_V6ONLY, (&raw mut value).cast(), size_of::<u32>() as i32)
    };
    result == 0 && value != 0
}

#[inline(always)]
fn is_loopback(address: &[u32; 4]) -> bool {
    let [a, b, c, d] = *address;
    if a | b == 0 && c == V4_MAPPED_WORD {
        return d & u32::from_ne_bytes([255, 0, 0, 0]) == u32::from_ne_bytes([127, 0, 0, 0]);
    }
    a | b | c == 0 && d == 1u32.to_be()
}
