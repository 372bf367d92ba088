//! Network namespaces without names, which live as long as a thread, a process or a descriptor refers to them.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use rustix::thread::{LinkNameSpaceType, UnshareFlags};

/// A handle on a network namespace. Clones are cheap, and any thread may use one.
#[derive(Clone, Debug)]
pub struct Netns {
    file: Arc<File>,
}

impl Netns {
    /// The calling thread's namespace.
    pub fn current() -> Self {
        // /proc/self would be the main thread, but each thread has a namespace of its own.
        let file = File::open("/proc/thread-self/ns/net").expect("cannot open /proc/thread-self/ns/net: mount /proc");
        Self { file: Arc::new(file) }
    }

    /// The namespace behind a file of `/proc`.
    ///
    /// # Panics
    /// When its process is gone.
    pub(crate) fn open(path: &Path) -> Self {
        let file = File::open(path).unwrap_or_else(|error| panic!("cannot open {}: {error}", path.display()));
        Self { file: Arc::new(file) }
    }

    /// A new, empty namespace.
    pub(crate) fn create() -> Self {
        let made = || {
            unshare();
            Self::current()
        };
        thread::scope(|scope| scope.spawn(made).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Moves the calling thread into the namespace for good. Meant for threads that never leave it.
    pub fn enter(&self) -> io::Result<()> {
        Ok(rustix::thread::move_into_link_name_space(self.as_fd(), Some(LinkNameSpaceType::Network))?)
    }

    /// Runs `work` on a short-lived thread inside the namespace and returns its result. Sockets made there stay in the
    /// namespace, whichever thread uses them later.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        let entered = || {
            self.enter().expect("cannot enter the network namespace: run as root");
            work()
        };
        thread::scope(|scope| scope.spawn(entered).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// A path for `nsenter --net=`, valid for as long as this handle exists.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()))
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Holds the calling thread inside a fresh namespace until dropped, which must happen on the same thread.
#[derive(Debug)]
pub(crate) struct FreshNetns {
    pub(crate) inside: Netns,
    pub(crate) outside: Netns,
}

impl FreshNetns {
    /// Moves the calling thread into a new, empty namespace.
    pub(crate) fn enter() -> Self {
        let outside = Netns::current();
        unshare();
        Self { inside: Netns::current(), outside }
    }
}

impl Drop for FreshNetns {
    fn drop(&mut self) {
        if let Err(error) = self.outside.enter() {
            eprintln!("sandbox: the thread stays in its network namespace: {error}");
        }
    }
}

/// Moves the calling thread into a new, empty namespace.
fn unshare() {
    // SAFETY: CLONE_NEWNET changes which network the thread sees; it neither unshares memory nor descriptors.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
        .expect("cannot create a network namespace: run as root on a kernel with CONFIG_NET_NS");
}
