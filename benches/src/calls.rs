//! Calls with both ends in this thread, so that no other has to be woken: the kernel's work without waits.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{
        AddressFamily, SocketFlags, SocketType,
        sockopt::{self, Timeout},
    },
};

use crate::paired::Estimate;

/// Calls of a turn: few enough for a queue of connections, and to end before the machine's load changes.
pub const CALLS: usize = 100;
/// Bytes of a write to a stream: few enough that it never waits for the reader.
const CHUNK: usize = 16 << 10;
/// Writes of a turn.
const CHUNKS: usize = 512;
/// Bytes of a request and of its answer.
const REQUEST: usize = 100;
const ANSWER: usize = 1_000;

/// Limit on a call. One that is dropped ends then.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// New sockets of a turn.
///
/// # Errors
/// A call fails.
pub fn new_sockets() -> Result<Vec<OwnedFd>> {
    (0..CALLS).map(|_| socket()).collect()
}

/// A TCP socket whose calls end in time, and whose end leaves no state behind.
///
/// # Errors
/// A call fails.
pub fn socket() -> Result<OwnedFd> {
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    for direction in [Timeout::Send, Timeout::Recv] {
        sockopt::set_socket_timeout(&socket, direction, Some(CALL_TIMEOUT))?;
    }
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    Ok(socket)
}

/// Median and first of the times of connect() in microseconds. The connections are accepted later.
///
/// # Errors
/// A call fails.
pub fn connects(sockets: &[OwnedFd], server: SocketAddr) -> Result<(f64, f64)> {
    let connect = |socket| timed(|| Ok(rustix::net::connect(socket, &server)?));
    let times = sockets.iter().map(connect).collect::<io::Result<Vec<_>>>();
    let times = times.with_context(|| format!("connecting to {server}"))?;
    let first = *times.first().context("there are calls")?;
    Ok((median(times)?, first))
}

/// Accepts and closes a turn's connections.
///
/// # Errors
/// A call fails.
pub fn accept(server: &TcpListener) -> Result<()> {
    (0..CALLS).try_for_each(|_| accept_one(server))
}

/// Like [`accept`], of connections that their clients have reset. Where several processors send one's packets, its
/// reset may overtake the end of its handshake: then it is gone.
///
/// # Errors
/// A call fails.
pub fn accept_reset(server: &TcpListener) -> Result<()> {
    const PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
    for _ in 0..CALLS {
        if poll(&mut [PollFd::new(server, PollFlags::IN)], Some(&PATIENCE))? == 0 {
            break;
        }
        accept_one(server)?;
    }
    Ok(())
}

fn accept_one(server: &TcpListener) -> Result<()> {
    let (stream, _) = server.accept().context("accepting a connection")?;
    Ok(sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?)
}

/// Time for each MiB of a stream to a server, in microseconds.
///
/// # Errors
/// A call fails.
pub fn stream_to(server: SocketAddr, listener: &TcpListener) -> Result<f64> {
    let (mut client, mut accepted) = connected(server, listener)?;
    let (chunk, mut read) = (vec![1; CHUNK], vec![0; CHUNK]);
    let mut pass = || -> io::Result<()> {
        client.write_all(&chunk)?;
        accepted.read_exact(&mut read)
    };
    // The first ones are slower, for all alike.
    (0..CHUNKS / 8).try_for_each(|_| pass()).context("a stream")?;
    let start = Instant::now();
    (0..CHUNKS).try_for_each(|_| pass()).context("a stream")?;
    Ok(micros(start.elapsed()) / (CHUNKS * CHUNK) as f64 * f64::from(1 << 20))
}

/// Median of the times of a short request and its answer on a connection that stands.
///
/// # Errors
/// A call fails.
pub fn requests(server: SocketAddr, listener: &TcpListener) -> Result<f64> {
    let (mut client, mut accepted) = connected(server, listener)?;
    let (mut request, mut answer) = ([1; REQUEST], vec![1; ANSWER]);
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        times.push(
            timed(|| {
                client.write_all(&request)?;
                accepted.read_exact(&mut request)?;
                accepted.write_all(&answer)?;
                client.read_exact(&mut answer)
            })
            .with_context(|| format!("a request to {server}"))?,
        );
    }
    median(times)
}

/// Both ends of a new connection.
fn connected(server: SocketAddr, listener: &TcpListener) -> Result<(TcpStream, TcpStream)> {
    let client = socket()?;
    rustix::net::connect(&client, &server).with_context(|| format!("connecting to {server}"))?;
    let (client, (accepted, _)) = (TcpStream::from(client), listener.accept().context("accepting")?);
    accepted.set_read_timeout(Some(CALL_TIMEOUT)).context("setting a timeout")?;
    accepted.set_nodelay(true).context("setting an option")?;
    client.set_nodelay(true).context("setting an option")?;
    Ok((client, accepted))
}

/// Time of a call in microseconds.
///
/// # Errors
/// Those of the call.
pub fn timed(call: impl FnOnce() -> io::Result<()>) -> io::Result<f64> {
    let start = Instant::now();
    let result = call();
    let took = start.elapsed();
    result.map(|()| micros(took))
}

/// A time in microseconds.
#[must_use]
pub fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Median of some times.
///
/// # Errors
/// There are none.
pub fn median(times: Vec<f64>) -> Result<f64> {
    Estimate::of(times).map(|times| times.median).context("there are calls")
}
