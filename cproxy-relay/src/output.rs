//! Output of commands.

use cproxy_daemon::{without_os_codes, write_stderr, write_stdout};

/// Prints to stdout; a reader that has had enough is no error.
///
/// # Errors
/// The text cannot be written.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    Ok(write_stdout(|stdout| stdout.write_all(without_os_codes(text).as_bytes())).map(drop)?)
}

/// Prints an error to stderr, with the name of the program.
pub(crate) fn print_error(message: &str) {
    write_stderr(&format!("cproxy-relay: {}\n", without_os_codes(message)));
}
