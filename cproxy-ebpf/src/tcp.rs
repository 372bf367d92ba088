//! Peers of TCP sockets. A socket claims one of its places at its first `connect()` to a Service and keeps it until it
//! is closed. If all are taken, its peer is in socket storage. The kernel's own sockets (those behind MPTCP) run no
//! release hook: the agent frees their places.
//!
//! The places are in levels. `TCP_OWNERS` and `TCP_PEERS` are the first one, and the only one until a socket has found
//! no place there. The agent adds further ones while there are many connections. It removes the last one when there are
//! few, and moves the peers that are left in it to the levels below (crates/datapath/src/bpf/tcp_move.rs).
//!
//! Socket storage for all would be simpler, but it would cost more than the rest of the programs: the kernel allocates
//! it for each socket and frees it after a grace period, so its memory is always cold (docs/decisions/020).

use aya_ebpf::{
    EbpfContext as _,
    bindings::BPF_RB_FORCE_WAKEUP,
    helpers::generated::bpf_get_socket_cookie,
    macros::cgroup_sock,
    programs::{SockAddrContext, SockContext},
};
use cproxy_ebpf::{
    PROTOCOL_TCP, TCP_LEVELS_MORE, TCP_PLACE_CLOSED, TCP_PLACE_FREE, TCP_WITHOUT_PLACE, TcpPlaceId, Translation,
    tcp_moving, tcp_places,
};

use crate::{
    maps::{TCP_FULL, TCP_MORE_OWNERS, TCP_OWNERS, tcp_peer},
    observe,
    peer::{self, is_agents},
    sock_addr::ALLOW,
    subprogram::{compare_and_exchange, increment},
};

/// No [`TcpPlaceId`].
const NO_PLACE: u64 = TcpPlaceId::NONE.0 as u64;

/// Translation of the socket's last connect, for writing; `None` if there is none, and for the agent's own sockets.
#[inline(always)]
pub(crate) fn peer_to_replace(ctx: &SockAddrContext) -> Option<&mut Translation> {
    let cookie = socket_cookie(ctx.as_ptr());
    peer_at_or_stored(ctx, cproxy_find_tcp_place(cookie, cookie))
}

/// The same, for reading.
#[inline(always)]
pub(crate) fn peer(ctx: &SockAddrContext) -> Option<&Translation> {
    let cookie = socket_cookie(ctx.as_ptr());
    let place = cproxy_find_tcp_place(cookie, tcp_moving(cookie));
    peer_at_or_stored(ctx, place).map(|peer| &*peer)
}

#[inline(always)]
fn peer_at_or_stored(ctx: &SockAddrContext, place: u64) -> Option<&mut Translation> {
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
    peer::socket_state_or_new(ctx).map(|state| &mut state.peer)
}

/// True once a socket has found no place. Until then no socket storage holds a TCP peer, and there is no further level,
/// so none is looked up.
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
        let place = cproxy_find_tcp_place(cookie, cookie);
        if place != NO_PLACE {
            observe::closed(&ctx, || peer_at(place));
            // An exchange orders all writes of this socket before those of the next owner; a store would not.
            if cproxy_exchange_tcp_owner(place, cookie, TCP_PLACE_FREE) != cookie {
                // The agent has begun to move it since it was found.
                cproxy_exchange_tcp_owner(place, tcp_moving(cookie), TCP_PLACE_FREE);
            }
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
fn peer_at<'m>(place: u64) -> Option<&'m mut Translation> {
    // SAFETY: a live element. Only its owner uses it, and the kernel holds that socket's lock while a hook runs.
    unsafe { tcp_peer(TcpPlaceId(place as u32))?.as_mut() }
}

/// Returns the [`TcpPlaceId`] that the socket owns, or [`NO_PLACE`]. If the agent is moving the peer, the owner is `to`
/// from now on: the cookie, so that the peer stays where it is and may be written, or [`tcp_moving`] of the cookie.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_find_tcp_place(cookie: u64, to: u64) -> u64 {
    let place = first_place_that(cookie, |index| is_owner(index, cookie));
    if place != NO_PLACE || !has_sockets_without_place() {
        return place;
    }
    cproxy_further_tcp_place(cookie, tcp_moving(cookie), to)
}

