//! Whom an unconnected UDP socket sends to: a few flows in the socket's own storage, the rest in `UDP_FLOWS`.

use aya_ebpf::{helpers::generated::bpf_get_socket_cookie, programs::SockAddrContext};
use cproxy_ebpf::{
    Counter, FLOW_FROM_BACKEND, FLOW_FROM_VIP, FLOW_IDLE_MAX, FLOWS_PER_SOCKET, FlowKey, FlowValue, Translation,
    UDP_HAS_OVERFLOWED, UdpState, flow_digest,
};

use crate::{
    maps::{UDP_FLOWS, UDP_SOCKETS, count},
    peer,
    sock_addr::Endpoint,
    subprogram::{digest, opaque, set},
    table::{Service, cproxy_has},
};

/// Not an index of a flow.
const NONE: u32 = FLOWS_PER_SOCKET as u32;

/// The socket's flows, if it has any.
#[inline(always)]
pub(crate) fn state(ctx: &SockAddrContext) -> Option<&mut UdpState> {
    // SAFETY: without the create flag the helper only looks up; what it returns is null or this socket's live storage,
    // which no other program changes while this one runs.
    unsafe { UDP_SOCKETS.get_ptr_mut(ctx).as_mut() }
}

/// The socket's flows, made if need be; `None` if there is no memory for them.
#[inline(always)]
pub(crate) fn state_or_new(ctx: &SockAddrContext) -> Option<&mut UdpState> {
    // SAFETY: as in `state`.
    unsafe { UDP_SOCKETS.get_or_insert_ptr_mut(ctx, None).as_mut() }
}

/// The index of the flow to this VIP.
#[inline(always)]
pub(crate) fn to(state: &UdpState, vip: &Endpoint) -> Option<usize> {
    index_of(state, cproxy_position(&state.vips, flow_digest(digest(vip))), |flow| vip.is(&flow.vip, flow.vip_port))
}

/// The index of the flow that datagrams of this backend belong to.
#[inline(always)]
pub(crate) fn from(state: &UdpState, backend: &Endpoint) -> Option<usize> {
    let wanted = flow_digest(digest(backend));
    index_of(state, cproxy_position(&state.backends, wanted), |flow| backend.is(&flow.backend, flow.backend_port))
}

/// A digest finds a flow; only the addresses say that it is the right one.
#[inline(always)]
fn index_of(state: &UdpState, found: u32, is_meant: impl Fn(&Translation) -> bool) -> Option<usize> {
    let index = found as usize;
    // SAFETY: in range. (A checked access is one that the verifier cannot follow.)
    (index < FLOWS_PER_SOCKET && is_meant(unsafe { state.flows.get_unchecked(index) })).then_some(index)
}

/// The index of a digest, or [`FLOWS_PER_SOCKET`].
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_position(digests: *const [u32; FLOWS_PER_SOCKET], digest: u32) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(digests) = (unsafe { digests.as_ref() }) else { return NONE };
    digests.iter().position(|&known| known == digest).map_or(NONE, |index| index as u32)
}

/// Marks a flow as the one that was used last; what its backend sends is then for its VIP.
#[inline(always)]
pub(crate) fn touch(state: &mut UdpState, index: usize) {
    cproxy_touch(state, index as u32);
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_touch(state: *mut UdpState, index: u32) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(state) = (unsafe { state.as_mut() }) else { return 0 };
    // The mask tells the verifier what the caller knows.
    let index = opaque(index as u64) as usize & (FLOWS_PER_SOCKET - 1);
    state.clock = state.clock.wrapping_add(1);
    // SAFETY: in range.
    unsafe {
        *state.used.get_unchecked_mut(index) = state.clock;
        if *state.backends.get_unchecked(index) == 0 {
            let flow = state.flows.get_unchecked(index);
            let wanted = flow_digest(digest(&Endpoint::new(&flow.backend, flow.backend_port)));
            cproxy_shadow(state, wanted);
            *state.backends.get_unchecked_mut(index) = wanted;
        }
    }
    0
}

/// The flow's backend serves no more: only what is under way from there is still the VIP's.
#[inline(always)]
pub(crate) fn retire(state: &mut UdpState, index: usize) {
    // SAFETY: in range, as whoever has the index knows.
    unsafe { *state.vips.get_unchecked_mut(index) = 0 };
}

/// What comes from this address from now on is nobody else's.
#[inline(always)]
pub(crate) fn shadow(state: &mut UdpState, backend: &Endpoint) {
    cproxy_shadow(state, flow_digest(digest(backend)));
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_shadow(state: *mut UdpState, digest: u32) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(state) = (unsafe { state.as_mut() }) else { return 0 };
    let index = cproxy_position(&state.backends, digest) as usize;
    if index < FLOWS_PER_SOCKET {
        // SAFETY: in range.
        unsafe { *state.backends.get_unchecked_mut(index) = 0 };
    }
    0
}

/// Remembers a flow in the socket's storage, or, if all of that is in use, in `UDP_FLOWS`.
#[inline(always)]
pub(crate) fn remember(ctx: &SockAddrContext, state: &mut UdpState, translation: &Translation) {
    if cproxy_remember(state, translation) == 0 {
        overflow(ctx, state, translation);
    }
}

