//! Common frame of the small servers: a thread for each server, a thread for each connection, and an end on request.

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

/// A running server. Dropping it ends it and all its open connections.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    signals: Signals,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listening address, with the actual port if the requested one was 0.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The number of connections or datagrams so far.
    pub fn served(&self) -> u64 {
        self.signals.served.load(Ordering::Relaxed)
    }

    /// Starts a server that runs `work` on a thread of its own.
    pub(crate) fn start(address: SocketAddr, work: impl FnOnce(&Signals) + Send + 'static) -> Self {
        let signals = Signals::new();
        let theirs = signals.clone();
        let thread = Some(thread::spawn(move || work(&theirs)));
        Self { address, signals, thread }
    }

    /// Starts a thread with `serve` for each connection to `listener`.
    pub(crate) fn accept(
        listener: TcpListener,
        serve: impl Fn(&TcpStream, SocketAddr, &Signals) -> io::Result<()> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        // A client may close between the wait and the accept.
        listener.set_nonblocking(true)?;
        Ok(Self::start(address, move |signals| {
            let serve = &serve;
            thread::scope(|scope| {
                while signals.wait_for(&listener) {
                    let Ok((stream, peer)) = listener.accept() else { continue };
                    signals.count();
                    // A client that closes early is no error of the server.
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

/// State shared by a server and its threads.
#[derive(Clone, Debug)]
pub(crate) struct Signals {
    /// An eventfd that becomes readable, and is never read, when the server is to end.
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

    /// Waits for data to read. False when the server is to end.
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
