//! Setup of sockets before they connect.

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

type Setup = dyn Fn(BorrowedFd<'_>) -> io::Result<()> + Send + Sync;

/// Function applied to a socket before it connects or sends. The agent marks its sockets, so that the socket programs
/// do not translate them and the agent never depends on the table that it writes.
#[derive(Clone)]
pub struct SocketSetup(Arc<Setup>);

impl SocketSetup {
    /// Applies `setup` to each socket. A socket is not used after an error.
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
