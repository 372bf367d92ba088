//! `connect()`: the destination is rewritten before the kernel looks up a route, so no packet ever carries the VIP.
//!
//! An AF_INET6 socket that connects to an IPv4-mapped address runs connect6, not connect4 (`tcp_v6_pre_connect` and
//! `udpv6_pre_connect` in net/ipv6); both hooks use the one 16-byte address form, so they find the same frontend.

use core::ptr::{addr_of, addr_of_mut};

use aya_ebpf::{
    bindings::bpf_sock_addr, helpers::generated::bpf_set_retval, macros::cgroup_sock_addr, programs::SockAddrContext,
};
use cproxy_ebpf::{Backend, FrontendKey, PROTOCOL_TCP, PROTOCOL_UDP, v4_mapped};

use crate::maps::{Lookup, is_untranslated, lookup};

/// The kernel goes on with the address as it now is.
const ALLOW: i32 = 1;
/// The call fails, with the errno given to `bpf_set_retval`.
const DENY: i32 = 0;

const ECONNREFUSED: i32 = 111;

/// `IPPROTO_MPTCP`: a TCP socket to whoever it talks to (include/uapi/linux/in.h).
const IPPROTO_MPTCP: u32 = 262;

#[cgroup_sock_addr(connect4)]
fn cproxy_connect4(ctx: SockAddrContext) -> i32 {
    let sock_addr = ctx.sock_addr;
    // SAFETY: the verifier checks every access to the context; this field exists in v4 hooks.
    let address = unsafe { addr_of!((*sock_addr).user_ip4).read_volatile() };
    match decide(&ctx, v4_mapped(address)) {
        Decision::Pass => ALLOW,
        Decision::Refuse => refuse(),
        Decision::Rewrite(backend) => {
            // SAFETY: as above; writable in connect4.
            unsafe { addr_of_mut!((*sock_addr).user_ip4).write_volatile(backend.address[3]) };
            set_port(sock_addr, backend.port)
        }
    }
}

#[cgroup_sock_addr(connect6)]
fn cproxy_connect6(ctx: SockAddrContext) -> i32 {
    let sock_addr = ctx.sock_addr;
    let mut address = [0; 4];
    for (word, value) in address.iter_mut().enumerate() {
        // SAFETY: the verifier checks every access to the context; it wants these words one by one.
        *value = unsafe { addr_of!((*sock_addr).user_ip6[word]).read_volatile() };
    }
    match decide(&ctx, address) {
        Decision::Pass => ALLOW,
        Decision::Refuse => refuse(),
        Decision::Rewrite(backend) => {
            for (word, value) in backend.address.into_iter().enumerate() {
                // SAFETY: as above; writable in connect6.
                unsafe { addr_of_mut!((*sock_addr).user_ip6[word]).write_volatile(value) };
            }
            set_port(sock_addr, backend.port)
        }
    }
}

enum Decision {
    Pass,
    Refuse,
    Rewrite(Backend),
}

/// The agent's mark is asked for on a hit only: a connect to no Service pays for one lookup and nothing else.
#[inline(always)]
fn decide(ctx: &SockAddrContext, address: [u32; 4]) -> Decision {
    // SAFETY: the verifier checks every access to the context.
    let (port, protocol) = unsafe {
        (addr_of!((*ctx.sock_addr).user_port).read_volatile(), addr_of!((*ctx.sock_addr).protocol).read_volatile())
    };
    let protocol = match protocol {
        IPPROTO_MPTCP => PROTOCOL_TCP,
        protocol if protocol == PROTOCOL_TCP as u32 => PROTOCOL_TCP,
        protocol if protocol == PROTOCOL_UDP as u32 => PROTOCOL_UDP,
        _ => return Decision::Pass,
    };
    match lookup(&FrontendKey { address, port: port as u16, protocol, zero: 0 }) {
        Lookup::Miss => Decision::Pass,
        _ if is_untranslated(ctx) => Decision::Pass,
        Lookup::Refuse => Decision::Refuse,
        Lookup::Forward(backend) => Decision::Rewrite(*backend),
    }
}

#[inline(always)]
fn set_port(sock_addr: *mut bpf_sock_addr, port: u16) -> i32 {
    // SAFETY: the verifier checks every access to the context; the field takes a 16-bit port in network order.
    unsafe { addr_of_mut!((*sock_addr).user_port).write_volatile(port as u32) };
    ALLOW
}

/// As if the VIP were a host on which nobody listens (kernel 5.18 or newer: `bpf_set_retval`).
#[inline(always)]
fn refuse() -> i32 {
    // SAFETY: a helper that takes an integer.
    unsafe { bpf_set_retval(-ECONNREFUSED) };
    DENY
}
