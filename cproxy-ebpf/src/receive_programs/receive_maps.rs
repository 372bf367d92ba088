//! Definitions of the maps. `receive.rs` of the library has their layouts.

use core::ptr::addr_of;

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{HashMap, LpmTrie, LruHashMap, PerCpuArray, SockHash, lpm_trie::Key},
    helpers::generated::{bpf_map_lookup_elem, bpf_sk_release},
    macros::btf_map,
};
use cproxy_ebpf::receive::{
    DatagramKey, LISTENERS_MAX, ListenerKey, RECEIVE_COUNTERS_MAX, RECEIVED_DATAGRAMS_MIN, RECEIVED_MAX,
    RECEIVED_SOURCES_MAX, ReceiveCounter, ReceivedKey, ReceivedWord, SourcePrefix,
};

#[btf_map]
static RECEIVED: HashMap<ReceivedKey, u32, { RECEIVED_MAX as usize }, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();

#[btf_map]
static RECEIVED_SOURCES: LpmTrie<SourcePrefix, u32, { RECEIVED_SOURCES_MAX as usize }> = LpmTrie::new();

#[btf_map]
pub(crate) static LISTENERS: SockHash<ListenerKey, { LISTENERS_MAX as usize }> = SockHash::new();

#[btf_map]
pub(crate) static RECEIVED_DATAGRAMS: LruHashMap<DatagramKey, [u32; 4], { RECEIVED_DATAGRAMS_MIN as usize }> =
    LruHashMap::new();

#[btf_map]
static RECEIVE_COUNTERS: PerCpuArray<u64, { RECEIVE_COUNTERS_MAX as usize }> = PerCpuArray::new();

/// Cookie of the pod's network namespace. The agent sets it before it loads the programs.
#[unsafe(no_mangle)]
static NETNS_COOKIE: u64 = 0;

/// Cookie of the pod's network namespace.
#[inline(always)]
pub(crate) fn netns_cookie() -> u64 {
    // SAFETY: a static; volatile, because the agent changes it in the object file.
    unsafe { addr_of!(NETNS_COOKIE).read_volatile() }
}

/// Port of the pod for a received key.
#[inline(always)]
pub(crate) fn received(key: &ReceivedKey) -> Option<ReceivedWord> {
    // SAFETY: a live element; volatile, because the agent may write it at any time.
    RECEIVED.get_ptr_mut(key).map(|word| ReceivedWord(unsafe { word.read_volatile() }))
}

/// Whether a group has a client's address.
#[inline(always)]
pub(crate) fn has_source(group: u16, address: &[u32; 4]) -> bool {
    let [a, b, c, d] = *address;
    RECEIVED_SOURCES.get(&Key::new(160, [group.into(), a, b, c, d])).is_some()
}

/// Whether a socket listens in this place.
#[inline(always)]
pub(crate) fn has_listener(key: &ListenerKey) -> bool {
    // SAFETY: a map and a key of its size. What is found is a socket that is held, and released here.
    unsafe {
        let socket = bpf_map_lookup_elem((&raw const LISTENERS).cast_mut().cast(), (&raw const *key).cast());
        !socket.is_null() && bpf_sk_release(socket) == 0
    }
}

/// Adds 1 to a counter.
#[inline(always)]
pub(crate) fn count(counter: ReceiveCounter) {
    if let Some(value) = RECEIVE_COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: the helper returned a pointer to this CPU's live value.
        unsafe { *value += 1 };
    }
}
