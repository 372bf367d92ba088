//! Flows of unconnected UDP sockets: a few in the socket's own storage, the rest in `UDP_FLOWS`.
//!
//! A flow works in two directions. Datagrams to its VIP go to its backend until it is retired. Datagrams of its backend
//! show its VIP as long as it claims that backend; of all flows of a socket, only one claims a backend.

use aya_ebpf::{
    bindings::{BPF_EXIST, BPF_NOEXIST},
    helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie},
    programs::SockAddrContext,
};
use cproxy_ebpf::{
    Affinity, Counter, FLOW_FROM_BACKEND, FLOW_FROM_VIP, FLOW_IDLE_MAX, FLOWS_PER_SOCKET, Flow, FlowKey, FlowValue,
    SetWord, Translation, UDP_HAS_OVERFLOWED, UdpState, flow_digest,
};

use crate::{
    endpoint::Endpoint,
    lookup::FoundSet,
    maps::{UDP_FLOWS, UDP_SOCKETS, count},
    search::{NO_SLOT, cproxy_confirm_backend, cproxy_slot_digest},
    select::{cproxy_choose, cproxy_choose_by_affinity},
    subprogram::{copy, opaque},
};

/// Index of no flow.
const NO_FLOW: u32 = FLOWS_PER_SOCKET as u32;

/// Flows of the socket, if it has any.
#[inline(always)]
pub(crate) fn udp_state(ctx: &SockAddrContext) -> Option<&mut UdpState> {
    // SAFETY: without the create flag the helper only looks up. It returns null or the socket's live storage, which no
    // other program changes while this one runs.
    unsafe { UDP_SOCKETS.get_ptr_mut(ctx).as_mut() }
}

/// Flows of the socket, created empty if it has none; `None` if the kernel has no memory for them.
#[inline(always)]
pub(crate) fn udp_state_or_new(ctx: &SockAddrContext) -> Option<&mut UdpState> {
    // SAFETY: as in `udp_state`.
    unsafe { UDP_SOCKETS.get_or_insert_ptr_mut(ctx, None).as_mut() }
}

/// Flow by which datagrams to this VIP are sent, and its index.
#[inline(always)]
pub(crate) fn find_by_vip<'s>(state: &'s mut UdpState, vip: &Endpoint) -> Option<(usize, &'s mut Flow)> {
    let index = find_digest(&state.vips, flow_digest(vip.digest()))?;
    // SAFETY: in range. (The verifier cannot follow the code of a checked access.)
    let flow = unsafe { state.flows.get_unchecked_mut(index) };
    // Another VIP may have the same digest.
    vip.matches(&flow.translation.vip, flow.translation.vip_port).then_some((index, flow))
}

/// Flow that claims this backend.
#[inline(always)]
pub(crate) fn find_by_backend<'s>(state: &'s UdpState, backend: &Endpoint) -> Option<&'s Translation> {
    let index = find_digest(&state.backends, flow_digest(backend.digest()))?;
    // SAFETY: as in `find_by_vip`.
    let flow = unsafe { &state.flows.get_unchecked(index).translation };
    backend.matches(&flow.backend, flow.backend_port).then_some(flow)
}

/// Index of a flow by its digest. The verifier knows nothing about the result of a subprogram and needs this
/// comparison; [`opaque`] keeps the compiler, which knows the largest result, from removing it.
#[inline(always)]
fn find_digest(digests: &[u32; FLOWS_PER_SOCKET], digest: u32) -> Option<usize> {
    let index = opaque(cproxy_find_digest(digests, digest) as u64) as usize;
    (index < FLOWS_PER_SOCKET).then_some(index)
}

/// Returns the index of a digest, or [`NO_FLOW`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_find_digest(digests: *const [u32; FLOWS_PER_SOCKET], digest: u32) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(digests) = (unsafe { digests.as_ref() }) else { return NO_FLOW };
    digests.iter().position(|&known| known == digest).map_or(NO_FLOW, |index| index as u32)
}

