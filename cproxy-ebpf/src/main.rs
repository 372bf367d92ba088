//! The programs that cproxy attaches to the cgroup2 root, one file per hook family.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod connect;
mod endpoint;
mod exclude;
mod flows;
mod getpeername;
mod lookup;
mod maps;
mod peer;
mod recvmsg;
mod search;
mod select;
mod sendmsg;
mod sock_addr;
mod subprogram;
mod tcp;

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // The verifier admits no program in which this can be reached.
    loop {}
}

/// `bpf_set_retval` and the storage helpers are open to GPL-compatible programs only.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
