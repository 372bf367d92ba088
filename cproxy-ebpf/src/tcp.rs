//! Peers of TCP sockets. A socket claims one of its two places in `TCP_PEERS` at its first `connect()` to a Service and
//! keeps it until it is closed. If both places are taken, its peer is in socket storage. The kernel's own sockets
//! (those behind MPTCP) run no release hook: the agent frees their places.
//!
//! Socket storage for all would be simpler, but it would cost more than the rest of the programs: the kernel allocates
//! it for each socket and frees it after a grace period, so its memory is always cold (docs/decisions/020).

use aya_ebpf::{
    EbpfContext as _,
    helpers::generated::bpf_get_socket_cookie,
    macros::cgroup_sock,
    programs::{SockAddrContext, SockContext},
};
use cproxy_ebpf::{PROTOCOL_TCP, TCP_PLACE_FREE, TCP_WITHOUT_PLACE, Translation, tcp_places};

use crate::{
    maps::{TCP_OWNERS, TCP_PEERS},
    observe,
    peer::{self, is_agents},
    sock_addr::ALLOW,
    subprogram::{compare_and_exchange, increment},
};

/// No place.
const NO_PLACE: u32 = u32::MAX;

/// Translation of the socket's last connect; `None` if there is none, and for the agent's own sockets.
#[inline(always)]
pub(crate) fn peer(ctx: &SockAddrContext) -> Option<&mut Translation> {
    let place = cproxy_find_tcp_place(socket_cookie(ctx.as_ptr()));
    if place != NO_PLACE {
        return peer_at(place);
    }
    if !has_sockets_without_place() {
        return None;
    }
    peer::socket_state(ctx).filter(|state| !is_agents(state)).map(|state| &mut state.peer)
}

/// Storage for the socket's peer, claimed if it has none: a place, else socket storage; `None` if the kernel has no
/// memory for that.
#[inline(always)]
pub(crate) fn claim_peer(ctx: &SockAddrContext) -> Option<&mut Translation> {
    let place = cproxy_claim_tcp_place(socket_cookie(ctx.as_ptr()));
    if place != NO_PLACE {
        return peer_at(place);
    }
    if let Some(count) = TCP_OWNERS.get_ptr_mut(TCP_WITHOUT_PLACE) {
        increment(count);
    }
    peer::socket_state_or_new(ctx).map(|state| &mut state.peer)
}

/// True once a socket has found both its places taken. Until then no socket storage holds a TCP peer, so none is looked
/// up.
#[inline(always)]
fn has_sockets_without_place() -> bool {
    // SAFETY: the helper returned a pointer to a live value, which is written whole.
    TCP_OWNERS.get_ptr_mut(TCP_WITHOUT_PLACE).is_some_and(|count| unsafe { count.read_volatile() } != 0)
}

/// Frees the place of a TCP socket that is closed.
#[cgroup_sock(sock_release)]
fn cproxy_release(ctx: SockContext) -> i32 {
    // SAFETY: the verifier checks every access to the context.
    let protocol = unsafe { core::ptr::addr_of!((*ctx.sock).protocol).read_volatile() };
    if protocol == PROTOCOL_TCP as u32 {
        let cookie = socket_cookie(ctx.as_ptr());
        let place = cproxy_find_tcp_place(cookie);
        if let Some(owner) = TCP_OWNERS.get_ptr_mut(place) {
            observe::closed(&ctx, || peer_at(place));
            // An exchange orders all writes of this socket before those of the next owner; a store would not.
            compare_and_exchange(owner, cookie, TCP_PLACE_FREE);
        }
    }
    ALLOW
}

/// Cookie of the socket. The kernel gives none twice while the machine runs.
#[inline(always)]
fn socket_cookie(ctx: *mut core::ffi::c_void) -> u64 {
    // SAFETY: a helper that takes the context.
    unsafe { bpf_get_socket_cookie(ctx) }
}

/// Translation at a place that the socket owns.
#[inline(always)]
fn peer_at<'m>(place: u32) -> Option<&'m mut Translation> {
    // SAFETY: a live element. Only its owner uses it, and the kernel holds that socket's lock while a hook runs.
    unsafe { TCP_PEERS.get_ptr_mut(place)?.as_mut() }
}

/// Returns the place that the socket owns, or [`NO_PLACE`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_find_tcp_place(cookie: u64) -> u32 {
    first_place_that(cookie, |place| is_owner(place, cookie))
}

/// The first of the socket's two places that fits, or [`NO_PLACE`].
#[inline(always)]
fn first_place_that(cookie: u64, fits: impl Fn(u32) -> bool) -> u32 {
    let [first, second] = tcp_places(cookie);
    if fits(first) {
        return first;
    }
    if fits(second) { second } else { NO_PLACE }
}

#[inline(always)]
fn is_owner(place: u32, cookie: u64) -> bool {
    // SAFETY: the helper returned a pointer to a live value, which is written whole.
    TCP_OWNERS.get_ptr_mut(place).is_some_and(|owner| unsafe { owner.read_volatile() } == cookie)
}

/// Returns the place that the socket owns, claimed if it owns none, or [`NO_PLACE`] if both are taken. A claimed place
/// may still hold the peer of its previous owner.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_claim_tcp_place(cookie: u64) -> u32 {
    let owned = cproxy_find_tcp_place(cookie);
    if owned != NO_PLACE {
        return owned;
    }
    first_place_that(cookie, |place| claim_place(place, cookie))
}

#[inline(always)]
fn claim_place(place: u32, cookie: u64) -> bool {
    let Some(owner) = TCP_OWNERS.get_ptr_mut(place) else { return false };
    compare_and_exchange(owner, TCP_PLACE_FREE, cookie) == TCP_PLACE_FREE
}
