//! Changes of files and directories that somebody waits for (inotify(7)). They cost nothing until there is one.

use std::{io, mem::MaybeUninit, os::fd::OwnedFd, path::Path};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags},
    io::Errno,
};
use tokio::io::{Interest, unix::AsyncFd};

/// Inotify instance that becomes readable after a change.
#[derive(Debug)]
pub struct FileChanges(AsyncFd<OwnedFd>);

impl FileChanges {
    /// Watches nothing yet. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// The kernel has no inotify, or the user has too many instances.
    pub fn open() -> io::Result<Self> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        // SAFETY: an OwnedFd is the same open descriptor for as long as it lives, and nothing else closes it.
        let inotify = unsafe { AsyncFd::register_with_interest(inotify, Interest::READABLE) };
        Ok(Self(inotify.map_err(io::Error::from)?))
    }

    /// Watches a path for these changes, too. Watching one again has no effect.
    ///
    /// # Errors
    /// There is no file.
    pub fn watch(&self, path: &Path, changes: WatchFlags) -> io::Result<()> {
        Ok(inotify::add_watch(self.0.get_ref(), path, changes).map(drop)?)
    }

    /// Waits for a change.
    ///
    /// # Errors
    /// The changes cannot be read.
    pub async fn changed(&self) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            let mut buffer = [MaybeUninit::uninit(); 4096];
            let mut reader = Reader::new(ready.get_inner(), &mut buffer);
            let mut has_changed = false;
            loop {
                match reader.next() {
                    // The end of a watch follows the removal of its file.
                    Ok(event) => has_changed |= !event.events().contains(ReadFlags::IGNORED),
                    Err(Errno::WOULDBLOCK) => break,
                    Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            ready.clear_ready();
            if has_changed {
                return Ok(());
            }
        }
    }
}
