//! Selection of a backend for a new connection: at random, in turn, or by session affinity.

use aya_ebpf::{
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
    lookup::Service,
    maps::{AFFINITY, SETTINGS, TURNS, count},
    search::{NOWHERE, cproxy_digest_at, cproxy_find},
    subprogram::compare_and_exchange,
};

/// `BPF_NOEXIST`: only insert.
const NOEXIST: u64 = 1;

impl Service {
    /// The slot of a backend for a new connection: the one that the client has, or any.
    #[inline(always)]
    pub(crate) fn choose(&self, ctx: &SockAddrContext) -> u32 {
        if self.affinity.seconds() == 0 {
            return cproxy_any(self.word.0);
        }
        // SAFETY: a helper that takes the context.
        let netns_cookie = unsafe { bpf_get_netns_cookie(ctx.sock_addr.cast()) };
        cproxy_affine(self.word.0, self.affinity.0, netns_cookie)
    }
}

/// The slot of one of the eligible, chosen as the agent was told to.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_any(word: u64) -> u32 {
    let word = SetWord(word);
    let Some(settings) = SETTINGS.get_ptr(0) else { return word.first_slot() };
    // SAFETY: a live element; volatile, because the agent writes it any time.
    let (seed, balance) =
        unsafe { ((&raw const (*settings).seed).read_volatile(), (&raw const (*settings).balance).read_volatile()) };
    let index = if balance == Balance::RoundRobin as u64 {
        in_turn(word, seed)
    } else {
        // SAFETY: a helper without arguments.
        choose(unsafe { bpf_get_prandom_u32() }, seed, word.eligible())
    };
    word.first_slot() + index
}

/// The index of the next backend in turn: `BPF_ATOMIC` with `BPF_FETCH` (kernel 5.12). `core` has no such atomics for this
/// target.
#[inline(always)]
fn in_turn(word: SetWord, seed: u64) -> u32 {
    let Some(turn) = TURNS.get_ptr_mut(turn_of(word.first_slot())) else { return 0 };
    let mut before = 1u64;
    // SAFETY: the verifier checks that the pointer is to a live value; the instruction touches nothing but `before` and it.
    unsafe {
        core::arch::asm!(
            "{before} = atomic_fetch_add((u64 *)({turn} + 0), {before})",
            turn = in(reg) turn,
            before = inout(reg) before,
        );
    }
    choose_in_turn(before, seed, word)
}

/// The slot of the client's backend. Each change of an entry is one compare-and-exchange, so of two threads of one client
/// that find no entry, or a useless one, the second adopts what the first has chosen.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_affine(word: u64, affinity: u64, netns_cookie: u64) -> u32 {
    let (word, affinity) = (SetWord(word), Affinity(affinity));
    // SAFETY: a helper without arguments.
    let now = affinity_time(unsafe { bpf_ktime_get_ns() });
    let any = cproxy_any(word.0);
    let new = AffinityEntry::new(cproxy_digest_at(any), now);
    let key = AffinityKey { id: affinity.id(), zero: 0, netns_cookie };
    if AFFINITY.get_ptr(&key).is_none() && AFFINITY.insert(&key, new.0, NOEXIST).is_ok() {
        return any;
    }
    let Some(entry) = AFFINITY.get_ptr_mut(&key) else {
        count(Counter::AffinityLost);
        return any;
    };
    // SAFETY: the helper returned a pointer to a live, aligned value, which is only ever accessed whole.
    let known = AffinityEntry(unsafe { entry.read_volatile() });
    let slot = cproxy_find(word.first_slot(), word.eligible(), known.digest());
    if slot != NOWHERE && known.is_fresh(now, affinity.seconds()) {
        // If another thread was faster, that extends it just as well.
        exchange(entry, known, AffinityEntry::new(known.digest(), now));
        return slot;
    }
    let winner = exchange(entry, known, new);
    if winner == known {
        return any;
    }
    let slot = cproxy_find(word.first_slot(), word.eligible(), winner.digest());
    if slot == NOWHERE { any } else { slot }
}

/// Puts `new` where `expected` is and gives back what was there.
#[inline(always)]
fn exchange(entry: *mut u64, expected: AffinityEntry, new: AffinityEntry) -> AffinityEntry {
    AffinityEntry(compare_and_exchange(entry, expected.0, new.0))
}
