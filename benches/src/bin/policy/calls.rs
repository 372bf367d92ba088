//! The calls that are measured, each with both of its ends in this thread, so that no other has to be woken.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cproxy_benches::paired::Estimate;
use cproxy_tests::sandbox::Sandbox;
use rustix::{
    io::Errno,
    net::{
        AddressFamily, SocketFlags, SocketType,
        sockopt::{self, Timeout},
    },
};

use crate::{
    engine::{ALLOWED, DENIED, PORT},
    place::{Servers, Stand, enter},
};

/// Calls of a turn: few enough for a queue of connections, and to end before the machine's load changes.
pub(crate) const CALLS: usize = 100;
/// Bytes of a write to a stream: few enough that it never waits for the reader.
const CHUNK: usize = 16 << 10;
/// Writes of a turn.
const CHUNKS: usize = 512;
/// Payload of a datagram.
const DATAGRAM: &[u8] = b"ping";

/// Limit on a call. One that is dropped ends then.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// Figures of a turn; times in microseconds.
pub(crate) type Figures = Vec<f64>;

/// One figure.
#[derive(Clone, Copy)]
pub(crate) struct Metric {
    /// Name in files.
    pub(crate) key: &'static str,
    /// Name in tables, with its unit.
    pub(crate) meaning: &'static str,
    pub(crate) digits: usize,
    /// Aim for cproxy's isolated pods: the ratio to a pod without a policy.
    pub(crate) aim: Option<f64>,
}

/// The figures of a turn of [`all`].
pub(crate) const METRICS: [Metric; 9] = [
    Metric { key: "connect_us", meaning: "connect(), p50, us", digits: 2, aim: Some(1.02) },
    Metric { key: "connect_first_us", meaning: "connect(), the first of a turn, us", digits: 1, aim: None },
    Metric { key: "udp_us", meaning: "datagram sent and answered, p50, us", digits: 2, aim: Some(1.05) },
    Metric { key: "stream_us_per_mib", meaning: "established stream, us for each MiB", digits: 1, aim: Some(1.0) },
    Metric { key: "accept_us", meaning: "connect() to the pod, p50, us", digits: 2, aim: Some(1.025) },
    Metric { key: "accept_first_us", meaning: "connect() to the pod, the first of a turn, us", digits: 1, aim: None },
    Metric { key: "udp_in_us", meaning: "datagram to the pod sent and answered, p50, us", digits: 2, aim: Some(1.05) },
    Metric { key: "life_us", meaning: "socket(), connect(), close(), p50, us", digits: 2, aim: None },
    Metric { key: "send_us", meaning: "sendto() alone, p50, us", digits: 2, aim: None },
];

/// Indices in [`METRICS`].
pub(crate) const CONNECT: usize = 0;
pub(crate) const UDP: usize = 2;
pub(crate) const STREAM: usize = 3;
pub(crate) const ACCEPT: usize = 4;
/// Figures in the order of [`METRICS`].
type Turn = [f64; METRICS.len()];

/// One turn of a pod: calls of the pod and then calls to it.
pub(crate) fn all(sandbox: &Sandbox, stand: &Stand, outside: &Servers) -> Result<Figures> {
    let pod = &stand.pod;
    let (server, own) = (SocketAddr::new(ALLOWED.into(), PORT), SocketAddr::new(pod.address.into(), PORT));
    let (sockets, life, client) = pod.run(|| -> Result<_> {
        let sockets = new_sockets()?;
        let life = lives(server)?;
        let client = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("a UDP socket")?;
        client.set_read_timeout(Some(CALL_TIMEOUT)).context("setting a timeout")?;
        Ok((sockets, life, client))
    })??;
    accept(outside)?;
    let (connect, connect_first) = connects(&sockets, server)?;
    accept(outside)?;
    drop(sockets);
    let (udp, send) = datagrams(&client, &outside.udp, server)?;
    let stream = pod.run(|| stream_to(server, outside))??;
    enter(sandbox.cgroup())?;
    let (sockets, client) = sandbox.netns().run(|| -> Result<_> {
        let client = UdpSocket::bind((ALLOWED, 0)).context("a UDP socket")?;
        client.set_read_timeout(Some(CALL_TIMEOUT)).context("setting a timeout")?;
        Ok((new_sockets()?, client))
    })?;
    let (accepted, accepted_first) = connects(&sockets, own)?;
    accept(&stand.servers)?;
    drop(sockets);
    let (udp_in, _) = datagrams(&client, &stand.servers.udp, own)?;
    let turn: Turn = [connect, connect_first, udp, stream, accepted, accepted_first, udp_in, life, send];
    Ok(turn.into())
}

/// New sockets of a turn.
fn new_sockets() -> Result<Vec<OwnedFd>> {
    (0..CALLS).map(|_| socket()).collect()
}

