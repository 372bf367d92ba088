//! The `cproxy` command; everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    cproxy::cli::main()
}
