//! Definitions of the maps. The library of this crate has their layouts.

use aya_ebpf::{
    bindings::{BPF_F_INNER_MAP, BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    btf_maps::{Array, ArrayOfMaps, HashMap, LruHashMap, PerCpuArray, RingBuf, SkStorage},
    macros::btf_map,
};
use cproxy_ebpf::{
    AFFINITY_MAX, AffinityKey, BACKENDS_MIN, Backend, COUNTERS_MAX, Counter, FRONTENDS_MIN, FlowKey, FlowValue,
    FrontendKey, OWN_ADDRESS_V6, OwnAddress, SETS_MIN, Set, SetId, Settings, SocketState, TCP_FULL_BYTES,
    TCP_FULL_MESSAGE_BYTES, TCP_LEVELS_MORE, TCP_PLACES, TURNS_MAX, TcpPlaceId, Translation, UDP_FLOWS_MAX, UdpState,
    tcp_level_places,
};

/// Flags of an array that the agent maps into its memory and replaces by one of another length.
const RESIZABLE_ARRAY: usize = (BPF_F_MMAPABLE | BPF_F_INNER_MAP) as usize;

#[btf_map]
pub(crate) static FRONTENDS: ArrayOfMaps<
    HashMap<FrontendKey, SetId, { FRONTENDS_MIN as usize }, { BPF_F_NO_PREALLOC as usize }>,
    1,
> = ArrayOfMaps::new();

/// Bytes of a [`Set`], as integers. Before Linux 6.2 a new inner map must agree with this one in the special fields
/// (timers and the like) that the BTF of its values declares. The kernel searches only structs for them, and the
/// agent's maps have no BTF: with a struct here they would not match (kernel/bpf/map_in_map.c, `bpf_map_meta_equal`).
type SetBytes = [u64; size_of::<Set>() / 8];
/// Bytes of a [`Backend`], as integers.
type BackendBytes = [u32; size_of::<Backend>() / 4];

#[btf_map]
static SETS: ArrayOfMaps<Array<SetBytes, { SETS_MIN as usize }, RESIZABLE_ARRAY>, 1> = ArrayOfMaps::new();

#[btf_map]
static BACKENDS: ArrayOfMaps<Array<BackendBytes, { BACKENDS_MIN as usize }, RESIZABLE_ARRAY>, 1> = ArrayOfMaps::new();

/// Live element of a set, which the agent may write at any time.
#[inline(always)]
pub(crate) fn set_element(id: SetId) -> Option<*const Set> {
    SETS.get_value_ptr_mut(0, &id).map(|bytes| bytes.cast_const().cast())
}

/// Backend in a slot. `None` only if the agent replaced the map by a shorter one after this program read the set.
#[inline(always)]
pub(crate) fn backend(slot: u32) -> Option<&'static Backend> {
    let bytes = BACKENDS.get_value(0, &slot)?;
    // SAFETY: a live element of that size and alignment; every bit pattern is a valid `Backend`.
    Some(unsafe { &*bytes.as_ptr().cast() })
}

#[btf_map]
pub(crate) static SETTINGS: Array<Settings, 1, { BPF_F_MMAPABLE as usize }> = Array::new();

#[btf_map]
pub(crate) static OWN_ADDRESSES: Array<OwnAddress, { OWN_ADDRESS_V6 as usize + 1 }, { BPF_F_MMAPABLE as usize }> =
    Array::new();

#[btf_map]
pub(crate) static SOCKETS: SkStorage<SocketState> = SkStorage::new();

#[btf_map]
pub(crate) static TCP_OWNERS: Array<u64, { TCP_PLACES as usize + 1 }, { BPF_F_MMAPABLE as usize }> = Array::new();

#[btf_map]
static TCP_PEERS: Array<Translation, { TCP_PLACES as usize }> = Array::new();

/// Bytes of a [`Translation`], as integers.
type PeerBytes = [u32; size_of::<Translation>() / 4];

#[btf_map]
pub(crate) static TCP_MORE_OWNERS: ArrayOfMaps<
    Array<u64, { tcp_level_places(1) as usize }, RESIZABLE_ARRAY>,
    { TCP_LEVELS_MORE as usize },
> = ArrayOfMaps::new();

#[btf_map]
static TCP_MORE_PEERS: ArrayOfMaps<
    Array<PeerBytes, { tcp_level_places(1) as usize }, { BPF_F_INNER_MAP as usize }>,
    { TCP_LEVELS_MORE as usize },
> = ArrayOfMaps::new();

#[btf_map]
pub(crate) static TCP_FULL: RingBuf<[u8; TCP_FULL_MESSAGE_BYTES as usize], { TCP_FULL_BYTES as usize }> =
    RingBuf::new();

/// Peer at a place of a level; `None` if there is no such level.
#[inline(always)]
pub(crate) fn tcp_peer(place: TcpPlaceId) -> Option<*mut Translation> {
    if place.level() == 0 {
        return TCP_PEERS.get_ptr_mut(place.index());
    }
    TCP_MORE_PEERS.get_value_ptr_mut(place.level() - 1, &place.index()).map(|bytes| bytes.cast())
}

#[btf_map]
pub(crate) static UDP_SOCKETS: SkStorage<UdpState> = SkStorage::new();

#[btf_map]
pub(crate) static UDP_FLOWS: LruHashMap<FlowKey, FlowValue, { UDP_FLOWS_MAX as usize }> = LruHashMap::new();

#[btf_map]
pub(crate) static AFFINITY: LruHashMap<AffinityKey, u64, { AFFINITY_MAX as usize }> = LruHashMap::new();

#[btf_map]
pub(crate) static TURNS: Array<u64, { TURNS_MAX as usize }> = Array::new();

#[btf_map]
static COUNTERS: PerCpuArray<u64, { COUNTERS_MAX as usize }> = PerCpuArray::new();

/// Adds 1 to a counter. If one program interrupts another on the same CPU, one count may be lost.
#[inline(always)]
pub(crate) fn count(counter: Counter) {
    cproxy_count(counter as u32);
}

/// Counts a call that is sent to a backend, unless the backend is the agent's own.
#[inline(always)]
pub(crate) fn count_forwarded(backend: &Backend) {
    cproxy_count(backend.counter.into());
}

/// Adds 1 to the counter with this index, if there is one.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_count(counter: u32) -> u32 {
    if let Some(value) = COUNTERS.get_ptr_mut(counter) {
        // SAFETY: the helper returned a pointer to this CPU's live value.
        unsafe { *value += 1 };
    }
    0
}
