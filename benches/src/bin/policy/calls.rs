//! The calls that are measured, each with both of its ends in this thread, so that no other has to be woken.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    os::fd::OwnedFd,
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use cproxy_benches::{
    calls::{
        CALL_TIMEOUT, CALLS, accept, accept_reset, connects, median, micros, new_sockets, socket, stream_to, timed,
    },
    pod::enter,
};
use cproxy_tests::sandbox::Sandbox;
use rustix::io::Errno;

use crate::{
    engine::{ALLOWED, DENIED, PORT},
    place::{Servers, Stand},
};

/// Payload of a datagram.
const DATAGRAM: &[u8] = b"ping";

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
    accept_reset(&outside.tcp)?;
    let (connect, connect_first) = connects(&sockets, server)?;
    accept(&outside.tcp)?;
    drop(sockets);
    let (udp, send) = datagrams(&client, &outside.udp, server)?;
    let stream = pod.run(|| stream_to(server, &outside.tcp))??;
    enter(sandbox.cgroup())?;
    let (sockets, client) = sandbox.netns().run(|| -> Result<_> {
        let client = UdpSocket::bind((ALLOWED, 0)).context("a UDP socket")?;
        client.set_read_timeout(Some(CALL_TIMEOUT)).context("setting a timeout")?;
        Ok((new_sockets()?, client))
    })?;
    let (accepted, accepted_first) = connects(&sockets, own)?;
    accept(&stand.servers.tcp)?;
    drop(sockets);
    let (udp_in, _) = datagrams(&client, &stand.servers.udp, own)?;
    let turn: Turn = [connect, connect_first, udp, stream, accepted, accepted_first, udp_in, life, send];
    Ok(turn.into())
}

/// Median of the times of a client's part of whole connections.
fn lives(server: SocketAddr) -> Result<f64> {
    let life = || timed(|| Ok(rustix::net::connect(socket().map_err(io::Error::other)?, &server)?));
    let times = (0..CALLS).map(|_| life()).collect::<io::Result<Vec<_>>>();
    median(times.with_context(|| format!("connecting to {server}"))?)
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