/// Returns the [`TcpPlaceId`] that the socket owns, or that had the owner `from` and has the owner `to` from now on;
/// else [`NO_PLACE`]. The agent moves peers down, so the search goes down, too, and ends in the first level.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_further_tcp_place(cookie: u64, from: u64, to: u64) -> u64 {
    // The last level goes first.
    if TCP_MORE_OWNERS.get(0).is_none() {
        return NO_PLACE;
    }
    for level in [2, 1] {
        let place = cproxy_tcp_place_in(level, cookie, from, to);
        if place != NO_PLACE {
            return place;
        }
    }
    cproxy_tcp_place_in(0, cookie, from, to)
}

const _: () = assert!(TCP_LEVELS_MORE == 2, "these are all levels");

/// The same in one level.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_tcp_place_in(level: u32, cookie: u64, from: u64, to: u64) -> u64 {
    for index in tcp_places(cookie, level) {
        let place = TcpPlaceId::new(level, index).0.into();
        let found = cproxy_exchange_tcp_owner(place, from, to);
        if found == from || found == cookie {
            return place;
        }
    }
    NO_PLACE
}

/// Replaces the owner `from` of a place by `to`. Returns the owner that was found, [`TCP_PLACE_CLOSED`] if there is no
/// such place.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_exchange_tcp_owner(place: u64, from: u64, to: u64) -> u64 {
    let Some(owner) = owner_at(TcpPlaceId(place as u32)) else { return TCP_PLACE_CLOSED };
    // SAFETY: the helper returned a pointer to a live value, which is written whole.
    let found = unsafe { owner.read_volatile() };
    // Most owners are others, and a read leaves the memory to all CPUs.
    if found == from { compare_and_exchange(owner, from, to) } else { found }
}

#[inline(always)]
fn owner_at(place: TcpPlaceId) -> Option<*mut u64> {
    match place.level() {
        0 => TCP_OWNERS.get_ptr_mut(place.index()),
        level => TCP_MORE_OWNERS.get_value_ptr_mut(level - 1, &place.index()),
    }
}

/// The first of the socket's two places in the first level that fits, or [`NO_PLACE`].
#[inline(always)]
fn first_place_that(cookie: u64, fits: impl Fn(u32) -> bool) -> u64 {
    let [first, second] = tcp_places(cookie, 0);
    if fits(first) {
        return TcpPlaceId::new(0, first).0.into();
    }
    if fits(second) { TcpPlaceId::new(0, second).0.into() } else { NO_PLACE }
}

#[inline(always)]
fn is_owner(index: u32, cookie: u64) -> bool {
    // SAFETY: the helper returned a pointer to a live value, which is written whole.
    TCP_OWNERS.get_ptr_mut(index).is_some_and(|owner| unsafe { owner.read_volatile() } == cookie)
}

/// Returns the [`TcpPlaceId`] that the socket owns, claimed if it owns none, or [`NO_PLACE`] if all are taken. A
/// claimed place may still hold the peer of its previous owner.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_claim_tcp_place(cookie: u64) -> u64 {
    let owned = cproxy_find_tcp_place(cookie, cookie);
    if owned != NO_PLACE {
        return owned;
    }
    let place = first_place_that(cookie, |index| claim_place(index, cookie));
    if place != NO_PLACE {
        return place;
    }
    let place = cproxy_further_tcp_place(cookie, TCP_PLACE_FREE, cookie);
    if place == NO_PLACE {
        report_no_place();
    }
    place
}

#[inline(always)]
fn claim_place(index: u32, cookie: u64) -> bool {
    let Some(owner) = TCP_OWNERS.get_ptr_mut(index) else { return false };
    compare_and_exchange(owner, TCP_PLACE_FREE, cookie) == TCP_PLACE_FREE
}

/// Counts a socket without a place, and wakes the agent by a message, unless it has not read the last one yet.
#[inline(always)]
fn report_no_place() {
    if let Some(count) = TCP_OWNERS.get_ptr_mut(TCP_WITHOUT_PLACE) {
        increment(count);
    }
    if let Some(message) = TCP_FULL.reserve(0) {
        message.submit(BPF_RB_FORCE_WAKEUP.into());
    }
}