/// Records that a datagram is sent by this flow. The flow claims its backend if it has lost it.
#[inline(always)]
pub(crate) fn record_use(state: &mut UdpState, index: usize) {
    state.clock = state.clock.wrapping_add(1);
    // SAFETY: in range: each caller got the index from `find_digest`.
    unsafe {
        *state.used.get_unchecked_mut(index) = state.clock;
        if *state.backends.get_unchecked(index) == 0 {
            cproxy_claim_backend(state, index as u32);
        }
    }
}

/// Lets the flow at this index claim its backend: datagrams of the backend show this flow's VIP.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_claim_backend(state: *mut UdpState, index: u32) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(state) = (unsafe { state.as_mut() }) else { return 0 };
    // The caller has checked the index, but the verifier must see a check here.
    let index = opaque(index as u64) as usize;
    if index >= FLOWS_PER_SOCKET {
        return 0;
    }
    // SAFETY: in range.
    unsafe {
        let flow = &state.flows.get_unchecked(index).translation;
        let wanted = flow_digest(Endpoint::new(&flow.backend, flow.backend_port).digest());
        cproxy_unclaim_backend(state, wanted);
        *state.backends.get_unchecked_mut(index) = wanted;
    }
    0
}

/// Retires a flow whose backend no longer serves: nothing more is sent by it, but replies under way still show its VIP.
#[inline(always)]
pub(crate) fn retire(state: &mut UdpState, index: usize) {
    // SAFETY: in range: each caller got the index from `find_digest`.
    unsafe { *state.vips.get_unchecked_mut(index) = 0 };
}

/// Retires the flow to this VIP, if there is one.
#[inline(always)]
pub(crate) fn retire_vip(state: &mut UdpState, vip: &Endpoint) {
    if let Some(index) = find_digest(&state.vips, flow_digest(vip.digest())) {
        retire(state, index);
    }
}

/// Ends the claim to this backend: its datagrams show its own address.
#[inline(always)]
pub(crate) fn unclaim_backend(state: &mut UdpState, backend: &Endpoint) {
    cproxy_unclaim_backend(state, flow_digest(backend.digest()));
}

/// Ends the claim to the backend with this [`flow_digest`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_unclaim_backend(state: *mut UdpState, digest: u32) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(state) = (unsafe { state.as_mut() }) else { return 0 };
    // A datagram that is sent by no flow counts, too: the flows grow older.
    state.clock = state.clock.wrapping_add(1);
    if let Some(index) = find_digest(&state.backends, digest) {
        // SAFETY: in range.
        unsafe { *state.backends.get_unchecked_mut(index) = 0 };
    }
    0
}

/// Inserts a flow into the socket's storage, or into `UDP_FLOWS` if there is no room.
#[inline(always)]
pub(crate) fn insert(ctx: &SockAddrContext, state: &mut UdpState, flow: &Translation, set: &FoundSet) {
    if cproxy_insert_flow(state, flow, set.epoch(), 1) == 0 {
        insert_overflow(ctx, state, flow);
    }
}

/// Inserts a flow that is retired from the start, if there is room: only replies under way show its VIP.
#[inline(always)]
pub(crate) fn insert_retired(state: &mut UdpState, flow: &Translation) {
    cproxy_insert_flow(state, flow, 0, 0);
}

/// Distance from the index of one new flow to that of the next, in 256ths of all flows.
const INDEX_STEP: u32 = 256 / FLOWS_PER_SOCKET as u32 + 1;

/// Inserts a flow that claims its backend. `is_active`: 0 for a flow that is retired from the start, else 1. Returns 1
/// if there was room.
///
/// It tries one index only, and the next one the next time. The flow there gives way if it is unused, retired, or idle
/// for [`FLOW_IDLE_MAX`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_insert_flow(
    state: *mut UdpState,
    translation: *const Translation,
    epoch: u32,
    is_active: u32,
) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind each pointer.
    let (Some(state), Some(translation)) = (unsafe { (state.as_mut(), translation.as_ref()) }) else { return 0 };
    // Computed without a branch, of which the verifier would follow both sides.
    let index = (opaque((state.next & 0xff) as u64) as usize & 0xff) * FLOWS_PER_SOCKET / 256;
    state.next = state.next.wrapping_add(INDEX_STEP);
    // SAFETY: in range.
    unsafe {
        let idle = state.clock.wrapping_sub(*state.used.get_unchecked(index));
        if *state.vips.get_unchecked(index) != 0 && idle < FLOW_IDLE_MAX {
            return 0;
        }
        let flow = state.flows.get_unchecked_mut(index);
        copy(&mut flow.translation, translation);
        flow.epoch = epoch;
        let vip = flow_digest(Endpoint::new(&translation.vip, translation.vip_port).digest());
        *state.vips.get_unchecked_mut(index) = vip * is_active;
        *state.backends.get_unchecked_mut(index) = 0;
        *state.used.get_unchecked_mut(index) = state.clock;
    }
    cproxy_claim_backend(state, index as u32);
    1
}

