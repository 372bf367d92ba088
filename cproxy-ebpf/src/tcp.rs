//! Peers of TCP sockets: at one of two places of an array, which is the socket's from its first `connect()` to
//! a Service until it is closed, or, where both are another's, in its storage.
//!
//! Socket storage alone would do, and cost more than all the rest of the programs: the kernel allocates it anew for each
//! socket and frees it behind a grace period, so its memory is cold each time.

use aya_ebpf::{
    EbpfContext as _,
    helpers::generated::bpf_get_socket_cookie,
    macros::cgroup_sock,
    programs::{SockAddrContext, SockContext},
};
use cproxy_ebpf::{PROTOCOL_TCP, TCP_WITHOUT_PLACE, Translation, tcp_places};

use crate::{
    maps::{TCP_OWNERS, TCP_PEERS},
    peer::{self, is_untranslated},
    search::NOWHERE,
    sock_addr::ALLOW,
    subprogram::compare_and_exchange,
};

/// Owner of a free place.
const FREE: u64 = 0;

/// Translation of the socket's last connect, if there is one; none of the agent's own sockets.
#[inline(always)]
pub(crate) fn peer(ctx: &SockAddrContext) -> Option<&mut Translation> {
    let place = cproxy_tcp_place(cookie(ctx.as_ptr()));
    if place != NOWHERE {
        return at(place);
    }
    if !is_any_without_place() {
        return None;
    }
    peer::state(ctx).filter(|state| !is_untranslated(state)).map(|state| &mut state.peer)
}

/// The same, made if need be for a socket without storage; `None` if there is neither a place nor memory.
#[inline(always)]
pub(crate) fn new_peer(ctx: &SockAddrContext) -> Option<&mut Translation> {
    let place = cproxy_take_tcp_place(cookie(ctx.as_ptr()));
    if place != NOWHERE {
        return at(place);
    }
    if let Some(is_any) = TCP_OWNERS.get_ptr_mut(TCP_WITHOUT_PLACE) {
        // SAFETY: a live value; 1 is all that is ever written there.
        unsafe { is_any.write_volatile(1) };
    }
    peer::state_or_new(ctx).map(|state| &mut state.peer)
}

/// Whether any socket's storage has to be looked at. Mostly there have never been so many at once.
#[inline(always)]
fn is_any_without_place() -> bool {
    is_owner(TCP_WITHOUT_PLACE, 1)
}

/// A socket is being closed: its place is free.
#[cgroup_sock(sock_release)]
fn cproxy_release(ctx: SockContext) -> i32 {
    // SAFETY: the verifier checks every access to the context.
    let protocol = unsafe { core::ptr::addr_of!((*ctx.sock).protocol).read_volatile() };
    if protocol == PROTOCOL_TCP as u32 {
        let cookie = cookie(ctx.as_ptr());
        let place = cproxy_tcp_place(cookie);
        if let Some(owner) = TCP_OWNERS.get_ptr_mut(place) {
            // An exchange, not a store: the next owner of the place writes after this socket.
            compare_and_exchange(owner, cookie, FREE);
        }
    }
    ALLOW
}

/// The number that no other socket has, nor ever had since the machine started.
#[inline(always)]
fn cookie(ctx: *mut core::ffi::c_void) -> u64 {
    // SAFETY: a helper that takes the context.
    unsafe { bpf_get_socket_cookie(ctx) }
}

#[inline(always)]
fn at<'m>(place: u32) -> Option<&'m mut Translation> {
    // SAFETY: a live element. The place is the socket's, whose lock the kernel holds while a hook runs.
    unsafe { TCP_PEERS.get_ptr_mut(place)?.as_mut() }
}

/// The place that a socket has, or [`NOWHERE`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_tcp_place(cookie: u64) -> u32 {
    first_place(cookie, |place| is_owner(place, cookie))
}

/// The first of a socket's two places that is right, or [`NOWHERE`].
#[inline(always)]
fn first_place(cookie: u64, is_right: impl Fn(u32) -> bool) -> u32 {
    let [first, second] = tcp_places(cookie);
    if is_right(first) {
        return first;
    }
    if is_right(second) { second } else { NOWHERE }
}

#[inline(always)]
fn is_owner(place: u32, cookie: u64) -> bool {
    // SAFETY: the helper returned a pointer to a live value, which is written whole.
    TCP_OWNERS.get_ptr_mut(place).is_some_and(|owner| unsafe { owner.read_volatile() } == cookie)
}

/// The place that a socket has, or one that it has now, as if it had never been connected; [`NOWHERE`] if both are others'.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_take_tcp_place(cookie: u64) -> u32 {
    let known = cproxy_tcp_place(cookie);
    if known != NOWHERE {
        return known;
    }
    first_place(cookie, |place| take(place, cookie))
}

#[inline(always)]
fn take(place: u32, cookie: u64) -> bool {
    let Some(owner) = TCP_OWNERS.get_ptr_mut(place) else { return false };
    compare_and_exchange(owner, FREE, cookie) == FREE
}
