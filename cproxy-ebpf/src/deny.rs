//! Calls that are refused, with their errno.

use core::ptr::addr_of;

use aya_ebpf::helpers::generated::bpf_set_retval;
use cproxy_ebpf::Counter;

use crate::{maps::count, sock_addr::DENY};

const ECONNREFUSED: i32 = 111;
const EHOSTUNREACH: i32 = 113;

/// 1 if this kernel has `bpf_set_retval` for these hooks (Linux 5.18). The agent sets it before it loads the programs.
/// If it is 0, the verifier removes the call as dead code.
#[unsafe(no_mangle)]
pub(crate) static ERRNO_HELPER: u8 = 1;

/// Fails the call with ECONNREFUSED, or with EHOSTUNREACH if the set drops. Returns the verdict.
#[inline(always)]
pub(crate) fn deny(drops: bool) -> i32 {
    cproxy_deny(drops as u32);
    DENY
}

/// Counts a denied call and sets its errno.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_deny(drops: u32) -> u32 {
    let (counter, errno) = if drops != 0 { (Counter::Dropped, EHOSTUNREACH) } else { (Counter::Refused, ECONNREFUSED) };
    count(counter);
    // SAFETY: a static; volatile, because the agent changes it in the object file.
    if unsafe { addr_of!(ERRNO_HELPER).read_volatile() } != 0 {
        // SAFETY: a helper that takes an integer.
        unsafe { bpf_set_retval(-errno) };
    }
    0
}