/// Cookie of the socket, by which `UDP_FLOWS` knows it.
#[inline(always)]
fn socket_cookie(ctx: &SockAddrContext) -> u64 {
    // SAFETY: a helper that takes the context.
    unsafe { bpf_get_socket_cookie(ctx.sock_addr.cast()) }
}

/// Inserts a flow into `UDP_FLOWS`, by both directions.
#[inline(always)]
fn insert_overflow(ctx: &SockAddrContext, state: &mut UdpState, flow: &Translation) {
    state.flags |= UDP_HAS_OVERFLOWED;
    cproxy_unclaim_backend(state, flow_digest(Endpoint::new(&flow.backend, flow.backend_port).digest()));
    cproxy_insert_overflow(socket_cookie(ctx), flow);
}

/// Inserts or updates both entries of a flow in `UDP_FLOWS`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_insert_overflow(socket_cookie: u64, flow: *const Translation) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(flow) = (unsafe { flow.as_ref() }) else { return 0 };
    let (vip, backend) = (Endpoint::new(&flow.vip, flow.vip_port), Endpoint::new(&flow.backend, flow.backend_port));
    cproxy_insert_overflow_entry(socket_cookie, &vip, &backend, FLOW_FROM_VIP as u32, flow.slot);
    cproxy_insert_overflow_entry(socket_cookie, &backend, &vip, FLOW_FROM_BACKEND as u32, 0)
}

/// Inserts or updates one entry. The key lies on the stack: before Linux 6.2 no helper takes a key from memory that a
/// subprogram got as an argument.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_insert_overflow_entry(
    socket_cookie: u64,
    from: *const Endpoint,
    to: *const Endpoint,
    direction: u32,
    slot: u32,
) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind each pointer.
    let (Some(from), Some(to)) = (unsafe { (from.as_ref(), to.as_ref()) }) else { return 0 };
    let (address, port, direction) = (from.address, from.port, direction as u16);
    let key = FlowKey { socket_cookie, address, port, direction, zero: 0 };
    let value = FlowValue { address: to.address, port: to.port, zero: 0, slot };
    if UDP_FLOWS.insert(&key, &value, BPF_EXIST as u64).is_err() {
        let is_inserted = UDP_FLOWS.insert(&key, &value, BPF_NOEXIST as u64).is_ok();
        count(if is_inserted { Counter::UdpFlowsInserted } else { Counter::StateLost });
    }
    0
}

/// Returns the slot of the backend that `UDP_FLOWS` has for this VIP, or [`NO_SLOT`] if there is none that still
/// serves.
#[inline(always)]
pub(crate) fn find_overflow_slot(ctx: &SockAddrContext, state: &mut UdpState, vip: &Endpoint, set: &FoundSet) -> u32 {
    if state.flags & UDP_HAS_OVERFLOWED == 0 {
        return NO_SLOT;
    }
    cproxy_find_overflow_slot(socket_cookie(ctx), vip, set.word(), state)
}

