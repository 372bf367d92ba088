//! Context of the socket address hooks: reading and rewriting its address.

use core::ptr::{addr_of, addr_of_mut};

use aya_ebpf::{
    bindings::{bpf_sock, bpf_sock_addr},
    programs::SockAddrContext,
};
use cproxy_ebpf::{PROTOCOL_TCP, PROTOCOL_UDP, v4_mapped};

use crate::{
    endpoint::{Endpoint, is_same},
    subprogram::opaque,
};

/// Verdict: the call goes on with the address in the context.
pub(crate) const ALLOW: i32 = 1;
/// Verdict: the call fails with the errno given to `bpf_set_retval`, else with EPERM.
pub(crate) const DENY: i32 = 0;

/// `IPPROTO_MPTCP` (include/uapi/linux/in.h). Its frontends are those of TCP.
const IPPROTO_MPTCP: u64 = 262;

/// `TCP_ESTABLISHED` (include/net/tcp_states.h), which is also the state of a connected UDP socket.
const ESTABLISHED: u32 = 1;

/// Address family of a hook. The verifier lets each hook read and write only the fields of its family.
pub(crate) trait Family {
    fn address(sock_addr: *mut bpf_sock_addr) -> [u32; 4];
    fn set_address(sock_addr: *mut bpf_sock_addr, address: &[u32; 4]);
    /// True if the socket's peer in the kernel has this address.
    fn is_peer(socket: *const bpf_sock, address: &[u32; 4]) -> bool;
}

/// Hooks whose addresses are IPv4.
pub(crate) struct V4;
/// Hooks whose addresses are IPv6, IPv4-mapped ones included.
pub(crate) struct V6;

impl Family for V4 {
    #[inline(always)]
    fn address(sock_addr: *mut bpf_sock_addr) -> [u32; 4] {
        // SAFETY: the verifier checks every access to the context; v4 hooks have this field.
        v4_mapped(unsafe { addr_of!((*sock_addr).user_ip4).read_volatile() })
    }

    #[inline(always)]
    fn set_address(sock_addr: *mut bpf_sock_addr, address: &[u32; 4]) {
        // SAFETY: as above; the field is writable in all our hooks.
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
            // SAFETY: the verifier checks every access to the context; it wants these words read one by one.
            *value = unsafe { addr_of!((*sock_addr).user_ip6[word]).read_volatile() };
        }
        address
    }

    #[inline(always)]
    fn set_address(sock_addr: *mut bpf_sock_addr, address: &[u32; 4]) {
        for (word, value) in address.iter().enumerate() {
            // SAFETY: as above; the field is writable in all our hooks.
            unsafe { addr_of_mut!((*sock_addr).user_ip6[word]).write_volatile(*value) };
        }
    }

    #[inline(always)]
    fn is_peer(socket: *const bpf_sock, address: &[u32; 4]) -> bool {
        let mut peer = [0; 4];
        for (word, value) in peer.iter_mut().enumerate() {
            // SAFETY: the verifier checks every access to the socket; it wants these words read one by one.
            *value = unsafe { addr_of!((*socket).dst_ip6[word]).read_volatile() };
        }
        is_same(&peer, 0, address, 0)
    }
}

/// Reads address and port from the context.
#[inline(always)]
pub(crate) fn read_endpoint<F: Family>(ctx: &SockAddrContext) -> Endpoint {
    // SAFETY: the verifier checks every access to the context.
    let port = unsafe { addr_of!((*ctx.sock_addr).user_port).read_volatile() };
    Endpoint::new(&F::address(ctx.sock_addr), port as u16)
}

/// Rewrites address and port in the context. Returns the verdict.
#[inline(always)]
pub(crate) fn rewrite<F: Family>(ctx: &SockAddrContext, address: &[u32; 4], port: u16) -> i32 {
    F::set_address(ctx.sock_addr, address);
    // SAFETY: the verifier checks every access to the context; the field takes a 16-bit port in network order.
    unsafe { addr_of_mut!((*ctx.sock_addr).user_port).write_volatile(port as u32) };
    ALLOW
}

/// Protocol of the socket's frontends; `None` if no frontend can have it. To the verifier it is an unknown number, so
/// that it goes through the rest once, and not for each protocol.
#[inline(always)]
pub(crate) fn protocol(ctx: &SockAddrContext) -> Option<u8> {
    // SAFETY: the verifier checks every access to the context.
    let kernels = unsafe { addr_of!((*ctx.sock_addr).protocol).read_volatile() } as u64;
    let is_tcp = opaque((kernels & !(IPPROTO_MPTCP ^ PROTOCOL_TCP as u64)) ^ PROTOCOL_TCP as u64) == 0;
    let is_udp = opaque(kernels ^ PROTOCOL_UDP as u64) == 0;
    (is_tcp || is_udp).then_some(opaque(kernels) as u8)
}

const _: () = assert!(IPPROTO_MPTCP as u8 == PROTOCOL_TCP && (IPPROTO_MPTCP ^ PROTOCOL_TCP as u64).is_power_of_two());

/// True if the socket is connected to this endpoint now.
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

/// Port of the socket, in network order.
#[inline(always)]
pub(crate) fn own_port(ctx: &SockAddrContext) -> u16 {
    // SAFETY: the verifier checks every access to the context and the socket, which is never null in these hooks.
    let port = unsafe {
        let socket = (*ctx.sock_addr).__bindgen_anon_1.sk;
        addr_of!((*socket).src_port).read_volatile()
    };
    (port as u16).to_be()
}