/// 1 if there was room. One place is looked at, the next one the next time: it is taken if it is unused, if its backend
/// serves no more, or if it has been idle for long.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_remember(state: *mut UdpState, translation: *const Translation) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind each pointer.
    let (Some(state), Some(translation)) = (unsafe { (state.as_mut(), translation.as_ref()) }) else { return 0 };
    let index = opaque(state.next as u64) as usize & (FLOWS_PER_SOCKET - 1);
    state.next = state.next.wrapping_add(1);
    // SAFETY: in range.
    unsafe {
        let idle = state.clock.wrapping_sub(*state.used.get_unchecked(index));
        if *state.vips.get_unchecked(index) != 0 && idle < FLOW_IDLE_MAX {
            return 0;
        }
        set(state.flows.get_unchecked_mut(index), translation);
        *state.vips.get_unchecked_mut(index) =
            flow_digest(digest(&Endpoint::new(&translation.vip, translation.vip_port)));
        *state.backends.get_unchecked_mut(index) = 0;
    }
    cproxy_touch(state, index as u32);
    1
}

/// A socket's cookie: its name in `UDP_FLOWS`.
#[inline(always)]
fn cookie(ctx: &SockAddrContext) -> u64 {
    // SAFETY: a helper that takes the context.
    unsafe { bpf_get_socket_cookie(ctx.sock_addr.cast()) }
}

/// Puts a flow, in both directions, into `UDP_FLOWS`.
#[inline(always)]
fn overflow(ctx: &SockAddrContext, state: &mut UdpState, flow: &Translation) {
    state.flags |= UDP_HAS_OVERFLOWED;
    cproxy_shadow(state, flow_digest(digest(&Endpoint::new(&flow.backend, flow.backend_port))));
    cproxy_overflow(cookie(ctx), flow);
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_overflow(socket_cookie: u64, flow: *const Translation) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(flow) = (unsafe { flow.as_ref() }) else { return 0 };
    let to = FlowKey { socket_cookie, address: flow.vip, port: flow.vip_port, direction: FLOW_FROM_VIP, zero: 0 };
    cproxy_put(&to, &FlowValue { address: flow.backend, port: flow.backend_port, zero: 0, slot: flow.slot });
    let (address, port) = (flow.backend, flow.backend_port);
    let from = FlowKey { socket_cookie, address, port, direction: FLOW_FROM_BACKEND, zero: 0 };
    cproxy_put(&from, &FlowValue { address: flow.vip, port: flow.vip_port, zero: 0, slot: 0 });
    0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_put(key: *const FlowKey, value: *const FlowValue) -> u32 {
    const NOEXIST: u64 = 1;
    const EXIST: u64 = 2;
    // SAFETY: null is checked, and the verifier knows how much memory is behind each pointer.
    let (Some(key), Some(value)) = (unsafe { (key.as_ref(), value.as_ref()) }) else { return 0 };
    if UDP_FLOWS.insert(key, value, EXIST).is_err() {
        let is_inserted = UDP_FLOWS.insert(key, value, NOEXIST).is_ok();
        count(if is_inserted { Counter::UdpFlowsInserted } else { Counter::StateLost });
    }
    0
}

/// The flow to this VIP in `UDP_FLOWS`, if its backend still serves. Puts it into `flow`.
#[inline(always)]
pub(crate) fn overflowed_to(
    ctx: &SockAddrContext,
    state: &mut UdpState,
    vip: &Endpoint,
    service: &Service,
    flow: &mut Translation,
) -> bool {
    state.flags & UDP_HAS_OVERFLOWED != 0 && cproxy_overflow_to(cookie(ctx), vip, flow, service.word(), state) != 0
}

/// 1 if there is one.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_overflow_to(
    socket_cookie: u64,
    vip: *const Endpoint,
    flow: *mut Translation,
    word: u64,
    state: *mut UdpState,
) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind each pointer.
    let (Some(vip), Some(flow)) = (unsafe { (vip.as_ref(), flow.as_mut()) }) else { return 0 };
    let (address, port) = (vip.address, vip.port);
    let key = FlowKey { socket_cookie, address, port, direction: FLOW_FROM_VIP, zero: 0 };
    let Some(found) = UDP_FLOWS.get_ptr(&key) else { return 0 };
    // SAFETY: the helper returned a pointer to a value of that size; an eviction may replace its content, which is then
    // found to be no backend of the Service.
    let found = unsafe { &*found };
    peer::set_translated(flow, vip, &found.address, found.port, found.slot);
    if cproxy_has(word, flow) == 0 {
        // The flow's next place may be among the socket's own; if the backend came back, this one would be found.
        let is_removed = UDP_FLOWS.remove(&key).is_ok();
        count(if is_removed { Counter::UdpFlowsRemoved } else { Counter::StateLost });
        return 0;
    }
    // Written anew, it is not evicted while it is in use, and what its backend sends is for this VIP.
    cproxy_overflow(socket_cookie, flow);
    cproxy_shadow(state, flow_digest(digest(&Endpoint::new(&flow.backend, flow.backend_port))));
    1
}

/// The VIP for which datagrams of this backend are, according to `UDP_FLOWS`.
#[inline(always)]
pub(crate) fn overflowed_from(ctx: &SockAddrContext, state: &UdpState, backend: &Endpoint) -> Option<Endpoint> {
    if state.flags & UDP_HAS_OVERFLOWED == 0 {
        return None;
    }
    let (address, port) = (backend.address, backend.port);
    let found = UDP_FLOWS.get_ptr(FlowKey {
        socket_cookie: cookie(ctx),
        address,
        port,
        direction: FLOW_FROM_BACKEND,
        zero: 0,
    })?;
    // SAFETY: as in `overflowed_to`; a datagram that is read while its flow is being evicted may show another VIP of
    // the map, as it would show none a moment later.
    let found = unsafe { found.read_volatile() };
    Some(Endpoint::new(&found.address, found.port))
}
