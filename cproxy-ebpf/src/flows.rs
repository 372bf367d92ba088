//! Flows of unconnected UDP sockets: a few in the socket's own storage, the rest in `UDP_FLOWS`.

use aya_ebpf::{
    helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie},
    programs::SockAddrContext,
};
use cproxy_ebpf::{
    Affinity, Counter, FLOW_FROM_BACKEND, FLOW_FROM_VIP, FLOW_IDLE_MAX, FLOWS_PER_SOCKET, Flow, FlowKey, FlowValue,
    SetWord, Translation, UDP_HAS_OVERFLOWED, UdpState, flow_digest,
};

use crate::{
    endpoint::{Endpoint, digest},
    lookup::Service,
    maps::{UDP_FLOWS, UDP_SOCKETS, count},
    search::{NOWHERE, cproxy_digest_at, cproxy_has},
    select::{cproxy_affine, cproxy_any},
    subprogram::{copy, opaque},
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

/// The flow to this VIP.
#[inline(always)]
pub(crate) fn to<'s>(state: &'s mut UdpState, vip: &Endpoint) -> Option<(usize, &'s mut Flow)> {
    let index = position(&state.vips, flow_digest(digest(vip)))?;
    // SAFETY: in range. (A checked access is one that the verifier cannot follow.) A digest finds a flow; only the
    // addresses say that it is the right one.
    let flow = unsafe { state.flows.get_unchecked_mut(index) };
    vip.is(&flow.translation.vip, flow.translation.vip_port).then_some((index, flow))
}

/// The flow that datagrams of this backend belong to.
#[inline(always)]
pub(crate) fn from<'s>(state: &'s UdpState, backend: &Endpoint) -> Option<&'s Translation> {
    let index = position(&state.backends, flow_digest(digest(backend)))?;
    // SAFETY: as in `to`.
    let flow = unsafe { &state.flows.get_unchecked(index).translation };
    backend.is(&flow.backend, flow.backend_port).then_some(flow)
}

/// The index of a digest. The verifier must see it compared: the compiler knows how large it can be, and would not.
#[inline(always)]
fn position(digests: &[u32; FLOWS_PER_SOCKET], digest: u32) -> Option<usize> {
    let index = opaque(cproxy_position(digests, digest) as u64) as usize;
    (index < FLOWS_PER_SOCKET).then_some(index)
}

/// The index of a digest, or [`FLOWS_PER_SOCKET`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_position(digests: *const [u32; FLOWS_PER_SOCKET], digest: u32) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(digests) = (unsafe { digests.as_ref() }) else { return NONE };
    digests.iter().position(|&known| known == digest).map_or(NONE, |index| index as u32)
}

