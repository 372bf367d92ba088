//! The address that a hook is about, in the one 16-byte form, and the verdicts of a hook.

use core::ptr::{addr_of, addr_of_mut};

use aya_ebpf::{
    bindings::{bpf_sock, bpf_sock_addr},
    helpers::generated::bpf_set_retval,
    programs::SockAddrContext,
};
use cproxy_ebpf::{Counter, PROTOCOL_TCP, PROTOCOL_UDP, v4_mapped};

use crate::{
    endpoint::{Endpoint, is_same},
    maps::count,
};

/// The kernel goes on with the address as it now is.
pub(crate) const ALLOW: i32 = 1;
/// The call fails, with the errno given to `bpf_set_retval`, or EPERM.
const DENY: i32 = 0;

const ECONNREFUSED: i32 = 111;
const EHOSTUNREACH: i32 = 113;

/// `IPPROTO_MPTCP`: a TCP socket to its peers (include/uapi/linux/in.h).
const IPPROTO_MPTCP: u32 = 262;

/// `TCP_ESTABLISHED` (include/net/tcp_states.h): also the state of a UDP socket that is connected.
const ESTABLISHED: u32 = 1;

/// Whether this kernel has `bpf_set_retval` for these hooks (5.18). The agent sets it before it loads the programs; the
/// verifier then removes what is behind it.
#[unsafe(no_mangle)]
static ERRNO_HELPER: u8 = 1;

/// Which words of the context a hook may touch: the verifier checks that.
pub(crate) trait Family {
    fn address(sock_addr: *mut bpf_sock_addr) -> [u32; 4];
    fn set_address(sock_addr: *mut bpf_sock_addr, address: &[u32; 4]);
    /// Whether the kernel has the socket connected to this address.
    fn is_peer(socket: *const bpf_sock, address: &[u32; 4]) -> bool;
}

/// Hooks whose addresses are IPv4.
pub(crate) struct V4;
/// Hooks whose addresses are IPv6, IPv4-mapped ones included.
pub(crate) struct V6;

impl Family for V4 {
    #[inline(always)]
    fn address(sock_addr: *mut bpf_sock_addr) -> [u32; 4] {
        // SAFETY: the verifier checks every access to the context; this field exists in v4 hooks.
        v4_mapped(unsafe { addr_of!((*sock_addr).user_ip4).read_volatile() })
    }

    #[inline(always)]
    fn set_address(sock_addr: *mut bpf_sock_addr, address: &[u32; 4]) {
        // SAFETY: as above; writable in all of our hooks.
        unsafe { addr_of_mut!((*sock_addr).user_ip4).write_volatile(address[3]) };
    }

    #[inline(always)]
    fn is_peer(socket: *const bpf_sock, address: &[u32; 4]) -> bool {
        // SAFETY: the verifier checks every access to the socket.
        unsafe { addr_of!((*socket).dst_ip4).read_volatile() == address[3] }
    }
}

impl Family for V6 {
    #[inline(always)]
    fn address(sock_addr: *mut bpf_sock_addr) -> [u32; 4] {
        let mut address = [0; 4];
        for (word, value) in address.iter_mut().enumerate() {
            // SAFETY: the verifier checks every access to the context; it wants these words one by one.
            *value = unsafe { addr_of!((*sock_addr).user_ip6[word]).read_volatile() };
        }
        address
    }

    #[inline(always)]
    fn set_address(sock_addr: *mut bpf_sock_addr, address: &[u32; 4]) {
        for (word, value) in address.iter().enumerate() {
            // SAFETY: as above; writable in all of our hooks.
            unsafe { addr_of_mut!((*sock_addr).user_ip6[word]).write_volatile(*value) };
        }
    }

    #[inline(always)]
    fn is_peer(socket: *const bpf_sock, address: &[u32; 4]) -> bool {
        let mut peer = [0; 4];
        for (word, value) in peer.iter_mut().enumerate() {
            // SAFETY: the verifier checks every access to the socket; it wants these words one by one.
            *value = unsafe { addr_of!((*socket).dst_ip6[word]).read_volatile() };
        }
        is_same(&peer, 0, address, 0)
    }
}

/// The address that the application, or the kernel, has put there.
#[inline(always)]
pub(crate) fn endpoint<F: Family>(ctx: &SockAddrContext) -> Endpoint {
    // SAFETY: the verifier checks every access to the context.
    let port = unsafe { addr_of!((*ctx.sock_addr).user_port).read_volatile() };
    Endpoint::new(&F::address(ctx.sock_addr), port as u16)
}

/// Puts another address there.
#[inline(always)]
pub(crate) fn rewrite<F: Family>(ctx: &SockAddrContext, address: &[u32; 4], port: u16) -> i32 {
    F::set_address(ctx.sock_addr, address);
    // SAFETY: the verifier checks every access to the context; the field takes a 16-bit port in network order.
    unsafe { addr_of_mut!((*ctx.sock_addr).user_port).write_volatile(port as u32) };
    ALLOW
}

/// The protocol, if it is one that Services have.
#[inline(always)]
pub(crate) fn protocol(ctx: &SockAddrContext) -> Option<u8> {
    // SAFETY: the verifier checks every access to the context.
    match unsafe { addr_of!((*ctx.sock_addr).protocol).read_volatile() } {
        IPPROTO_MPTCP => Some(PROTOCOL_TCP),
        protocol if protocol == PROTOCOL_TCP as u32 => Some(PROTOCOL_TCP),
        protocol if protocol == PROTOCOL_UDP as u32 => Some(PROTOCOL_UDP),
        _ => None,
    }
}

/// Whether the kernel has the socket connected to this address at this moment.
#[inline(always)]
pub(crate) fn is_current_peer<F: Family>(ctx: &SockAddrContext, endpoint: &Endpoint) -> bool {
    // SAFETY: the verifier checks every access to the context and the socket, which is never null in these hooks.
    unsafe {
        let socket = (*ctx.sock_addr).__bindgen_anon_1.sk;
        addr_of!((*socket).state).read_volatile() == ESTABLISHED
            && addr_of!((*socket).dst_port).read_volatile() == endpoint.port
            && F::is_peer(socket, &endpoint.address)
    }
}

/// As if the VIP were a host without a listener, or, if it drops, one to which there is no way.
#[inline(always)]
pub(crate) fn deny(drops: bool) -> i32 {
    cproxy_deny(drops as u32);
    DENY
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_deny(drops: u32) -> u32 {
    let (counter, errno) = if drops != 0 { (Counter::Dropped, EHOSTUNREACH) } else { (Counter::Refused, ECONNREFUSED) };
    count(counter);
    // SAFETY: a static; volatile because the agent changes it in the object file.
    if unsafe { addr_of!(ERRNO_HELPER).read_volatile() } != 0 {
        // SAFETY: a helper that takes an integer.
        unsafe { bpf_set_retval(-errno) };
    }
    0
}