/// See [`find_overflow_slot`]. Removes an entry whose backend no longer serves.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_find_overflow_slot(
    socket_cookie: u64,
    vip: *const Endpoint,
    word: u64,
    state: *mut UdpState,
) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(vip) = (unsafe { vip.as_ref() }) else { return NO_SLOT };
    let (address, port) = (vip.address, vip.port);
    let key = FlowKey { socket_cookie, address, port, direction: FLOW_FROM_VIP, zero: 0 };
    let Some(found) = UDP_FLOWS.get_ptr(&key) else { return NO_SLOT };
    // SAFETY: the helper returned a pointer to a value of that size. After an eviction it may be another flow's value;
    // the set then has no such backend, or the flow moves to that one.
    let found = unsafe { &*found };
    let (backend, backend_port, slot) = (found.address, found.port, found.slot);
    let mut flow = Translation { vip: address, backend, vip_port: port, backend_port, slot };
    if cproxy_confirm_backend(word, &raw mut flow) == 0 {
        // The next flow to this VIP may be in the socket's storage. If this backend came back later, an entry left here
        // would be found again.
        let is_removed = UDP_FLOWS.remove(&key).is_ok();
        count(if is_removed { Counter::UdpFlowsRemoved } else { Counter::StateLost });
        return NO_SLOT;
    }
    // Writing the entries again keeps a flow in use from being evicted, and claims the backend for this VIP.
    cproxy_insert_overflow(socket_cookie, &flow);
    cproxy_unclaim_backend(state, flow_digest(Endpoint::new(&backend, backend_port).digest()));
    flow.slot
}

/// Ends the claim that `UDP_FLOWS` has to this backend.
#[inline(always)]
pub(crate) fn unclaim_overflow_backend(ctx: &SockAddrContext, state: &UdpState, backend: &Endpoint) {
    if state.flags & UDP_HAS_OVERFLOWED != 0 {
        cproxy_unclaim_overflow_backend(socket_cookie(ctx), backend);
    }
}

/// See [`unclaim_overflow_backend`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_unclaim_overflow_backend(socket_cookie: u64, backend: *const Endpoint) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(backend) = (unsafe { backend.as_ref() }) else { return 0 };
    let (address, port) = (backend.address, backend.port);
    let key = FlowKey { socket_cookie, address, port, direction: FLOW_FROM_BACKEND, zero: 0 };
    if UDP_FLOWS.remove(&key).is_ok() {
        count(Counter::UdpFlowsRemoved);
    }
    0
}

/// VIP that datagrams of this backend show according to `UDP_FLOWS`.
#[inline(always)]
pub(crate) fn find_overflow_vip(ctx: &SockAddrContext, state: &UdpState, backend: &Endpoint) -> Option<Endpoint> {
    if state.flags & UDP_HAS_OVERFLOWED == 0 {
        return None;
    }
    let (address, port) = (backend.address, backend.port);
    let found = UDP_FLOWS.get_ptr(FlowKey {
        socket_cookie: socket_cookie(ctx),
        address,
        port,
        direction: FLOW_FROM_BACKEND,
        zero: 0,
    })?;
    // SAFETY: the helper returned a pointer to a value of that size. A datagram that is read while its flow is evicted
    // may show another flow's VIP; a moment later it would show none.
    let found = unsafe { found.read_volatile() };
    Some(Endpoint::new(&found.address, found.port))
}

impl FoundSet {
    /// Chooses a backend as [`Self::choose_slot`] does, but not one that these flows claim, except under session
    /// affinity: replies of one backend cannot be told apart by VIP. Returns its slot.
    #[inline(always)]
    pub(crate) fn choose_slot_apart_from(&self, ctx: &SockAddrContext, flows: &UdpState) -> u32 {
        // SAFETY: a helper that takes the context.
        let netns_cookie = unsafe { bpf_get_netns_cookie(ctx.sock_addr.cast()) };
        cproxy_choose_apart_from(flows, self.word.0, self.affinity.0, netns_cookie)
    }
}

/// See [`FoundSet::choose_slot_apart_from`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_choose_apart_from(flows: *const UdpState, word: u64, affinity: u64, netns_cookie: u64) -> u32 {
    if Affinity(affinity).seconds() != 0 {
        return cproxy_choose_by_affinity(word, affinity, netns_cookie);
    }
    let first = cproxy_choose(word);
    let word = SetWord(word);
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(flows) = (unsafe { flows.as_ref() }) else { return first };
    if cproxy_find_digest(&flows.backends, flow_digest(cproxy_slot_digest(first))) == NO_FLOW {
        return first;
    }
    // The next backend may be claimed, too. It is not checked: with two VIPs on the same two backends it is free.
    let next = first + 1;
    if next < word.first_slot() + word.eligible() { next } else { word.first_slot() }
}
