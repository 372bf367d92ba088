//! Per-socket state in `SOCKETS`: peers without a TCP place, and the agent's mark.
//!
//! The kernel holds the socket's lock while a hook runs (include/linux/bpf-cgroup.h, `BPF_CGROUP_RUN_SA_PROG` and its
//! `_LOCK` forms), so no other program changes the state at the same time.

use aya_ebpf::programs::SockAddrContext;
use cproxy_ebpf::{SOCKET_UNTRANSLATED, SocketState, Translation};

use crate::{
    endpoint::{Endpoint, is_same},
    maps::SOCKETS,
};

/// State of the socket, if it has any.
#[inline(always)]
pub(crate) fn socket_state(ctx: &SockAddrContext) -> Option<&mut SocketState> {
    // SAFETY: without the create flag the helper only looks up. It returns null or the socket's live storage, which no
    // other program changes while this one runs.
    unsafe { SOCKETS.get_ptr_mut(ctx).as_mut() }
}

/// State of the socket, created if it has none; `None` if the kernel has no memory for it.
#[inline(always)]
pub(crate) fn socket_state_or_new(ctx: &SockAddrContext) -> Option<&mut SocketState> {
    // SAFETY: as in `socket_state`.
    unsafe { SOCKETS.get_or_insert_ptr_mut(ctx, None).as_mut() }
}

/// True if the agent has marked the socket as its own.
#[inline(always)]
pub(crate) fn is_agents(state: &SocketState) -> bool {
    state.flags & SOCKET_UNTRANSLATED != 0
}

/// True if the socket is one that the agent has marked as its own.
#[inline(always)]
pub(crate) fn is_agents_socket(ctx: &SockAddrContext) -> bool {
    socket_state(ctx).is_some_and(|state| is_agents(state))
}

/// True if the endpoint is the translation's backend, to which the kernel has connected.
#[inline(always)]
pub(crate) fn backend_is(translation: &Translation, endpoint: &Endpoint) -> bool {
    endpoint.matches(&translation.backend, translation.backend_port)
}

/// True if the endpoint is the translation's VIP, which the application has named.
#[inline(always)]
pub(crate) fn vip_is(translation: &Translation, endpoint: &Endpoint) -> bool {
    endpoint.matches(&translation.vip, translation.vip_port)
}

/// True if VIP and backend differ: the connect was to a Service.
#[inline(always)]
pub(crate) fn is_translated(translation: &Translation) -> bool {
    !is_same(&translation.vip, translation.vip_port, &translation.backend, translation.backend_port)
}

/// Records a connect to an address that is not a Service's.
#[inline(always)]
pub(crate) fn record_direct(peer: &mut Translation, destination: &Endpoint) {
    record_translated(peer, destination, &destination.address, destination.port, 0);
}

/// Records a connect to a Service.
#[inline(always)]
pub(crate) fn record_translated(peer: &mut Translation, vip: &Endpoint, backend: &[u32; 4], port: u16, slot: u32) {
    for word in 0..4 {
        peer.vip[word] = vip.address[word];
        peer.backend[word] = backend[word];
    }
    (peer.vip_port, peer.backend_port, peer.slot) = (vip.port, port, slot);
}

/// Records that the application has sent to this address by itself. If it is the peer's backend, replies no longer show
/// the VIP.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_record_direct_send(peer: *mut Translation, destination: *const Endpoint) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind each pointer.
    let (Some(peer), Some(destination)) = (unsafe { (peer.as_mut(), destination.as_ref()) }) else { return 0 };
    if backend_is(peer, destination) {
        record_direct(peer, destination);
    }
    0
}
