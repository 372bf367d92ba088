//! Processes with the names of cproxy's own, and with duplicates of sockets.

use std::{
    fs,
    os::fd::OwnedFd,
    process::{Child, Command, Stdio},
    time::Duration,
};

use crate::process::eventually;

/// Limit on the time until the process has its name.
const NAMED: Duration = Duration::from_secs(10);

/// A process that ends with this value.
#[derive(Debug)]
pub struct Borrower(Child);

impl Borrower {
    /// Starts one with this name and this socket.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(name: &str, socket: impl Into<OwnedFd>) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("printf {name} > /proc/$$/comm; sleep 60 < /dev/null")]);
        let child = command.stdin(Stdio::from(socket.into())).spawn().expect("cannot start sh");
        let borrower = Self(child);
        eventually(NAMED, "the process has its name", || {
            let present = fs::read_to_string(format!("/proc/{}/comm", borrower.0.id())).unwrap_or_default();
            if present.trim_end() == name { Ok(()) } else { Err(present) }
        });
        borrower
    }
}

impl Drop for Borrower {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}
