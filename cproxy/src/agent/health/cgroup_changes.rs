//! Changes of the cgroup that the programs are attached to: cgroups made in it, and its own removal.

use std::{io, mem::MaybeUninit, os::fd::OwnedFd, path::Path};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags},
    io::Errno,
};
use tokio::io::{Interest, unix::AsyncFd};

/// Containers get their cgroups by CREATE.
const CHANGES: WatchFlags = WatchFlags::CREATE.union(WatchFlags::DELETE_SELF);

/// Inotify instance that becomes readable after a change.
#[derive(Debug)]
pub(in crate::agent) struct CgroupChanges(AsyncFd<OwnedFd>);

impl CgroupChanges {
    /// Starts to watch. Call it inside a tokio runtime.
    pub(super) fn open() -> io::Result<Self> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        // SAFETY: an OwnedFd is the same open descriptor for as long as it lives, and nothing else closes it.
        let inotify = unsafe { AsyncFd::register_with_interest(inotify, Interest::READABLE) };
        Ok(Self(inotify.map_err(io::Error::from)?))
    }

    /// Watches this cgroup and the one above it, in which it may be made again. Watching one again has no effect.
    pub(super) fn watch(&self, cgroup: &Path) -> io::Result<()> {
        for dir in [Some(cgroup), cgroup.parent()].into_iter().flatten().filter(|dir| dir.is_dir()) {
            inotify::add_watch(self.0.get_ref(), dir, CHANGES)?;
        }
        Ok(())
    }

    /// Waits for a change.
    pub(super) async fn changed(&self) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            let mut buffer = [MaybeUninit::uninit(); 4096];
            let mut reader = Reader::new(ready.get_inner(), &mut buffer);
            let mut has_changed = false;
            loop {
                match reader.next() {
                    // The end of a watch follows the removal of its cgroup.
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
