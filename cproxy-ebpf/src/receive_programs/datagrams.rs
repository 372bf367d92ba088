//! Replies to datagrams: they leave from the address to which the peer has sent, also if the application's socket is
//! bound to all addresses and does not say from which one to send.

use core::ptr::{addr_of, addr_of_mut};

use aya_ebpf::{
    EbpfContext as _, bindings::bpf_sock_addr, helpers::generated::bpf_get_netns_cookie, macros::cgroup_sock_addr,
    programs::SockAddrContext,
};
use cproxy_ebpf::{
    PROTOCOL_UDP,
    receive::{DatagramKey, ReceivedKey},
};

use crate::{
    receive_maps::{RECEIVED_DATAGRAMS, netns_cookie, received},
    sock_addr::{ALLOW, Family, V4, V6, own_port, protocol, read_endpoint},
    subprogram::on_stack,
};

#[cgroup_sock_addr(sendmsg4)]
fn cproxy_receive_s4(ctx: SockAddrContext) -> i32 {
    reply::<V4>(&ctx)
}

#[cgroup_sock_addr(sendmsg6)]
fn cproxy_receive_s6(ctx: SockAddrContext) -> i32 {
    reply::<V6>(&ctx)
}

#[inline(always)]
fn reply<F: Source>(ctx: &SockAddrContext) -> i32 {
    let to = read_endpoint::<F>(ctx);
    // With control data, a connected socket names no address.
    if to.port == 0 || protocol(ctx) != Some(PROTOCOL_UDP) || F::is_chosen(ctx.sock_addr) {
        return ALLOW;
    }
    let key = DatagramKey { peer: to.address, peer_port: to.port, own_port: own_port(ctx) };
    let Some(address) = RECEIVED_DATAGRAMS.get_ptr_mut(&key) else { return ALLOW };
    // SAFETY: a live element; volatile, because programs on other CPUs may write it at any time.
    let address = unsafe { address.read_volatile() };
    // In another network namespace the same ports belong to other sockets. Without its local route, an address would
    // make the call fail.
    if is_own_netns(ctx) && received(&ReceivedKey::of_address(address)).is_some() {
        F::choose(ctx.sock_addr, &address);
    }
    ALLOW
}

#[inline(always)]
fn is_own_netns(ctx: &SockAddrContext) -> bool {
    // SAFETY: a helper that takes the context.
    netns_cookie() == unsafe { bpf_get_netns_cookie(ctx.as_ptr()) }
}

/// Records the address to which a peer has sent. If it is not received, replies leave from the pod's own address again.
#[inline(always)]
pub(crate) fn record(key: &DatagramKey, to: &[u32; 4], is_received: bool) {
    cproxy_received_from(key, to, is_received as u32);
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_received_from(key: *const DatagramKey, to: *const [u32; 4], is_received: u32) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointers.
    let (Some(key), Some(to)) = (unsafe { (key.as_ref(), to.as_ref()) }) else { return 0 };
    let key = on_stack(key);
    // All zero stands for the pod's own address.
    let [a, b, c, d] = to.map(|word| word & 0u32.wrapping_sub(is_received & 1));
    match RECEIVED_DATAGRAMS.get_ptr_mut(&key) {
        Some(known) => {
            for (word, value) in [a, b, c, d].into_iter().enumerate() {
                // SAFETY: a live element, of which each word may be written at any time.
                let known = unsafe { &raw mut (*known)[word] };
                // SAFETY: as above. It is mostly the same, and then stays in the caches of other CPUs.
                unsafe {
                    if known.read_volatile() != value {
                        known.write_volatile(value);
                    }
                }
            }
        }
        None if is_received != 0 => {
            let _ = RECEIVED_DATAGRAMS.insert(&key, &[a, b, c, d], 0);
        }
        None => {}
    }
    0
}

/// Address from which a datagram leaves.
trait Source: Family {
    /// Whether the application, or the socket's own address, says which.
    fn is_chosen(sock_addr: *mut bpf_sock_addr) -> bool;
    /// Chooses one.
    fn choose(sock_addr: *mut bpf_sock_addr, address: &[u32; 4]);
}

impl Source for V4 {
    #[inline(always)]
    fn is_chosen(sock_addr: *mut bpf_sock_addr) -> bool {
        // SAFETY: the verifier checks every access to the context; sendmsg4 has this field.
        unsafe { addr_of!((*sock_addr).msg_src_ip4).read_volatile() != 0 }
    }

    #[inline(always)]
    fn choose(sock_addr: *mut bpf_sock_addr, address: &[u32; 4]) {
        // SAFETY: as above.
        unsafe { addr_of_mut!((*sock_addr).msg_src_ip4).write_volatile(address[3]) };
    }
}

impl Source for V6 {
    #[inline(always)]
    fn is_chosen(sock_addr: *mut bpf_sock_addr) -> bool {
        let mut bits = 0;
        for word in 0..4 {
            // SAFETY: the verifier checks every access to the context; sendmsg6 has these fields.
            bits |= unsafe { addr_of!((*sock_addr).msg_src_ip6[word]).read_volatile() };
        }
        bits != 0
    }

    #[inline(always)]
    fn choose(sock_addr: *mut bpf_sock_addr, address: &[u32; 4]) {
        for (word, value) in address.iter().enumerate() {
            // SAFETY: as above.
            unsafe { addr_of_mut!((*sock_addr).msg_src_ip6[word]).write_volatile(*value) };
        }
    }
}
