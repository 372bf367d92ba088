//! Choice of a backend for a new connection: at random, in turn, or by session affinity.

use aya_ebpf::{
    bindings::BPF_NOEXIST,
    helpers::{
        bpf_get_prandom_u32,
        generated::{bpf_get_netns_cookie, bpf_ktime_get_ns},
    },
    programs::SockAddrContext,
};
use cproxy_ebpf::{
    Affinity, AffinityEntry, AffinityKey, Balance, Counter, SetWord, affinity_time, choose, choose_in_turn, turn_of,
};

use crate::{
    lookup::FoundSet,
    maps::{AFFINITY, SETTINGS, TURNS, count},
    search::{NO_SLOT, cproxy_find_slot, cproxy_slot_digest},
    subprogram::compare_and_exchange,
};

impl FoundSet {
    /// Chooses an eligible backend for a new connection: the client's own under session affinity, else any. Returns its
    /// slot.
    #[inline(always)]
    pub(crate) fn choose_slot(&self, ctx: &SockAddrContext) -> u32 {
        if self.affinity.seconds() == 0 {
            return cproxy_choose(self.word.0);
        }
        // SAFETY: a helper that takes the context.
        let netns_cookie = unsafe { bpf_get_netns_cookie(ctx.sock_addr.cast()) };
        cproxy_choose_by_affinity(self.word.0, self.affinity.0, netns_cookie)
    }
}

/// Chooses an eligible backend by the [`Balance`] of the settings. Returns its slot.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_choose(word: u64) -> u32 {
    let word = SetWord(word);
    let Some(settings) = SETTINGS.get_ptr(0) else { return word.first_slot() };
    // SAFETY: a live element; volatile, because the agent may write it at any time.
    let (seed, balance) =
        unsafe { ((&raw const (*settings).seed).read_volatile(), (&raw const (*settings).balance).read_volatile()) };
    let index = if balance == Balance::RoundRobin as u64 {
        next_in_turn(word, seed)
    } else {
        // SAFETY: a helper without arguments.
        choose(unsafe { bpf_get_prandom_u32() }, seed, word.eligible())
    };
    word.first_slot() + index
}

/// Advances the set's turn and returns the index of its backend. The atomic add is `BPF_ATOMIC` with `BPF_FETCH` (Linux
/// 5.12), which `core` does not offer for this target.
#[inline(always)]
fn next_in_turn(word: SetWord, seed: u64) -> u32 {
    let Some(turn) = TURNS.get_ptr_mut(turn_of(word.first_slot())) else { return 0 };
    let mut before = 1u64;
    // SAFETY: the verifier checks that `turn` points to a live value; the instruction changes that value and `before`.
    unsafe {
        core::arch::asm!(
            "{before} = atomic_fetch_add((u64 *)({turn} + 0), {before})",
            turn = in(reg) turn,
            before = inout(reg) before,
        );
    }
    choose_in_turn(before, seed, word)
}

/// Returns the slot of the client's backend, or chooses one and remembers it. Entries change by compare-and-exchange:
/// if two threads of a client both choose, the second adopts the choice of the first.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_choose_by_affinity(word: u64, affinity: u64, netns_cookie: u64) -> u32 {
    let (word, affinity) = (SetWord(word), Affinity(affinity));
    // SAFETY: a helper without arguments.
    let now = affinity_time(unsafe { bpf_ktime_get_ns() });
    let chosen = cproxy_choose(word.0);
    let new = AffinityEntry::new(cproxy_slot_digest(chosen), now);
    let key = AffinityKey { id: affinity.id(), zero: 0, netns_cookie };
    if AFFINITY.get_ptr(&key).is_none() && AFFINITY.insert(&key, new.0, BPF_NOEXIST as u64).is_ok() {
        return chosen;
    }
    let Some(entry) = AFFINITY.get_ptr_mut(&key) else {
        count(Counter::AffinityLost);
        return chosen;
    };
    // SAFETY: the helper returned a pointer to a live, aligned value, which is only ever accessed whole.
    let known = AffinityEntry(unsafe { entry.read_volatile() });
    let slot = cproxy_find_slot(word.first_slot(), word.eligible(), known.digest());
    if slot != NO_SLOT && known.is_fresh(now, affinity.seconds()) {
        // If this fails, another thread has just extended the entry.
        exchange_entry(entry, known, AffinityEntry::new(known.digest(), now));
        return slot;
    }
    let winner = exchange_entry(entry, known, new);
    if winner == known {
        return chosen;
    }
    let slot = cproxy_find_slot(word.first_slot(), word.eligible(), winner.digest());
    if slot == NO_SLOT { chosen } else { slot }
}

/// Replaces `expected` by `new`. Returns the previous entry, which is `expected` on success.
#[inline(always)]
fn exchange_entry(entry: *mut u64, expected: AffinityEntry, new: AffinityEntry) -> AffinityEntry {
    AffinityEntry(compare_and_exchange(entry, expected.0, new.0))
}
