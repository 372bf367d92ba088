//! Work that moves its thread into other network namespaces.

use std::{io, thread, time::Duration};

use rustix::time::{ClockId, clock_gettime};

use super::error::SocketsError;

/// Runs work on a thread of its own, which may end in another network namespace than it began.
pub(super) fn on_own_thread<R: Send>(work: impl FnOnce() -> Result<R, SocketsError> + Send) -> Result<R, SocketsError> {
    let name = thread::Builder::new().name("sockets".to_owned());
    thread::scope(|scope| {
        let running = name.spawn_scoped(scope, work).map_err(|error| SocketsError::Io("no thread", error))?;
        running.join().unwrap_or_else(|_| Err(SocketsError::Io("thread", io::Error::other("ended early"))))
    })
}

/// CPU time of the calling thread so far.
pub(super) fn cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}
