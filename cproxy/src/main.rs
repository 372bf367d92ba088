//! The `cproxy` command; everything is in the library.

use std::process::ExitCode;

use cproxy_datapath::bpf::HAS_PROGRAMS;

/// No agent is built without its programs, also where its unit tests are.
const _: () = assert!(HAS_PROGRAMS, "the eBPF programs need a toolchain of their own: run `cargo xtask setup` once");

fn main() -> ExitCode {
    cproxy::cli::main()
}
