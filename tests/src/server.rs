//! The frame of the small servers: a thread per server, a thread per connection, and an end on request.

use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

use rustix::event::{EventfdFlags, PollFd, PollFlags};

/// A running server. It, and every connection it has open, ends when this value is dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    signals: Signals,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Where it listens; the real port if it was asked for any.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many connections or datagrams it has taken so far.
    pub fn served(&self) -> u64 {
        self.signals.served.load(Ordering::Relaxed)
    }

    /// Runs `work` on a thread of its own.
    pub(crate) fn start(address: SocketAddr, work: impl FnOnce(&Signals) + Send + 'static) -> Self {
        let signals = Signals::new();
        let theirs = signals.clone();
        let thread = Some(thread::spawn(move || work(&theirs)));
        Self { address, signals, thread }
    }

    /// Gives every connection to `listener` a thread that runs `serve`.
    pub(crate) fn accept(
        listener: TcpListener,
        serve: impl Fn(&TcpStream, SocketAddr, &Signals) -> io::Result<()> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        // A client may be gone between the wait and the accept.
        listener.set_nonblocking(true)?;
        Ok(Self::start(address, move |signals| {
            let serve = &serve;
            thread::scope(|scope| {
                while signals.wait_for(&listener) {
                    let Ok((stream, peer)) = listener.accept() else { continue };
                    signals.count();
                    // A client that goes away in the middle is no concern of the server's.
                    scope.spawn(move || stream.set_nonblocking(false).and_then(|()| serve(&stream, peer, signals)));
                }
            });
        }))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.signals.stop();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            eprintln!("the server on {} panicked", self.address);
        }
    }
}

/// What a server and its threads share.
#[derive(Clone, Debug)]
pub(crate) struct Signals {
    /// An eventfd: readable, and never read, once the server is to end.
    stop: Arc<OwnedFd>,
    served: Arc<AtomicU64>,
}

impl Signals {
    fn new() -> Self {
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("cannot create an eventfd");
        Self { stop: Arc::new(stop), served: Arc::default() }
    }

    pub(crate) fn count(&self) {
        self.served.fetch_add(1, Ordering::Relaxed);
    }

    fn stop(&self) {
        rustix::io::write(&self.stop, &1_u64.to_ne_bytes()).expect("cannot write to an eventfd");
    }

    /// Waits until there is something to read. False when the server is to end.
    pub(crate) fn wait_for(&self, socket: &impl AsFd) -> bool {
        let mut waiting = [PollFd::new(&self.stop, PollFlags::IN), PollFd::new(socket, PollFlags::IN)];
        loop {
            match rustix::event::poll(&mut waiting, None) {
                Ok(_) => break,
                Err(error) => assert_eq!(error, rustix::io::Errno::INTR, "cannot wait for a socket"),
            }
        }
        let [stop, _] = waiting;
        stop.revents().is_empty()
    }
}
