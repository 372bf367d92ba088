//! `cproxy exec`: becomes another program, which finds its signals as a program expects them. A shell has what it starts in the
//! background ignore SIGINT and SIGQUIT, and neither it nor a shell below it can undo that.

use std::{
    ffi::OsString,
    io,
    os::unix::process::CommandExt,
    process::{Command, ExitCode},
};

/// The first word of its command line; the others are the program's.
pub(super) const NAME: &str = "exec";

/// As shells have it.
const EXIT_NOT_FOUND: u8 = 127;
const EXIT_NOT_RUN: u8 = 126;

pub(super) fn run(mut words: impl Iterator<Item = OsString>) -> ExitCode {
    let Some(program) = words.next() else {
        super::complain(&"exec: no program is given");
        return ExitCode::from(super::EXIT_USAGE);
    };
    for signal in [libc::SIGINT, libc::SIGQUIT] {
        // SAFETY: no handler is installed, only the default restored.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let error = Command::new(&program).args(words).exec();
    super::complain(&format_args!("{}: {error}", program.display()));
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound { EXIT_NOT_FOUND } else { EXIT_NOT_RUN })
}
