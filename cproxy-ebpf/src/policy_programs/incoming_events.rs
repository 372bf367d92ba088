//! Events of what comes in and is denied, for `cproxy trace`. Without a tracer a denial costs one lookup more.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use cproxy_ebpf::observation::{Call, Event, Verdict};

use crate::{
    decision::{Decision, Question},
    maps::POLICY_EVENTS,
};

/// Codes of a denial in one number, since a subprogram has five arguments at most: rule, call, verdict.
#[inline(always)]
pub(crate) fn codes(decision: Decision, call: Call, is_audited: bool) -> u64 {
    let verdict = if is_audited { Verdict::Audited } else { Verdict::Denied };
    decision.rule() as u64 | (call as u64) << 32 | (verdict as u64) << 40
}

/// Reports what comes in and is denied.
#[inline(always)]
pub(crate) fn report(question: &Question, decision: Decision, is_audited: bool) {
    cproxy_policy_incoming(question, codes(decision, Call::Receive, is_audited));
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_policy_incoming(question: *const Question, codes: u64) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(question) = (unsafe { question.as_ref() }) else { return 0 };
    let Some(mut event) = POLICY_EVENTS.get(0).and_then(|events| events.reserve(0)) else { return 0 };
    // SAFETY: within the reserved event, which is written whole.
    unsafe { write(event.as_mut_ptr(), question, codes) };
    event.submit(0);
    0
}

/// Writes a whole event, without process and socket.
///
/// # Safety
/// The pointer is that of a reserved event.
#[inline(always)]
pub(crate) unsafe fn write(fields: *mut Event, question: &Question, codes: u64) {
    let Question { peer, port, protocol, .. } = *question;
    // SAFETY: within the event, as the caller says. Words are written one by one: a copy of an array would be compiled
    // to a loop over its bytes.
    unsafe {
        (*fields).time_ns = bpf_ktime_get_ns();
        ((*fields).socket_cookie, (*fields).netns_cookie, (*fields).cgroup_id) = (0, 0, 0);
        let [vip, backend] = [&raw mut (*fields).vip, &raw mut (*fields).backend].map(|words| words.cast::<u32>());
        let command = (&raw mut (*fields).command).cast::<u32>();
        for (index, word) in peer.iter().enumerate() {
            vip.add(index).write_volatile(*word);
            backend.add(index).write_volatile(if index == 0 { codes as u32 } else { 0 });
            command.add(index).write_volatile(0);
        }
        ((*fields).vip_port, (*fields).backend_port) = (port.to_be(), 0);
        (*fields).protocol = protocol;
        (*fields).verdict = (codes >> 40) as u8;
        (*fields).call = (codes >> 32) as u8;
        (*fields).reason = 0;
        ((*fields).pid, (*fields).uid) = (0, 0);
    }
}
