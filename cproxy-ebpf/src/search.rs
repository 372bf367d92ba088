//! Search for a backend among the slots of a set, which are sorted by digest.

use cproxy_ebpf::{REFUSED_SLOT, SetWord, Translation, choose_evenly};

use crate::{
    endpoint::{Endpoint, is_same},
    maps::backend,
};

/// No slot.
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// Returns 1 if the set has the translation's backend. Updates its slot.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_confirm_backend(word: u64, translation: *mut Translation) -> u32 {
    let word = SetWord(word);
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(translation) = (unsafe { translation.as_mut() }) else { return 0 };
    if translation.slot == REFUSED_SLOT {
        return 0;
    }
    let (first, total) = (word.first_slot(), word.eligible() + word.serving());
    // A backend that is still in its slot is found without a search.
    if translation.slot.wrapping_sub(first) < total && cproxy_slot_holds(translation.slot, translation) != 0 {
        return 1;
    }
    cproxy_relocate_backend(word.0, translation)
}

/// Searches all slots of the set for the translation's backend and updates its slot. Returns 1 if it is there.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_relocate_backend(word: u64, translation: *mut Translation) -> u32 {
    let word = SetWord(word);
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(translation) = (unsafe { translation.as_mut() }) else { return 0 };
    let wanted = Endpoint::new(&translation.backend, translation.backend_port).digest();
    let mut slot = cproxy_find_slot(word.first_slot(), word.eligible(), wanted);
    if slot == NO_SLOT {
        slot = cproxy_find_slot(word.first_slot() + word.eligible(), word.serving(), wanted);
    }
    translation.slot = slot;
    // Of two backends with the same digest, the search finds only the first; a flow to the second moves to another
    // backend. The chance is one in 2^32.
    cproxy_slot_holds(slot, translation)
}

/// Steps of the search, which covers 1,024 indices on either side of the expected one. Digests are spread evenly: among
/// [`cproxy_ebpf::SET_BACKENDS_MAX`] backends the standard deviation of an index is 128.
const SEARCH_STEPS: u32 = 11;

/// Returns the slot of the first backend with this digest among `count` sorted ones, or [`NO_SLOT`]. The number of
/// steps is fixed. `bpf_loop` would be shorter, but a kernel without a JIT refuses callbacks (kernel/bpf/verifier.c,
/// `fixup_call_args`).
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_find_slot(first_slot: u32, count: u32, digest: u32) -> u32 {
    let expected = choose_evenly(digest, count);
    let mut low = expected.saturating_sub(1 << (SEARCH_STEPS - 1));
    for step in (0..SEARCH_STEPS).rev() {
        low = cproxy_search_step(first_slot, count, digest, low, 1 << step);
    }
    if low < count && cproxy_slot_digest(first_slot + low) == digest { first_slot + low } else { NO_SLOT }
}

/// One step of a binary search. All digests before index `low` are less than `digest`. Returns the next `low`: behind
/// the step if the digest at its end is less, too.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_search_step(first_slot: u32, count: u32, digest: u32, low: u32, step: u32) -> u32 {
    let end = low + step - 1;
    if end < count && cproxy_slot_digest(first_slot + end) < digest { end + 1 } else { low }
}

/// Returns the digest of the backend in a slot.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_slot_digest(slot: u32) -> u32 {
    backend(slot).map_or(u32::MAX, |backend| backend.digest)
}

/// Returns 1 if the slot holds the translation's backend.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_slot_holds(slot: u32, translation: *const Translation) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let (Some(translation), Some(found)) = (unsafe { translation.as_ref() }, backend(slot)) else { return 0 };
    is_same(&found.address, found.port, &translation.backend, translation.backend_port) as u32
}
