//! Denials: counted, and remembered by peer.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use cproxy_ebpf::{
    PROTOCOL_UDP,
    policy::{Denial, DenialKey, EGRESS, PolicyCounter, StateWord},
};

use crate::{
    decision::{Decision, Question},
    maps::{POLICY_DENIALS, count},
    subprogram::increment,
};

/// Records a denial. True if it stands, false if it is only audited.
#[inline(always)]
pub(crate) fn record(state: StateWord, question: &Question, decision: Decision) -> bool {
    let is_audited = state.audit();
    cproxy_policy_denied(question, decision.rule(), is_audited as u32);
    !is_audited
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_policy_denied(question: *const Question, rule: u32, is_audited: u32) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(question) = (unsafe { question.as_ref() }) else { return 0 };
    let counter = match (question.direction == EGRESS, is_audited != 0) {
        (false, false) => PolicyCounter::DeniedIngress,
        (true, false) => PolicyCounter::DeniedEgress,
        (false, true) => PolicyCounter::AuditedIngress,
        (true, true) => PolicyCounter::AuditedEgress,
    };
    count(counter, question.protocol == PROTOCOL_UDP);
    let Question { peer, port, protocol, direction } = *question;
    let key = DenialKey { peer, port, protocol, direction };
    // SAFETY: a helper that reads the clock.
    let last_ns = unsafe { bpf_ktime_get_ns() };
    if let Some(denial) = POLICY_DENIALS.get_ptr_mut(&key) {
        // SAFETY: a live element, of which each field may be written at any time.
        unsafe {
            increment(&raw mut (*denial).count);
            (&raw mut (*denial).last_ns).write_volatile(last_ns);
            (&raw mut (*denial).rule).write_volatile(rule);
            (&raw mut (*denial).is_audited).write_volatile(is_audited);
        }
        return 0;
    }
    // Without memory it is only counted.
    let _ = POLICY_DENIALS.insert(&key, &Denial { count: 1, last_ns, rule, is_audited }, 0);
    0
}
