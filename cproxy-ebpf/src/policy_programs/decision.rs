//! The verdict about a peer and a port: two lookups and a search, with any number of rules.

use core::hint::black_box;

use cproxy_ebpf::policy::{IntervalWord, NO_RULE, StateWord};

use crate::{
    maps::{interval, intervals, runs},
    subprogram::on_stack,
};

/// The direction that is not [`EGRESS`](cproxy_ebpf::policy::EGRESS).
pub(crate) const INGRESS: u8 = 0;

/// Steps of the search: a run has at most 4,095 intervals.
const STEPS: u32 = 12;

/// Address, port, protocol and direction.
#[repr(C)]
pub(crate) struct Question {
    pub(crate) peer: [u32; 4],
    /// In host order: the peer's for egress, the pod's for ingress.
    pub(crate) port: u16,
    pub(crate) protocol: u8,
    pub(crate) direction: u8,
}

/// Decision about a question.
#[derive(Clone, Copy)]
pub(crate) struct Decision(u32);

impl Decision {
    const ALLOW: u32 = 1 << 31;

    /// Decision of no rule, in a direction that is not isolated.
    pub(crate) const ALLOWED: Self = Self(Self::ALLOW | NO_RULE);

    pub(crate) fn allows(self) -> bool {
        self.0 & Self::ALLOW != 0
    }

    /// Rule that has decided, or [`NO_RULE`].
    pub(crate) fn rule(self) -> u32 {
        self.0 & !Self::ALLOW
    }
}

/// Decides a question in the state.
#[inline(always)]
pub(crate) fn decide(state: StateWord, question: &Question) -> Decision {
    Decision(cproxy_policy_decide(question, state.generation()))
}

/// Returns the rule, with the highest bit if it allows.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_policy_decide(question: *const Question, generation: u32) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(question) = (unsafe { question.as_ref() }) else { return NO_RULE };
    let (first, length) = runs(generation, &on_stack(&question.peer)).run(question.direction);
    let found = IntervalWord(cproxy_policy_search(
        generation,
        first,
        first + length,
        IntervalWord::up_to(question.protocol, question.port).0,
    ));
    match found.has(question.protocol, question.port) {
        true if found.allows() => found.rule() | Decision::ALLOW,
        true => found.rule(),
        false => NO_RULE,
    }
}

/// Returns the last interval of the slots from `low` to before `high` that is not above `key`; 0 if there is none.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_policy_search(generation: u32, mut low: u32, mut high: u32, key: u64) -> u64 {
    let Some(intervals) = intervals(generation) else { return 0 };
    let mut found = 0;
    for _ in 0..STEPS {
        if low >= high {
            break;
        }
        let middle = (low + high) / 2;
        let Some(word) = interval(intervals, middle) else { return 0 };
        // All bits if the word is above the key. There is no branch, for the verifier looks at both ways of each. The
        // lowest bit of a key is set, so that it does not count.
        let difference = black_box((key >> 1).wrapping_sub(word.0 >> 1));
        let above = (difference as i64 >> 63) as u64;
        found ^= (found ^ word.0) & !above;
        low ^= (low ^ (middle + 1)) & !above as u32;
        high ^= (high ^ middle) & above as u32;
    }
    found
}
