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
    peer_at_or_stored(ctx, find_place(cookie, cookie))
}

/// The same, for reading.
#[inline(always)]
pub(crate) fn peer(ctx: &SockAddrContext) -> Option<&Translation> {
    let cookie = socket_cookie(ctx.as_ptr());
    let place = find_place(cookie, tcp_moving(cookie));
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
        let place = find_place(cookie, cookie);
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

/// Returns the place that the socket owns, or [`NO_PLACE`]. If the agent is moving the peer, the owner is `to` from now
/// on: the cookie, so that the peer stays where it is and may be written, or [`tcp_moving`] of the cookie.
#[inline(always)]
fn find_place(cookie: u64, to: u64) -> u64 {
    let found = cproxy_tcp_place(cookie, to, 0);
    // Without a branch, since each of them has the verifier go through the rest twice.
    found * (found >> OWNED.trailing_zeros())
}

/// Bit beside a [`TcpPlaceId`] that the socket owns.
const OWNED: u64 = 1 << 30;

const _: () = assert!(NO_PLACE == 0);

/// Returns the [`TcpPlaceId`] that the socket owns, with [`OWNED`]. If the agent is moving the peer, the owner is `to`
/// from now on. Else it is [`NO_PLACE`] or, if the socket wants a place (`wants` is not 0), one that it now owns, with
/// [`OWNED`], or one that is free.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_tcp_place(cookie: u64, to: u64, wants: u64) -> u64 {
    // The agent removes the last level first.
    if !has_sockets_without_place() || TCP_MORE_OWNERS.get(0).is_none() {
        return place_in_first_level(cookie, wants != 0);
    }
    // The agent moves peers down, so the search goes down, too. The lowest free place has the warmest memory.
    let (mut level, mut found) = (TCP_LEVELS_MORE, NO_PLACE);
    loop {
        found = cproxy_tcp_place_in(level, cookie, to, found);
        if found & OWNED != 0 || level == 0 {
            return found;
        }
        level -= 1;
    }
}

/// The same where there is one level, in which no peer is being moved.
#[inline(always)]
fn place_in_first_level(cookie: u64, wants: bool) -> u64 {
    let [first, second] = tcp_places(cookie, 0);
    let Some(owner_of_first) = TCP_OWNERS.get_ptr_mut(first) else { return NO_PLACE };
    // SAFETY: the helper returned a pointer to a live value, which is written whole.
    let found = unsafe { owner_of_first.read_volatile() };
    if found == cookie {
        return owned(first);
    }
    let Some(owner_of_second) = TCP_OWNERS.get_ptr_mut(second) else { return NO_PLACE };
    // SAFETY: the same.
    if unsafe { owner_of_second.read_volatile() } == cookie {
        return owned(second);
    }
    if !wants {
        return NO_PLACE;
    }
    if found == TCP_PLACE_FREE && compare_and_exchange(owner_of_first, TCP_PLACE_FREE, cookie) == TCP_PLACE_FREE {
        return owned(first);
    }
    if compare_and_exchange(owner_of_second, TCP_PLACE_FREE, cookie) == TCP_PLACE_FREE {
        return owned(second);
    }
    NO_PLACE
}

/// A place of the first level, with [`OWNED`].
#[inline(always)]
fn owned(index: u32) -> u64 {
    u64::from(TcpPlaceId::new(0, index).0) | OWNED
}

/// The same in one of several levels, for a socket that wants a place; `other` if it has no such place.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_tcp_place_in(level: u32, cookie: u64, to: u64, other: u64) -> u64 {
    let moving = tcp_moving(cookie);
    let [first, second] = tcp_places(cookie, level).map(|index| TcpPlaceId::new(level, index).0.into());
    let owner_of_first = cproxy_exchange_tcp_owner(first, moving, to);
    if owner_of_first == cookie || owner_of_first == moving {
        return first | OWNED;
    }
    let owner_of_second = cproxy_exchange_tcp_owner(second, moving, to);
    if owner_of_second == cookie || owner_of_second == moving {
        return second | OWNED;
    }
    if owner_of_first == TCP_PLACE_FREE {
        return first;
    }
    if owner_of_second == TCP_PLACE_FREE { second } else { other }
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

/// Returns the [`TcpPlaceId`] that the socket owns, claimed if it owns none, or [`NO_PLACE`] if all are taken. A
/// claimed place may still hold the peer of its previous owner.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_claim_tcp_place(cookie: u64) -> u64 {
    let found = cproxy_tcp_place(cookie, cookie, 1);
    if found & OWNED != 0 {
        return found;
    }
    // Fails if another socket was faster; there is no place that is `NO_PLACE`.
    if cproxy_exchange_tcp_owner(found, TCP_PLACE_FREE, cookie) == TCP_PLACE_FREE {
        return found;
    }
    report_no_place();
    NO_PLACE
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
