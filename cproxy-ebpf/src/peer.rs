//! Whom a socket is connected to: `SOCKETS`. The kernel holds the socket's lock while any of our hooks runs
//! (include/linux/bpf-cgroup.h, `BPF_CGROUP_RUN_SA_PROG` and its `_LOCK` forms), so nobody else changes a socket's state.

use aya_ebpf::programs::SockAddrContext;
use cproxy_ebpf::{SOCKET_UNTRANSLATED, SocketState, Translation};

use crate::{
    maps::SOCKETS,
    sock_addr::{Endpoint, is_same},
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

/// What an address is to a translation.
#[derive(Clone, Copy)]
pub(crate) struct Relation(u32);

const IS_VIP: u32 = 1;
const IS_BACKEND: u32 = 2;
const IS_TRANSLATED: u32 = 4;

impl Relation {
    /// Of `address` to `translation`.
    #[inline(always)]
    pub(crate) fn of(translation: &Translation, address: &Endpoint) -> Self {
        Self(cproxy_relation(translation, address))
    }

    /// It is the address that the application used, and another one was put in its place.
    #[inline(always)]
    pub(crate) fn is_vip(self) -> bool {
        self.0 & (IS_VIP | IS_TRANSLATED) == IS_VIP | IS_TRANSLATED
    }

    /// It is the address that the kernel got.
    #[inline(always)]
    pub(crate) fn is_backend(self) -> bool {
        self.0 & IS_BACKEND != 0
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_relation(translation: *const Translation, address: *const Endpoint) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind each pointer.
    let (Some(translation), Some(address)) = (unsafe { (translation.as_ref(), address.as_ref()) }) else { return 0 };
    let Translation { vip, vip_port, backend, backend_port, .. } = translation;
    let (address, port) = (&address.address, address.port);
    (is_same(address, port, vip, *vip_port) as u32) * IS_VIP
        + (is_same(address, port, backend, *backend_port) as u32) * IS_BACKEND
        + (!is_same(vip, *vip_port, backend, *backend_port) as u32) * IS_TRANSLATED
}

/// The address itself.
#[inline(always)]
pub(crate) fn untranslated(address: &Endpoint) -> Translation {
    let (vip_port, backend_port) = (address.port, address.port);
    Translation { vip: address.address, backend: address.address, vip_port, backend_port, slot: 0 }
}

/// What a connect to no Service leaves in a socket that has state.
#[inline(always)]
pub(crate) fn set_untranslated(peer: &mut Translation, destination: &Endpoint) {
    set_translated(peer, destination, &destination.address, destination.port, 0);
}

/// What a connect to a Service leaves.
#[inline(always)]
pub(crate) fn set_translated(peer: &mut Translation, vip: &Endpoint, backend: &[u32; 4], port: u16, slot: u32) {
    for word in 0..4 {
        peer.vip[word] = vip.address[word];
        peer.backend[word] = backend[word];
    }
    (peer.vip_port, peer.backend_port, peer.slot) = (vip.port, port, slot);
}
