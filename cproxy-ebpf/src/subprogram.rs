//! Helpers of subprograms, and the idea behind these: the verifier checks a subprogram once, not at each of its
//! callers.
//!
//! Subprograms are functions of global linkage in the object's BTF, named `cproxy_*`. The verifier checks such a
//! function by itself, and knows only the types of its arguments (pointers to memory of a known size: Linux 5.13). Its
//! callers see the result as an unknown number, so the function's branches do not multiply the paths through them. That
//! keeps the number of verified instructions small, on which the time of a load depends, and whether the kernel accepts
//! a program.

use cproxy_ebpf::Translation;

/// Copies a translation field by field. A copy of the whole struct would be compiled to a loop over its bytes.
#[inline(always)]
pub(crate) fn copy(target: &mut Translation, source: &Translation) {
    for word in 0..4 {
        target.vip[word] = source.vip[word];
        target.backend[word] = source.backend[word];
    }
    (target.vip_port, target.backend_port) = (source.vip_port, source.backend_port);
    target.slot = source.slot;
}

/// Returns the number unchanged, but hides its origin from the compiler, which could otherwise turn one comparison of
/// several words back into a branch for each word.
#[inline(always)]
pub(crate) fn opaque(mut number: u64) -> u64 {
    // SAFETY: a move of a register to itself. (Without an instruction, two lines of source would share an offset, and
    // the kernel refuses such line information.)
    unsafe { core::arch::asm!("{0} = {0}", inout(reg) number, options(pure, nomem, nostack, preserves_flags)) };
    number
}

/// Copy of an argument's memory for a map's key: before Linux 6.2, a key may be on the stack, but not behind the
/// pointer that a subprogram was given.
#[inline(always)]
pub(crate) fn on_stack<T: Copy>(argument: &T) -> T {
    // SAFETY: a live value; volatile, so that the compiler uses no pointer to it in the place of the copy.
    unsafe { (&raw const *argument).read_volatile() }
}

/// Adds 1 to a number that several CPUs count in.
#[inline(always)]
pub(crate) fn increment(count: *mut u64) {
    // SAFETY: the verifier checks that `count` points to a live value; the instruction changes that value alone.
    unsafe { core::arch::asm!("lock *(u64 *)({count} + 0) += {one}", count = in(reg) count, one = in(reg) 1u64) };
}

/// Replaces `expected` by `new`. Returns the previous value, which is `expected` on success. This is `BPF_CMPXCHG`
/// (Linux 5.12), a full barrier, which `core` does not offer for this target.
#[inline(always)]
pub(crate) fn compare_and_exchange(value: *mut u64, expected: u64, new: u64) -> u64 {
    let mut found = expected;
    // SAFETY: the verifier checks that `value` points to a live value; the instruction changes that value and r0.
    unsafe {
        core::arch::asm!(
            "r0 = cmpxchg_64({value} + 0, r0, {new})",
            value = in(reg) value,
            new = in(reg) new,
            inout("r0") found,
        );
    }
    found
}
