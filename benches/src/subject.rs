//! The Service that changes, and the servers behind its ClusterIP.

use std::{
    io::{self, BufRead as _, BufReader},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use cproxy_tests::{
    echo::{self, Server},
    manifest::{Service, Slice},
    sandbox::Netns,
};
use rustix::net::sockopt::set_socket_linger;
use serde_json::Value;

/// The Service's name.
pub const SUBJECT: &str = "subject";
/// The Service's ClusterIP and port, TCP.
pub const VIP: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 255, 1)), 80);
const TARGET_PORT: u16 = 8080;

/// The Service's endpoint before and after a change.
pub const BACKENDS: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::new(10, 244, 0, 1)), IpAddr::V4(Ipv4Addr::new(10, 244, 0, 2))];

/// Limit for a connection. Nothing leaves the machine, but a connection may pass hundreds of thousands of rules. Before
/// there are any rules, no backend answers.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(25);

/// Longest pause between two polls for one client. It grows with the number of clients, so that the polls for all of
/// them leave the CPUs to the clients.
const PAUSE_MAX: Duration = Duration::from_millis(5);
const PAUSE_MAX_PER_CLIENT: Duration = Duration::from_millis(1);

/// Shortest pause between two polls, and the limit as a share of the elapsed time. Each connection is an entry that
/// kube-proxy reads when it looks for stale ones.
const PAUSE: Duration = Duration::from_micros(100);
const PAUSE_PART: u32 = 50;

/// Limit on every wait, longer than any takes.
pub const TIMEOUT: Duration = Duration::from_secs(600);

/// The Service and its slice, with the first backend.
#[must_use]
pub fn objects() -> [Value; 2] {
    [Service::new(SUBJECT).cluster_ips([VIP.ip()]).tcp("", VIP.port(), TARGET_PORT).into(), slice(0)]
}

/// The slice after `changes` changes.
#[must_use]
pub fn slice(changes: usize) -> Value {
    Slice::v4(SUBJECT).tcp("", TARGET_PORT).ready([backend(changes)]).into()
}

/// The backend after `changes` changes.
#[must_use]
pub fn backend(changes: usize) -> IpAddr {
    let [before, after] = BACKENDS;
    if changes.is_multiple_of(2) { before } else { after }
}

/// Starts the backends in a namespace that has their addresses.
#[must_use]
pub fn serve(netns: &Netns) -> Vec<Server> {
    BACKENDS.map(|backend| echo::tcp_in(netns, (backend, TARGET_PORT), &backend.to_string())).into()
}

/// Starts to poll for a backend at once, in a thread, for the time of its first answer.
#[must_use]
pub fn look_for(netns: &Netns, backend: IpAddr) -> Seen {
    look_for_one_of(1, netns, backend)
}

/// The same for one of `clients` clients, all of which are looked at.
#[must_use]
pub fn look_for_one_of(clients: u32, netns: &Netns, backend: IpAddr) -> Seen {
    let pause_max = PAUSE_MAX.max(PAUSE_MAX_PER_CLIENT * clients);
    let (found, seen): (Sender<Result<Instant>>, _) = channel();
    let netns = netns.clone();
    thread::spawn(move || {
        let entered = netns.enter().context("entering a network namespace");
        // The receiver may have given up.
        drop(found.send(entered.and_then(|()| wait_for(backend, pause_max))));
    });
    Seen(seen)
}

/// Pending time of the first answer.
pub struct Seen(Receiver<Result<Instant>>);

impl Seen {
    /// Waits for the answer.
    ///
    /// # Errors
    /// No backend, or not the expected one, has answered within [`TIMEOUT`].
    pub fn wait(self) -> Result<Instant> {
        self.0.recv().context("the thread that looks has ended")?
    }
}

fn wait_for(backend: IpAddr, pause_max: Duration) -> Result<Instant> {
    let (started, wanted) = (Instant::now(), backend.to_string());
    let mut last = None;
    while started.elapsed() < TIMEOUT {
        match ask() {
            Ok(name) if name == wanted => return Ok(Instant::now()),
            other => last = Some(other),
        }
        thread::sleep(PAUSE.max(started.elapsed() / PAUSE_PART).min(pause_max));
    }
    anyhow::bail!("{VIP} does not lead to {backend} within {TIMEOUT:?}, but: {last:?}")
}

fn ask() -> io::Result<String> {
    let stream = TcpStream::connect_timeout(&VIP, CONNECT_TIMEOUT)?;
    // A reset leaves no state that would be kept for minutes.
    set_socket_linger(&stream, Some(Duration::ZERO))?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    BufReader::new(&stream).lines().next().unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()))
}
