//! The maps and the lookups on them. Layouts are in the library half of this crate.

use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    btf_maps::{Array, ArrayOfMaps, HashMap, SkStorage},
    helpers::bpf_get_prandom_u32,
    macros::btf_map,
    programs::SockAddrContext,
};
use cproxy_ebpf::{
    BACKENDS_MAX, Backend, FRONTENDS_MAX, FrontendKey, SETS_MAX, SOCKET_UNTRANSLATED, SetId, SetWord, SocketState,
    choose,
};

#[btf_map]
static FRONTENDS: HashMap<FrontendKey, SetId, { FRONTENDS_MAX as usize }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

#[btf_map]
static SETS: Array<u64, { SETS_MAX as usize }, { BPF_F_MMAPABLE as usize }> = Array::new();

#[btf_map]
static BACKENDS: Array<Backend, { BACKENDS_MAX as usize }, { BPF_F_MMAPABLE as usize }> = Array::new();

#[btf_map]
static SOCKETS: SkStorage<SocketState> = SkStorage::new();

/// Read by no program: the agent updates it to wait for a grace period, which the kernel grants with every update of a
/// map of maps.
#[btf_map]
static BARRIER: ArrayOfMaps<Array<u32, 1>, 1> = ArrayOfMaps::new();

/// What the table says about a destination.
pub(crate) enum Lookup {
    /// No Service has it.
    Miss,
    /// Its Service has no backends.
    Refuse,
    /// One of its backends, chosen at random.
    Forward(&'static Backend),
}

/// Looks a destination up and chooses a backend.
#[inline(always)]
pub(crate) fn lookup(key: &FrontendKey) -> Lookup {
    let Some(set) = FRONTENDS.get_ptr(key) else { return Lookup::Miss };
    // SAFETY: the helper returned a pointer to a live value of that size.
    let set = unsafe { set.read_volatile() };
    let Some(word) = SETS.get_ptr(set) else { return Lookup::Refuse };
    // SAFETY: as above; volatile makes it the one 64-bit load that pairs with the agent's 64-bit store.
    let word = SetWord(unsafe { word.read_volatile() });
    if word.count() == 0 {
        return Lookup::Refuse;
    }
    // SAFETY: a helper without arguments.
    let random = unsafe { bpf_get_prandom_u32() };
    match BACKENDS.get(word.first_slot() + choose(random, word.count())) {
        Some(backend) => Lookup::Forward(backend),
        None => Lookup::Refuse,
    }
}

/// Whether the agent has marked this socket as its own.
#[inline(always)]
pub(crate) fn is_untranslated(ctx: &SockAddrContext) -> bool {
    // SAFETY: without the create flag the helper only looks up; null is checked before the read.
    let state = unsafe { SOCKETS.get_ptr_mut(ctx) };
    // SAFETY: not null, so it points to this socket's live storage.
    !state.is_null() && unsafe { (*state).flags } & SOCKET_UNTRANSLATED != 0
}
