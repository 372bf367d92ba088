//! `cproxy exec`: replaces itself by another program, with the default handling of SIGINT and SIGQUIT. A shell makes
//! the programs that it starts in the background ignore both signals, and no shell below it can undo that.

use std::{
    ffi::OsString,
    io,
    os::unix::process::CommandExt,
    process::{Command, ExitCode},
};

use clap::Args;

use super::exit_codes;

/// Arguments of `cproxy exec`.
#[derive(Args, Debug)]
pub(super) struct ExecOptions {
    /// Program to run
    program: OsString,
    /// Its arguments
    #[arg(value_name = "ARGUMENT", trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

pub(super) fn run(options: &ExecOptions) -> ExitCode {
    for signal in [libc::SIGINT, libc::SIGQUIT] {
        // SAFETY: no handler is installed, only the default restored.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let error = Command::new(&options.program).args(&options.arguments).exec();
    super::output::print_error(&format_args!("{}: {error}", options.program.display()));
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound { exit_codes::NOT_FOUND } else { exit_codes::NOT_RUN })
}
