//! Replies of UDP: datagrams between a port of the pod and a peer that were allowed in one direction let those of the
//! other pass for a time. One that passed as a reply lets no others pass.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use cproxy_ebpf::policy::{REPLY_SECONDS, ReplyKey};

use crate::{maps::POLICY_REPLIES, subprogram::on_stack};

/// Records that a datagram was allowed in this direction.
#[inline(always)]
pub(crate) fn record(key: &ReplyKey, direction: u8) {
    cproxy_policy_passed(key, direction.into());
}

/// True if a datagram was allowed in the direction that is not this one.
#[inline(always)]
pub(crate) fn may_reply(key: &ReplyKey, direction: u8) -> bool {
    cproxy_policy_may_reply(key, direction.into()) != 0
}

/// Writes time and direction, once in a second.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_policy_passed(key: *const ReplyKey, direction: u32) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(key) = (unsafe { key.as_ref() }) else { return 0 };
    let key = on_stack(key);
    let now = seconds() << 1 | u64::from(direction & 1);
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
extern "C" fn cproxy_policy_may_reply(key: *const ReplyKey, direction: u32) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(key) = (unsafe { key.as_ref() }) else { return 0 };
    let key = on_stack(key);
    let Some(last) = POLICY_REPLIES.get_ptr_mut(&key) else { return 0 };
    // SAFETY: a live element.
    let last = unsafe { last.read_volatile() };
    ((last ^ u64::from(direction)) & 1 == 1 && seconds() - (last >> 1) < REPLY_SECONDS) as u32
}

fn seconds() -> u64 {
    // SAFETY: a helper that reads the clock.
    (unsafe { bpf_ktime_get_ns() }) / 1_000_000_000
}
