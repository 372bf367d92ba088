//! Output of commands on stdout and stderr, which may be closed, full or a pipe that nobody reads.

use std::{
    io::{self, ErrorKind, Write},
    sync::atomic::{AtomicBool, Ordering},
};

/// Whether stdout was closed when the process started. Before `main`, the standard library opens /dev/null in its
/// place, which takes everything.
static WAS_CLOSED: AtomicBool = AtomicBool::new(false);

// SAFETY: the C library calls each function of this section once, before there are other threads.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    // SAFETY: this command of fcntl(2) takes no argument and changes nothing.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    WAS_CLOSED.store(flags == -1, Ordering::Relaxed);
}

/// Has `write` write to stdout. Returns false if its reader has had enough.
///
/// # Errors
/// Stdout takes nothing.
pub fn write_stdout(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<bool> {
    let written = match WAS_CLOSED.load(Ordering::Relaxed) {
        true => Err(io::Error::from_raw_os_error(libc::EBADF)),
        false => {
            let mut stdout = io::stdout().lock();
            write(&mut stdout).and_then(|()| stdout.flush())
        }
    };
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(io::Error::new(error.kind(), format!("cannot write to stdout: {error}"))),
        Ok(()) => Ok(true),
    }
}

/// Writes to stderr. Unlike `eprint!`, it does not panic where that takes nothing.
pub fn write_stderr(text: &str) {
    io::stderr().write_all(text.as_bytes()).ok();
}
