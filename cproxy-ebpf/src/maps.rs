//! The maps. Layouts are in the library half of this crate.

use aya_ebpf::{
    bindings::{BPF_F_INNER_MAP, BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    btf_maps::{Array, ArrayOfMaps, HashMap, LruHashMap, PerCpuArray, SkStorage},
    macros::btf_map,
};
use cproxy_ebpf::{
    AFFINITY_MAX, AffinityKey, BACKENDS_MIN, Backend, COUNTERS_MAX, Counter, FRONTENDS_MIN, FlowKey, FlowValue,
    FrontendKey, SETS_MIN, Set, SetId, Settings, SocketState, TCP_PLACES, TURNS_MAX, Translation, UDP_FLOWS_MAX,
    UdpState,
};

/// Mapped into the agent's memory, and as long as the data needs it to be.
const GROWING_ARRAY: usize = (BPF_F_MMAPABLE | BPF_F_INNER_MAP) as usize;

#[btf_map]
pub(crate) static FRONTENDS: ArrayOfMaps<
    HashMap<FrontendKey, SetId, { FRONTENDS_MIN as usize }, { BPF_F_NO_PREALLOC as usize }>,
    1,
> = ArrayOfMaps::new();

/// The bytes of a [`Set`]. A map that is put here has no type information; before 6.2 it must not differ from this one in
/// what its values might contain, which the kernel asks of structs only (kernel/bpf/map_in_map.c, `bpf_map_meta_equal`).
type SetBytes = [u64; size_of::<Set>() / 8];
/// The bytes of a [`Backend`].
type BackendBytes = [u32; size_of::<Backend>() / 4];

#[btf_map]
static SETS: ArrayOfMaps<Array<SetBytes, { SETS_MIN as usize }, GROWING_ARRAY>, 1> = ArrayOfMaps::new();

#[btf_map]
static BACKENDS: ArrayOfMaps<Array<BackendBytes, { BACKENDS_MIN as usize }, GROWING_ARRAY>, 1> = ArrayOfMaps::new();

/// The set with this id: a live element, which the agent writes any time.
#[inline(always)]
pub(crate) fn set(id: SetId) -> Option<*const Set> {
    SETS.get_value_ptr_mut(0, &id).map(|bytes| bytes.cast_const().cast())
}

/// The backend in a slot. There is none only for a program that was stopped for so long that the table was replaced.
#[inline(always)]
pub(crate) fn backend(slot: u32) -> Option<&'static Backend> {
    let bytes = BACKENDS.get_value(0, &slot)?;
    // SAFETY: a live element of that size and alignment; whatever is in it is a value.
    Some(unsafe { &*bytes.as_ptr().cast() })
}

#[btf_map]
pub(crate) static SETTINGS: Array<Settings, 1, { BPF_F_MMAPABLE as usize }> = Array::new();

#[btf_map]
pub(crate) static SOCKETS: SkStorage<SocketState> = SkStorage::new();

#[btf_map]
pub(crate) static TCP_OWNERS: Array<u64, { TCP_PLACES as usize + 1 }> = Array::new();

#[btf_map]
pub(crate) static TCP_PEERS: Array<Translation, { TCP_PLACES as usize }> = Array::new();

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

/// Counts one more. Programs of one CPU may interrupt each other between the read and the write; what is lost then is
/// one count.
#[inline(always)]
pub(crate) fn count(counter: Counter) {
    cproxy_count(counter as u32);
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_count(counter: u32) -> u32 {
    if let Some(value) = COUNTERS.get_ptr_mut(counter) {
        // SAFETY: the helper returned a pointer to this CPU's live value.
        unsafe { *value += 1 };
    }
    0
}
