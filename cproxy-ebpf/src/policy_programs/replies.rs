//! Replies of UDP: datagrams between a port of the pod and a peer that were allowed in one direction let those of the
//! other pass for a time.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use cproxy_ebpf::policy::{REPLY_SECONDS, ReplyKey};

use crate::{maps::POLICY_REPLIES, subprogram::on_stack};

/// Records that datagrams have passed.
#[inline(always)]
pub(crate) fn record(key: &ReplyKey) {
    cproxy_policy_passed(key);
}

/// True if datagrams have passed in the other direction.
#[inline(always)]
pub(crate) fn may_reply(key: &ReplyKey) -> bool {
    cproxy_policy_may_reply(key) != 0
}

/// Writes the time, once in a second.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_policy_passed(key: *const ReplyKey) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(key) = (unsafe { key.as_ref() }) else { return 0 };
    let key = on_stack(key);
    let now = seconds();
    match POLICY_REPLIES.get_ptr_mut(&key) {
        // SAFETY: a live element.
        Some(last) if unsafe { last.read_volatile() } == now => {}
        // SAFETY: as above.
        Some(last) => unsafe { last.write_volatile(now) },
        None => {
            let _ = POLICY_REPLIES.insert(&key, &now, 0);
        }
    }
    0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_policy_may_reply(key: *const ReplyKey) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(key) = (unsafe { key.as_ref() }) else { return 0 };
    let key = on_stack(key);
    // SAFETY: a live element.
    POLICY_REPLIES.get_ptr_mut(&key).is_some_and(|last| seconds() - unsafe { last.read_volatile() } < REPLY_SECONDS)
        as u32
}

fn seconds() -> u64 {
    // SAFETY: a helper that reads the clock.
    (unsafe { bpf_ktime_get_ns() }) / 1_000_000_000
}
