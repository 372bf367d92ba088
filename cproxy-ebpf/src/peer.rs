//! Per-socket state in `SOCKETS`: peers without a TCP slot, and the agent's mark.
//!
//! The kernel holds the socket's lock while any of our hooks runs
//! (include/linux/bpf-cgroup.h, `BPF_CGROUP_RUN_SA_PROG` and its `_LOCK` forms), so no other program changes its state meanwhile.

use aya_ebpf::programs::SockAddrContext;
use cproxy_ebpf::{SOCKET_UNTRANSLATED, SocketState, Translation};

use crate::{
    endpoint::{Endpoint, is_same},
    maps::SOCKETS,
};

/// The socket's state, if it has any.
#[inline(always)]
pub(crate) fn state(ctx: &SockAddrContext) -> Option<&mut SocketState> {
    // SAFETY: without the create flag the helper only looks up; what it returns is null or this socket's live storage,
    // which no other program changes while this one runs.
    unsafe { SOCKETS.get_ptr_mut(ctx).as_mut() }
}

/// The socket's state, made if need be; `None` if there is no memory for it.
#[inline(always)]
pub(crate) fn state_or_new(ctx: &SockAddrContext) -> Option<&mut SocketState> {
    // SAFETY: as in `state`.
    unsafe { SOCKETS.get_or_insert_ptr_mut(ctx, None).as_mut() }
}

/// Whether the agent has marked the socket as its own.
#[inline(always)]
pub(crate) fn is_untranslated(state: &SocketState) -> bool {
    state.flags & SOCKET_UNTRANSLATED != 0
}

/// Whether this is the address that the kernel got.
#[inline(always)]
pub(crate) fn leads_to(translation: &Translation, backend: &Endpoint) -> bool {
    backend.is(&translation.backend, translation.backend_port)
}

/// Whether this is the address that the application used.
#[inline(always)]
pub(crate) fn is_for(translation: &Translation, vip: &Endpoint) -> bool {
    vip.is(&translation.vip, translation.vip_port)
}

/// Whether the kernel got another address than the application used.
#[inline(always)]
pub(crate) fn is_translated(translation: &Translation) -> bool {
    !is_same(&translation.vip, translation.vip_port, &translation.backend, translation.backend_port)
}

/// Records a connect to an address that is no Service, in a socket that has state.
#[inline(always)]
pub(crate) fn set_untranslated(peer: &mut Translation, destination: &Endpoint) {
    set_translated(peer, destination, &destination.address, destination.port, 0);
}

/// Records a connect to a Service.
#[inline(always)]
pub(crate) fn set_translated(peer: &mut Translation, vip: &Endpoint, backend: &[u32; 4], port: u16, slot: u32) {
    for word in 0..4 {
        peer.vip[word] = vip.address[word];
        peer.backend[word] = backend[word];
    }
    (peer.vip_port, peer.backend_port, peer.slot) = (vip.port, port, slot);
}

/// The application has sent to this address itself: if it is the backend, it is not the VIP any more.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_sent_directly(peer: *mut Translation, destination: *const Endpoint) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind each pointer.
    let (Some(peer), Some(destination)) = (unsafe { (peer.as_mut(), destination.as_ref()) }) else { return 0 };
    if leads_to(peer, destination) {
        set_untranslated(peer, destination);
    }
    0
}
