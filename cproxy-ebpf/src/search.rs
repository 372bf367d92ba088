//! Search for a backend among the slots of a set, which are sorted by digest.

use cproxy_ebpf::{SetWord, Translation, choose_evenly};

use crate::{
    endpoint::{Endpoint, digest, is_same},
    maps::backend,
};

/// No slot, no place.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// 1 if the translation's backend is in the set; its slot is brought up to date.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_has(word: u64, translation: *mut Translation) -> u32 {
    let word = SetWord(word);
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(translation) = (unsafe { translation.as_mut() }) else { return 0 };
    let (first, total) = (word.first_slot(), word.eligible() + word.serving());
    // A backend that has not moved is found without a search.
    if translation.slot.wrapping_sub(first) < total && cproxy_is_at(translation.slot, translation) != 0 {
        return 1;
    }
    cproxy_find_again(word.0, translation)
}

/// As [`cproxy_has`], wherever the backend is now.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_find_again(word: u64, translation: *mut Translation) -> u32 {
    let word = SetWord(word);
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(translation) = (unsafe { translation.as_mut() }) else { return 0 };
    let wanted = digest(&Endpoint::new(&translation.backend, translation.backend_port));
    let mut slot = cproxy_find(word.first_slot(), word.eligible(), wanted);
    if slot == NOWHERE {
        slot = cproxy_find(word.first_slot() + word.eligible(), word.serving(), wanted);
    }
    translation.slot = slot;
    // Of two with the same digest the first is found; a flow to the other one moves. That takes one chance in 2^32.
    cproxy_is_at(slot, translation)
}

/// How far from where it should be a backend is looked for, in powers of two. Digests are spread evenly: of
/// [`cproxy_ebpf::SET_BACKENDS_MAX`] backends one is off by 128 places at one standard deviation, so by 1,024 practically
/// never.
const SEARCH_STEPS: u32 = 11;

/// The slot of the first backend with this digest among `count` sorted ones, or [`NOWHERE`]. The search is a loop of
/// fixed steps; `bpf_loop` would be shorter, but a kernel without a JIT takes no callbacks (kernel/bpf/verifier.c,
/// `fixup_call_args`).
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_find(first_slot: u32, count: u32, digest: u32) -> u32 {
    let expected = choose_evenly(digest, count);
    let mut low = expected.saturating_sub(1 << (SEARCH_STEPS - 1));
    for step in (0..SEARCH_STEPS).rev() {
        low = cproxy_search(first_slot, count, digest, low, 1 << step);
    }
    if low < count && cproxy_digest_at(first_slot + low) == digest { first_slot + low } else { NOWHERE }
}

/// All before `low` are less. If the one at the end of the step is one of ours and less, too, the next is the new `low`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_search(first_slot: u32, count: u32, digest: u32, low: u32, step: u32) -> u32 {
    let end = low + step - 1;
    if end < count && cproxy_digest_at(first_slot + end) < digest { end + 1 } else { low }
}

/// The digest of the backend in a slot.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_digest_at(slot: u32) -> u32 {
    backend(slot).map_or(u32::MAX, |backend| backend.digest)
}

/// 1 if the translation's backend is in this slot.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_is_at(slot: u32, translation: *const Translation) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let (Some(translation), Some(found)) = (unsafe { translation.as_ref() }, backend(slot)) else { return 0 };
    is_same(&found.address, found.port, &translation.backend, translation.backend_port) as u32
}
