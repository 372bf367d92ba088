//! What is done to a socket before it connects.

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

type Setup = dyn Fn(BorrowedFd<'_>) -> io::Result<()> + Send + Sync;

/// Sets up sockets before they connect or send. The agent marks its own, so that the socket programs leave them alone
/// and it never depends on the table that it writes.
#[derive(Clone)]
pub struct SocketSetup(Arc<Setup>);

impl SocketSetup {
    /// Calls `setup` for each socket. An error keeps the socket from being used.
    pub fn new(setup: impl Fn(BorrowedFd<'_>) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(setup))
    }

    /// Leaves sockets as they are.
    #[must_use]
    pub fn none() -> Self {
        Self::new(|_| Ok(()))
    }

    /// Sets up one socket.
    ///
    /// # Errors
    /// The socket must not be used.
    pub fn apply(&self, socket: &impl AsFd) -> io::Result<()> {
        (self.0)(socket.as_fd())
    }
}

impl fmt::Debug for SocketSetup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SocketSetup")
    }
}
