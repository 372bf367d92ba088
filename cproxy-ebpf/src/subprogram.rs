//! Functions that the verifier checks once, not at each of their callers, and helpers of theirs.
//!
//! A function that is global, by the linkage in the object's BTF, is verified by itself, with arguments of which only the
//! type is known (kernel 5.13: pointers to memory of a known size). Its callers go on with an unknown number, so what it
//! found out does not multiply the paths through them. The programs stay small that way: `verified instructions` is what
//! a kernel without a JIT pays for at start, and what a large program is refused for.

use cproxy_ebpf::Translation;

/// Copies field by field: a copy of the whole would become a loop over its bytes.
#[inline(always)]
pub(crate) fn copy(target: &mut Translation, source: &Translation) {
    for word in 0..4 {
        target.vip[word] = source.vip[word];
        target.backend[word] = source.backend[word];
    }
    (target.vip_port, target.backend_port) = (source.vip_port, source.backend_port);
    target.slot = source.slot;
}

/// A number of which the compiler knows nothing, so that it does not turn one comparison of several words back into a
/// branch for each word.
#[inline(always)]
pub(crate) fn opaque(mut number: u64) -> u64 {
    // SAFETY: a move of a register to itself. (With no instruction at all, two lines of source would share an offset, and
    // the kernel refuses such line information.)
    unsafe { core::arch::asm!("{0} = {0}", inout(reg) number, options(pure, nomem, nostack, preserves_flags)) };
    number
}

/// Puts `new` where `expected` is and gives back what was there: `BPF_CMPXCHG` (kernel 5.12), a full barrier. `core` has no
/// such atomics for this target.
#[inline(always)]
pub(crate) fn compare_and_exchange(value: *mut u64, expected: u64, new: u64) -> u64 {
    let mut found = expected;
    // SAFETY: the verifier checks that the pointer is to a live value; the instruction touches nothing but r0 and it.
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