/// Marks a flow as the one that was used last; what its backend sends is then for its VIP.
#[inline(always)]
pub(crate) fn touch(state: &mut UdpState, index: usize) {
    state.clock = state.clock.wrapping_add(1);
    // SAFETY: in range: each caller has found the index among the flows.
    unsafe {
        *state.used.get_unchecked_mut(index) = state.clock;
        if *state.backends.get_unchecked(index) == 0 {
            cproxy_claim(state, index as u32);
        }
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_claim(state: *mut UdpState, index: u32) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(state) = (unsafe { state.as_mut() }) else { return 0 };
    // The caller has checked it; the verifier must see it checked here.
    let index = opaque(index as u64) as usize;
    if index >= FLOWS_PER_SOCKET {
        return 0;
    }
    // SAFETY: in range.
    unsafe {
        let flow = &state.flows.get_unchecked(index).translation;
        let wanted = flow_digest(digest(&Endpoint::new(&flow.backend, flow.backend_port)));
        cproxy_shadow(state, wanted);
        *state.backends.get_unchecked_mut(index) = wanted;
    }
    0
}

/// The flow's backend serves no more: only what is under way from there is still the VIP's.
#[inline(always)]
pub(crate) fn retire(state: &mut UdpState, index: usize) {
    // SAFETY: in range: each caller has found the index among the flows.
    unsafe { *state.vips.get_unchecked_mut(index) = 0 };
}

/// Nothing is sent to this VIP by its flow any more.
#[inline(always)]
pub(crate) fn retire_to(state: &mut UdpState, vip: &Endpoint) {
    if let Some(index) = position(&state.vips, flow_digest(digest(vip))) {
        retire(state, index);
    }
}

/// Datagrams of this address from now on belong to no VIP.
#[inline(always)]
pub(crate) fn shadow(state: &mut UdpState, backend: &Endpoint) {
    cproxy_shadow(state, flow_digest(digest(backend)));
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_shadow(state: *mut UdpState, digest: u32) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(state) = (unsafe { state.as_mut() }) else { return 0 };
    // Each datagram that is sent elsewhere makes the other flows older.
    state.clock = state.clock.wrapping_add(1);
    if let Some(index) = position(&state.backends, digest) {
        // SAFETY: in range.
        unsafe { *state.backends.get_unchecked_mut(index) = 0 };
    }
    0
}

/// Remembers a flow in the socket's storage, or, if all of that is in use, in `UDP_FLOWS`.
#[inline(always)]
pub(crate) fn remember(ctx: &SockAddrContext, state: &mut UdpState, flow: &Translation, service: &Service) {
    if cproxy_remember(state, flow, service.epoch(), 1) == 0 {
        overflow(ctx, state, flow);
    }
}

/// Remembers a past peer of a connected socket, for datagrams under way.
#[inline(always)]
pub(crate) fn remember_past(state: &mut UdpState, flow: &Translation) {
    cproxy_remember(state, flow, 0, 0);
}

/// A place, and how far the next one is, in 256ths of all.
const STEP: u32 = 256 / FLOWS_PER_SOCKET as u32 + 1;

/// 1 if there was room. One place is looked at, the next one the next time: it is taken if it is unused, if nothing is
/// sent by its flow any more, or if that has been idle for long. `sends`: 1 if something is sent by the new one.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_remember(state: *mut UdpState, translation: *const Translation, epoch: u32, sends: u32) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind each pointer.
    let (Some(state), Some(translation)) = (unsafe { (state.as_mut(), translation.as_ref()) }) else { return 0 };
    // No comparison: the verifier would follow both its ways.
    let index = (opaque((state.next & 0xff) as u64) as usize & 0xff) * FLOWS_PER_SOCKET / 256;
    state.next = state.next.wrapping_add(STEP);
    // SAFETY: in range.
    unsafe {
        let idle = state.clock.wrapping_sub(*state.used.get_unchecked(index));
        if *state.vips.get_unchecked(index) != 0 && idle < FLOW_IDLE_MAX {
            return 0;
        }
        let flow = state.flows.get_unchecked_mut(index);
        copy(&mut flow.translation, translation);
        flow.epoch = epoch;
        let vip = flow_digest(digest(&Endpoint::new(&translation.vip, translation.vip_port)));
        *state.vips.get_unchecked_mut(index) = vip * sends;
        *state.backends.get_unchecked_mut(index) = 0;
        *state.used.get_unchecked_mut(index) = state.clock;
    }
    cproxy_claim(state, index as u32);
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
    let (vip, backend) = (Endpoint::new(&flow.vip, flow.vip_port), Endpoint::new(&flow.backend, flow.backend_port));
    cproxy_put(socket_cookie, &vip, &backend, FLOW_FROM_VIP as u32, flow.slot);
    cproxy_put(socket_cookie, &backend, &vip, FLOW_FROM_BACKEND as u32, 0)
}

/// One direction. The key lies on the stack: before 6.2 a helper takes none from memory that a function was given.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_put(
    socket_cookie: u64,
    from: *const Endpoint,
    to: *const Endpoint,
    direction: u32,
    slot: u32,
) -> u32 {
    const NOEXIST: u64 = 1;
    const EXIST: u64 = 2;
    // SAFETY: null is checked, and the verifier knows how much memory is behind each pointer.
    let (Some(from), Some(to)) = (unsafe { (from.as_ref(), to.as_ref()) }) else { return 0 };
    let (address, port, direction) = (from.address, from.port, direction as u16);
    let key = FlowKey { socket_cookie, address, port, direction, zero: 0 };
    let value = FlowValue { address: to.address, port: to.port, zero: 0, slot };
    if UDP_FLOWS.insert(&key, &value, EXIST).is_err() {
        let is_inserted = UDP_FLOWS.insert(&key, &value, NOEXIST).is_ok();
        count(if is_inserted { Counter::UdpFlowsInserted } else { Counter::StateLost });
    }
    0
}

