//! `cproxy exec`: replaces itself by another program, with the default handling of SIGINT and SIGQUIT. A shell makes
//! the programs that it starts in the background ignore both signals, and no shell below it can undo that.

use std::{
    ffi::OsString,
    io,
    os::unix::process::CommandExt,
    process::{Command, ExitCode},
};

/// The name of the command; the words after it are the program and its arguments.
pub(super) const NAME: &str = "exec";

/// Exit codes that shells use, too.
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