/// A TCP socket whose calls end in time, and whose end leaves no state behind.
fn socket() -> Result<OwnedFd> {
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    for direction in [Timeout::Send, Timeout::Recv] {
        sockopt::set_socket_timeout(&socket, direction, Some(CALL_TIMEOUT))?;
    }
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    Ok(socket)
}

/// Median and first of the times of connect() in microseconds. The connections are accepted later.
fn connects(sockets: &[OwnedFd], server: SocketAddr) -> Result<(f64, f64)> {
    let connect = |socket| timed(|| Ok(rustix::net::connect(socket, &server)?));
    let times = sockets.iter().map(connect).collect::<io::Result<Vec<_>>>();
    let times = times.with_context(|| format!("connecting to {server}"))?;
    let first = *times.first().context("there are calls")?;
    Ok((median(times)?, first))
}

/// Median of the times of a client's part of whole connections.
fn lives(server: SocketAddr) -> Result<f64> {
    let life = || timed(|| Ok(rustix::net::connect(socket().map_err(io::Error::other)?, &server)?));
    let times = (0..CALLS).map(|_| life()).collect::<io::Result<Vec<_>>>();
    median(times.with_context(|| format!("connecting to {server}"))?)
}

/// Accepts and closes a turn's connections.
fn accept(servers: &Servers) -> Result<()> {
    for _ in 0..CALLS {
        let (stream, _) = servers.tcp.accept().context("accepting a connection")?;
        sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
    }
    Ok(())
}

/// Medians of the times of a datagram with its answer, and of sending it alone.
fn datagrams(client: &UdpSocket, server: &UdpSocket, to: SocketAddr) -> Result<(f64, f64)> {
    let (mut both, mut sends) = (Vec::with_capacity(CALLS), Vec::with_capacity(CALLS));
    let mut buffer = [0; 16];
    for _ in 0..CALLS {
        let start = Instant::now();
        client.send_to(DATAGRAM, to).with_context(|| format!("sending to {to}"))?;
        sends.push(micros(start.elapsed()));
        let (_, from) = server.recv_from(&mut buffer).with_context(|| format!("receiving at {to}"))?;
        server.send_to(DATAGRAM, from).with_context(|| format!("answering {from}"))?;
        client.recv_from(&mut buffer).with_context(|| format!("the answer of {to}"))?;
        both.push(micros(start.elapsed()));
    }
    Ok((median(both)?, median(sends)?))
}

/// Time for each MiB of a stream to a server.
fn stream_to(server: SocketAddr, servers: &Servers) -> Result<f64> {
    let client = socket()?;
    rustix::net::connect(&client, &server).with_context(|| format!("connecting to {server}"))?;
    let (mut client, (mut accepted, _)) = (TcpStream::from(client), servers.tcp.accept().context("accepting")?);
    accepted.set_read_timeout(Some(CALL_TIMEOUT)).context("setting a timeout")?;
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

/// Answer to a call that the policy denies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Answer {
    /// An error, after this time in milliseconds.
    Error(f64),
    /// None within [`CALL_TIMEOUT`].
    Silence,
}

/// A denied call of the pod, and one to it.
pub(crate) fn denied(sandbox: &Sandbox, stand: &Stand) -> Result<[Answer; 2]> {
    let own = SocketAddr::new(stand.pod.address.into(), PORT);
    let out = stand.pod.run(|| answer(&socket()?, SocketAddr::new(DENIED.into(), PORT), Errno::PERM))??;
    enter(sandbox.cgroup())?;
    let into = sandbox.netns().run(|| {
        let socket = socket()?;
        rustix::net::bind(&socket, &SocketAddr::new(DENIED.into(), 0))?;
        answer(&socket, own, Errno::CONNREFUSED)
    })?;
    Ok([out, into])
}

/// Answer to connect(), which is this error or none.
fn answer(socket: &OwnedFd, server: SocketAddr, expected: Errno) -> Result<Answer> {
    let start = Instant::now();
    let result = rustix::net::connect(socket, &server);
    let took = start.elapsed();
    match result {
        Err(error) if error == expected => Ok(Answer::Error(took.as_secs_f64() * 1e3)),
        // The timeout for sending ends connect() with this error.
        Err(Errno::INPROGRESS) => Ok(Answer::Silence),
        other => {
            ensure!(other.is_err(), "the policy does not deny {server}");
            other.with_context(|| format!("connecting to {server}"))?;
            Ok(Answer::Silence)
        }
    }
}

fn timed(call: impl FnOnce() -> io::Result<()>) -> io::Result<f64> {
    let start = Instant::now();
    let result = call();
    let took = start.elapsed();
    result.map(|()| micros(took))
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn median(times: Vec<f64>) -> Result<f64> {
    Estimate::of(times).map(|times| times.median).context("there are calls")
}
