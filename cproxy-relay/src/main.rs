//! The `cproxy-relay` command; everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    cproxy_relay::cli::main()
}