/// The slot of the backend that the socket has for this VIP according to `UDP_FLOWS`, if that still serves; or
/// [`NOWHERE`].
#[inline(always)]
pub(crate) fn overflowed_to(ctx: &SockAddrContext, state: &mut UdpState, vip: &Endpoint, service: &Service) -> u32 {
    if state.flags & UDP_HAS_OVERFLOWED == 0 {
        return NOWHERE;
    }
    cproxy_overflow_to(cookie(ctx), vip, service.word(), state)
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_overflow_to(socket_cookie: u64, vip: *const Endpoint, word: u64, state: *mut UdpState) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(vip) = (unsafe { vip.as_ref() }) else { return NOWHERE };
    let (address, port) = (vip.address, vip.port);
    let key = FlowKey { socket_cookie, address, port, direction: FLOW_FROM_VIP, zero: 0 };
    let Some(found) = UDP_FLOWS.get_ptr(&key) else { return NOWHERE };
    // SAFETY: the helper returned a pointer to a value of that size; an eviction may replace its content, which is then
    // found to be no backend of the Service.
    let found = unsafe { &*found };
    let (backend, backend_port, slot) = (found.address, found.port, found.slot);
    let mut flow = Translation { vip: address, backend, vip_port: port, backend_port, slot };
    if cproxy_has(word, &raw mut flow) == 0 {
        // The flow's next place may be among the socket's own; if the backend came back, this one would be found.
        let is_removed = UDP_FLOWS.remove(&key).is_ok();
        count(if is_removed { Counter::UdpFlowsRemoved } else { Counter::StateLost });
        return NOWHERE;
    }
    // Written anew, it is not evicted while it is in use, and what its backend sends is for this VIP.
    cproxy_overflow(socket_cookie, &flow);
    cproxy_shadow(state, flow_digest(digest(&Endpoint::new(&backend, backend_port))));
    flow.slot
}

/// Datagrams of this address from now on do not belong to the VIP that `UDP_FLOWS` has for it.
#[inline(always)]
pub(crate) fn forget_overflowed(ctx: &SockAddrContext, state: &UdpState, backend: &Endpoint) {
    if state.flags & UDP_HAS_OVERFLOWED != 0 {
        cproxy_forget_from(cookie(ctx), backend);
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_forget_from(socket_cookie: u64, backend: *const Endpoint) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(backend) = (unsafe { backend.as_ref() }) else { return 0 };
    let (address, port) = (backend.address, backend.port);
    let key = FlowKey { socket_cookie, address, port, direction: FLOW_FROM_BACKEND, zero: 0 };
    if UDP_FLOWS.remove(&key).is_ok() {
        count(Counter::UdpFlowsRemoved);
    }
    0
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

impl Service {
    /// The slot of the backend that the client has; else of any, or of the next one if one of these flows has that: two
    /// VIPs with one backend could not be told apart by its replies.
    #[inline(always)]
    pub(crate) fn choose_beside(&self, ctx: &SockAddrContext, flows: &UdpState) -> u32 {
        // SAFETY: a helper that takes the context.
        let netns_cookie = unsafe { bpf_get_netns_cookie(ctx.sock_addr.cast()) };
        cproxy_beside(flows, self.word.0, self.affinity.0, netns_cookie)
    }
}

/// See [`Service::choose_beside`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_beside(flows: *const UdpState, word: u64, affinity: u64, netns_cookie: u64) -> u32 {
    if Affinity(affinity).seconds() != 0 {
        return cproxy_affine(word, affinity, netns_cookie);
    }
    let first = cproxy_any(word);
    let word = SetWord(word);
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(flows) = (unsafe { flows.as_ref() }) else { return first };
    if cproxy_position(&flows.backends, flow_digest(cproxy_digest_at(first))) == FLOWS_PER_SOCKET as u32 {
        return first;
    }
    // Whether the next one is free is not asked: of two VIPs with two backends it is.
    let next = first + 1;
    if next < word.first_slot() + word.eligible() { next } else { word.first_slot() }
}
