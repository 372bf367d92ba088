//! Parts of a binary of programs: its licence, and a handler of panics that the verifier never meets.

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // The verifier rejects any program that could reach this.
    loop {}
}

/// The kernel offers `bpf_set_retval` and the storage helpers only to programs under a GPL-compatible license.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
