//! Definitions of the maps. `policy.rs` of the library has their layouts.

use aya_ebpf::{
    bindings::{BPF_F_INNER_MAP, BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    btf_maps::{Array, ArrayOfMaps, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf, SkStorage, lpm_trie::Key},
    macros::btf_map,
};
use cproxy_ebpf::{
    OWN_ADDRESS_V6, OwnAddress, SocketState,
    observation::{EVENTS_BYTES, Event},
    policy::{
        Denial, DenialKey, IntervalWord, POLICY_COUNTERS_MAX, POLICY_DENIALS_MIN, POLICY_RANGES_MAX,
        POLICY_REPLIES_MIN, POLICY_ROOM_MIN, PolicyCounter, ReplyKey, RunsWord, State, StateWord,
    },
};

/// Number of generations.
const GENERATIONS: usize = 2;

#[btf_map]
pub(crate) static POLICY_STATE: Array<State, 1, { BPF_F_MMAPABLE as usize }> = Array::new();

#[btf_map]
static POLICY_PEERS: ArrayOfMaps<
    HashMap<[u32; 4], u64, { POLICY_ROOM_MIN as usize }, { BPF_F_NO_PREALLOC as usize }>,
    GENERATIONS,
> = ArrayOfMaps::new();

#[btf_map]
static POLICY_RANGES: ArrayOfMaps<LpmTrie<[u32; 4], u64, { POLICY_RANGES_MAX as usize }>, GENERATIONS> =
    ArrayOfMaps::new();

#[btf_map]
static POLICY_INTERVALS: ArrayOfMaps<Intervals, GENERATIONS> = ArrayOfMaps::new();

#[btf_map]
pub(crate) static POLICY_REPLIES: LruHashMap<ReplyKey, u64, { POLICY_REPLIES_MIN as usize }> = LruHashMap::new();

#[btf_map]
pub(crate) static POLICY_DENIALS: LruHashMap<DenialKey, Denial, { POLICY_DENIALS_MIN as usize }> = LruHashMap::new();

#[btf_map]
static POLICY_COUNTERS: PerCpuArray<u64, { POLICY_COUNTERS_MAX as usize }> = PerCpuArray::new();

/// Ring buffer of a tracer, while there is one.
#[btf_map]
pub(crate) static POLICY_EVENTS: ArrayOfMaps<RingBuf<Event, { EVENTS_BYTES as usize }>, 1> = ArrayOfMaps::new();

#[btf_map]
pub(crate) static OWN_ADDRESSES: Array<OwnAddress, { OWN_ADDRESS_V6 as usize + 1 }, { BPF_F_MMAPABLE as usize }> =
    Array::new();

#[btf_map]
pub(crate) static SOCKETS: SkStorage<SocketState> = SkStorage::new();

/// State in force.
#[inline(always)]
pub(crate) fn state() -> StateWord {
    // SAFETY: a live element; volatile, because the agent may write it at any time.
    POLICY_STATE
        .get_ptr(0)
        .map_or(StateWord(0), |state| StateWord(unsafe { (&raw const (*state).word).read_volatile() }))
}

/// Runs of an address: its own, or those of the narrowest range.
#[inline(always)]
pub(crate) fn runs(generation: u32, address: &[u32; 4]) -> RunsWord {
    let found = POLICY_PEERS.get_value_ptr_mut(generation, address).or_else(|| {
        let key = Key::new(128, *address);
        POLICY_RANGES.get_value_ptr_mut(generation, &key)
    });
    // SAFETY: a live element; volatile, because the agent may write it at any time.
    found.map_or(RunsWord(0), |word| RunsWord(unsafe { word.read_volatile() }))
}

/// Intervals of a generation.
pub(crate) type Intervals = Array<u64, { POLICY_ROOM_MIN as usize }, { BPF_F_INNER_MAP as usize }>;

/// Intervals of a generation, if it has maps.
#[inline(always)]
pub(crate) fn intervals(generation: u32) -> Option<&'static Intervals> {
    POLICY_INTERVALS.get(generation)
}

/// Interval in a slot.
#[inline(always)]
pub(crate) fn interval(intervals: &Intervals, slot: u32) -> Option<IntervalWord> {
    // SAFETY: a live element.
    intervals.get_ptr(slot).map(|word| IntervalWord(unsafe { word.read_volatile() }))
}

/// Adds 1 to a counter of a protocol.
#[inline(always)]
pub(crate) fn count(counter: PolicyCounter, is_udp: bool) {
    if let Some(value) = POLICY_COUNTERS.get_ptr_mut(counter as u32 + is_udp as u32) {
        // SAFETY: the helper returned a pointer to this CPU's live value.
        unsafe { *value += 1 };
    }
}
