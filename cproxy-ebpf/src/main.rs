//! Programs that cproxy attaches to the cgroup2 root. Each hook has a file, named after its system call.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod connect;
mod deny;
mod endpoint;
mod exclude;
mod flows;
mod getpeername;
mod lookup;
mod maps;
#[cfg_attr(feature = "trace", path = "observe_calls.rs")]
mod observe;
mod own_address;
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
    // The verifier rejects any program that could reach this.
    loop {}
}

/// The kernel offers `bpf_set_retval` and the storage helpers only to programs under a GPL-compatible license.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
