//! Programs that cproxy attaches to the cgroup2 root. Each hook has a file, named after its system call.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod binary;
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
