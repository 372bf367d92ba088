//! Measured calls. The outcome of every call is checked, so that a case measures what its name says: no route leads to
//! a ClusterIP, so a call to one succeeds only if it is translated.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cproxy_benches::{bpf::Program, paired::Estimate};
use cproxy_tests::process::eventually;
use rustix::net::{SocketFlags, SocketType, connect, connect_unspec, socket_with, sockopt::set_socket_linger};

use crate::place::{Attached, Family, Peers, TIMEOUT};

/// Number of calls in a block: few enough to end before the machine's load changes, and to fit into queues.
pub(crate) const CALLS: usize = 100;

/// Number of calls between two clock readings, as the clock may be as coarse as 10 ns.
const CALLS_TIMED: usize = 5;

/// How a block of calls is measured.
pub(crate) enum Meter<'p> {
    /// The mean time of this program's runs, in nanoseconds, as the kernel's statistics have it.
    Program(&'p Program),
    /// The median time of a call, in nanoseconds.
    Clock,
}

impl Meter<'_> {
    fn measure(&self, mut call: impl FnMut(usize) -> io::Result<()>) -> Result<f64> {
        match self {
            Self::Program(program) => {
                let before = program.info().context("asking for a program's statistics")?;
                (0..CALLS).try_for_each(call)?;
                let after = program.info().context("asking for a program's statistics")?;
                let runs = after.runs - before.runs;
                ensure!(runs == CALLS as u64, "{CALLS} calls made the program run {runs} times");
                Ok((after.run_time_ns - before.run_time_ns) as f64 / CALLS as f64)
            }
            Self::Clock => {
                let mut times_ns = Vec::with_capacity(CALLS / CALLS_TIMED);
                for first in (0..CALLS).step_by(CALLS_TIMED) {
                    let start = Instant::now();
                    (first..first + CALLS_TIMED).try_for_each(&mut call)?;
                    times_ns.push(start.elapsed().as_nanos() as f64 / CALLS_TIMED as f64);
                }
                Estimate::of(times_ns).map(|time| time.median).context("a block has calls")
            }
        }
    }
}

/// One way to make a call.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// Attached programs.
    pub(crate) attached: Attached,
    /// Promised limit on the ratio to the first case's time, if there is one.
    pub(crate) target: Option<f64>,
    /// Runs one block.
    pub(crate) run: fn(&Peers, &Meter<'_>) -> Result<f64>,
}

impl Case {
    const fn new(name: &'static str, attached: Attached, run: fn(&Peers, &Meter<'_>) -> Result<f64>) -> Self {
        Self { name, attached, target: None, run }
    }

    const fn at_most(self, target: f64) -> Self {
        Self { target: Some(target), ..self }
    }
}

/// Unit that a suite times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// Runs of the program.
    Program,
    /// Whole system calls.
    Call,
}

/// Cases compared with the first of them.
pub(crate) struct Suite {
    pub(crate) name: &'static str,
    pub(crate) subject: Subject,
    /// Measured hook, without its family if there is one for each.
    pub(crate) hook: &'static str,
    pub(crate) cases: &'static [Case],
    /// Indices of the two cases whose difference is the cost of creating a socket's state.
    pub(crate) new_state: Option<(usize, usize)>,
}

impl Suite {
    /// Name of the hook's link in one family.
    pub(crate) fn hook_in(&self, family: Family) -> String {
        if self.hook == RELEASE { RELEASE.to_owned() } else { format!("{}{}", self.hook, family.digit()) }
    }
}

/// Limit on the ratio to the empty program for a program with nothing to do.
const MISS_MAX: f64 = 2.0;

/// The only hook of both families.
const RELEASE: &str = "sock_release";

const EMPTY: &str = "empty program";
/// Name of the case for whole calls to the Service.
const TO_SERVICE: &str = "to the ClusterIP";

/// All suites.
pub(crate) const SUITES: [Suite; 9] = [
    Suite {
        name: "TCP",
        subject: Subject::Program,
        hook: "connect",
        cases: &[
            Case::new(EMPTY, Attached::Empty, |peers, meter| tcp(peers, meter, Peers::pod_tcp)),
            Case::new("miss, to pods", Attached::Cproxy, |peers, meter| tcp(peers, meter, Peers::pod_tcp))
                .at_most(MISS_MAX),
            Case::new("miss, among the ClusterIPs", Attached::Cproxy, |peers, meter| {
                tcp(peers, meter, |peers, _| peers.stray_tcp())
            }),
            Case::new("hit", Attached::Cproxy, |peers, meter| tcp(peers, meter, |peers, _| peers.vip())),
            Case::new("hit, again on its socket", Attached::Cproxy, tcp_again),
        ],
        new_state: Some((3, 4)),
    },
    Suite {
        name: "UDP",
        subject: Subject::Program,
        hook: "connect",
        cases: &[
            Case::new(EMPTY, Attached::Empty, |peers, meter| udp(&peers.client()?, meter, peers.pod_udp())),
            Case::new("miss, to a pod", Attached::Cproxy, |peers, meter| udp(&peers.client()?, meter, peers.pod_udp()))
                .at_most(MISS_MAX),
            Case::new("miss, after a hit on its socket", Attached::Cproxy, |peers, meter| {
                udp(&client_of_service(peers)?, meter, peers.pod_udp())
            }),
            Case::new("hit, first on its socket", Attached::Cproxy, udp_anew),
            Case::new("hit, again on one socket", Attached::Cproxy, |peers, meter| {
                udp(&client_of_service(peers)?, meter, peers.vip())
            }),
        ],
        new_state: None,
    },
    Suite {
        name: "UDP",
        subject: Subject::Program,
        hook: "sendmsg",
        cases: &[
            Case::new(EMPTY, Attached::Empty, |peers, meter| send_again(peers, meter, peers.pod_udp())),
            Case::new("miss, to a pod", Attached::Cproxy, |peers, meter| send_again(peers, meter, peers.pod_udp()))
                .at_most(MISS_MAX),
            Case::new("miss, among the ClusterIPs", Attached::Cproxy, |peers, meter| {
                send_again(peers, meter, peers.stray_udp())
            }),
            Case::new("hit, first on its socket", Attached::Cproxy, send_anew),
            Case::new("hit, again on one socket", Attached::Cproxy, |peers, meter| {
                send_again(peers, meter, peers.vip())
            }),
            Case::new("refusal", Attached::Cproxy, refuse_send),
        ],
        new_state: Some((3, 4)),
    },
    Suite {
        name: "UDP",
        subject: Subject::Program,
        hook: "recvmsg",
        cases: &[
            Case::new(EMPTY, Attached::Empty, receive_from_stranger),
            Case::new("miss, no Service on the socket", Attached::Cproxy, receive_from_stranger).at_most(MISS_MAX),
            Case::new("miss, not from its backend", Attached::Cproxy, receive_from_other),
            Case::new("hit", Attached::Cproxy, receive_from_backend),
        ],
        new_state: None,
    },
    Suite {
        name: "UDP",
        subject: Subject::Program,
        hook: "getpeername",
        cases: &[
            Case::new(EMPTY, Attached::Empty, |peers, meter| peer_name(peers, meter, peers.pod_udp())),
            Case::new("miss", Attached::Cproxy, |peers, meter| peer_name(peers, meter, peers.pod_udp()))
                .at_most(MISS_MAX),
            Case::new("hit", Attached::Cproxy, |peers, meter| peer_name(peers, meter, peers.vip())),
        ],
        new_state: None,
    },
    Suite {
        name: "TCP",
        subject: Subject::Program,
        hook: RELEASE,
        cases: &[
            Case::new(EMPTY, Attached::Empty, |peers, meter| close_all(peers, meter, Peers::pod_tcp)),
            Case::new("miss, connected to pods", Attached::Cproxy, |peers, meter| {
                close_all(peers, meter, Peers::pod_tcp)
            }),
            Case::new("hit, connected to the ClusterIP", Attached::Cproxy, |peers, meter| {
                close_all(peers, meter, |peers, _| peers.vip())
            }),
        ],
        new_state: None,
    },
    Suite {
        name: "TCP connect()",
        subject: Subject::Call,
        hook: "connect",
        cases: &[
            Case::new("to pods, nothing attached", Attached::Nothing, |peers, meter| tcp(peers, meter, Peers::pod_tcp)),
            Case::new(TO_SERVICE, Attached::Cproxy, |peers, meter| tcp(peers, meter, |peers, _| peers.vip()))
                .at_most(1.02),
            Case::new("to pods", Attached::Cproxy, |peers, meter| tcp(peers, meter, Peers::pod_tcp)),
            Case::new("to pods, empty programs", Attached::Empty, |peers, meter| tcp(peers, meter, Peers::pod_tcp)),
        ],
        new_state: None,
    },
    Suite {
        name: "TCP socket(), connect(), close()",
        subject: Subject::Call,
        hook: "connect",
        cases: &[
            Case::new("to pods, nothing attached", Attached::Nothing, |peers, meter| {
                tcp_life(peers, meter, Peers::pod_tcp)
            }),
            Case::new(TO_SERVICE, Attached::Cproxy, |peers, meter| tcp_life(peers, meter, |peers, _| peers.vip()))
                .at_most(1.015),
            Case::new("to pods", Attached::Cproxy, |peers, meter| tcp_life(peers, meter, Peers::pod_tcp)),
            Case::new("to pods, empty programs", Attached::Empty, |peers, meter| {
                tcp_life(peers, meter, Peers::pod_tcp)
            }),
        ],
        new_state: None,
    },
    Suite {
        name: "UDP sendto(), again on one socket",
        subject: Subject::Call,
        hook: "sendmsg",
        cases: &[
            Case::new("to a pod, nothing attached", Attached::Nothing, |peers, meter| {
                send_again(peers, meter, peers.pod_udp())
            }),
            Case::new(TO_SERVICE, Attached::Cproxy, |peers, meter| send_again(peers, meter, peers.vip())).at_most(1.10),
            Case::new("to a pod", Attached::Cproxy, |peers, meter| send_again(peers, meter, peers.pod_udp())),
            Case::new("to a pod, empty programs", Attached::Empty, |peers, meter| {
                send_again(peers, meter, peers.pod_udp())
            }),
        ],
        new_state: None,
    },
];

/// Payload of every datagram.
const DATAGRAM: &[u8] = b"ping";

/// `connect()` on fresh sockets. The connections are accepted after the block, so that no server thread runs meanwhile.
/// A call is then only the work of the client and the kernel, without scheduling effects.
fn tcp(peers: &Peers, meter: &Meter<'_>, target: fn(&Peers, usize) -> SocketAddr) -> Result<f64> {
    connect_all(peers, meter, &tcp_sockets(peers)?, target)
}

/// `connect()` on sockets that were connected to the Service and disconnected.
fn tcp_again(peers: &Peers, meter: &Meter<'_>) -> Result<f64> {
    let sockets = tcp_sockets(peers)?;
    for socket in &sockets {
        connect(socket, &peers.vip())?;
        connect_unspec(socket)?;
    }
    accept_all(peers)?;
    connect_all(peers, meter, &sockets, |peers, _| peers.vip())
}

fn connect_all(
    peers: &Peers,
    meter: &Meter<'_>,
    sockets: &[OwnedFd],
    target: fn(&Peers, usize) -> SocketAddr,
) -> Result<f64> {
    let result = meter.measure(|number| Ok(connect(socket(sockets, number)?, &target(peers, number))?))?;
    accept_all(peers)?;
    Ok(result)
}

/// The whole life of a connection on the client's side.
fn tcp_life(peers: &Peers, meter: &Meter<'_>, target: fn(&Peers, usize) -> SocketAddr) -> Result<f64> {
    let result = meter.measure(|number| Ok(connect(tcp_socket(peers)?, &target(peers, number))?))?;
    accept_all(peers)?;
    Ok(result)
}

/// `close()` of connected sockets.
fn close_all(peers: &Peers, meter: &Meter<'_>, target: fn(&Peers, usize) -> SocketAddr) -> Result<f64> {
    let sockets = tcp_sockets(peers)?;
    for (number, socket) in sockets.iter().enumerate() {
        connect(socket, &target(peers, number))?;
    }
    accept_all(peers)?;
    let mut sockets = sockets.into_iter();
    meter.measure(|_| {
        drop(sockets.next());
        Ok(())
    })
}

/// Accepts and closes a block's connections.
fn accept_all(peers: &Peers) -> Result<()> {
    for _ in 0..CALLS {
        let (stream, _) = peers.listener.accept().context("accepting a connection")?;
        set_socket_linger(&stream, Some(Duration::ZERO))?;
    }
    Ok(())
}

/// `connect()` of the same UDP socket, repeatedly. No packet is sent, so the time is little more than the program's.
fn udp(client: &UdpSocket, meter: &Meter<'_>, target: SocketAddr) -> Result<f64> {
    meter.measure(|_| client.connect(target))
}

/// `connect()` of fresh UDP sockets.
fn udp_anew(peers: &Peers, meter: &Meter<'_>) -> Result<f64> {
    let sockets = udp_sockets(peers)?;
    meter.measure(|number| socket(&sockets, number)?.connect(peers.vip()))
}

/// A UDP socket that was connected to the Service.
fn client_of_service(peers: &Peers) -> io::Result<UdpSocket> {
    let client = peers.client()?;
    client.connect(peers.vip())?;
    Ok(client)
}

/// `sendto()` on fresh sockets.
fn send_anew(peers: &Peers, meter: &Meter<'_>) -> Result<f64> {
    let sockets = udp_sockets(peers)?;
    let result = meter.measure(|number| socket(&sockets, number)?.send_to(DATAGRAM, peers.vip()).map(drop));
    peers.drain();
    result
}

/// `sendto()` on one socket that has sent there before.
fn send_again(peers: &Peers, meter: &Meter<'_>, target: SocketAddr) -> Result<f64> {
    let client = peers.client()?;
    client.send_to(DATAGRAM, target)?;
    let result = meter.measure(|_| client.send_to(DATAGRAM, target).map(drop));
    peers.drain();
    result
}

fn refuse_send(peers: &Peers, meter: &Meter<'_>) -> Result<f64> {
    let client = peers.client()?;
    meter.measure(|_| refused(client.send_to(DATAGRAM, peers.down())))
}

/// `recvfrom()` on a socket that has never sent to a Service.
fn receive_from_stranger(peers: &Peers, meter: &Meter<'_>) -> Result<f64> {
    let client = peers.client()?;
    receive(meter, &client, peers.pods.first().context("there are pods")?, None)
}

/// `recvfrom()` of a datagram from another sender on a socket that has sent to a Service.
fn receive_from_other(peers: &Peers, meter: &Meter<'_>) -> Result<f64> {
    let (client, _) = sender_to_service(peers)?;
    receive(meter, &client, &peers.stray, None)
}

/// `recvfrom()` of a Service's answers.
fn receive_from_backend(peers: &Peers, meter: &Meter<'_>) -> Result<f64> {
    let (client, backend) = sender_to_service(peers)?;
    receive(meter, &client, backend, Some(peers.vip()))
}

/// A UDP socket that has sent to the Service, and its backend.
fn sender_to_service(peers: &Peers) -> Result<(UdpSocket, &UdpSocket)> {
    let client = peers.client()?;
    client.send_to(DATAGRAM, peers.vip()).context("sending to the ClusterIP")?;
    let backend =
        eventually(TIMEOUT, "a pod gets what is sent to the ClusterIP", || peers.drain().ok_or("none has yet"));
    Ok((client, backend))
}

/// Receives datagrams that `server` sends. Their source must be the server's own address or `shown`.
fn receive(meter: &Meter<'_>, client: &UdpSocket, server: &UdpSocket, shown: Option<SocketAddr>) -> Result<f64> {
    let address = client.local_addr()?;
    for _ in 0..CALLS {
        server.send_to(DATAGRAM, address)?;
    }
    let shown = shown.map_or_else(|| server.local_addr(), Ok)?;
    let mut buffer = [0; DATAGRAM.len()];
    meter.measure(|_| is(client.recv_from(&mut buffer)?.1, shown))
}

/// `getpeername()` on one socket, which returns the address passed to `connect()`.
fn peer_name(peers: &Peers, meter: &Meter<'_>, target: SocketAddr) -> Result<f64> {
    let client = peers.client()?;
    client.connect(target)?;
    meter.measure(|_| is(client.peer_addr()?, target))
}

fn is(shown: SocketAddr, expected: SocketAddr) -> io::Result<()> {
    if shown == expected { Ok(()) } else { Err(io::Error::other(format!("the kernel shows {shown}, not {expected}"))) }
}

fn refused<T>(result: io::Result<T>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::other("a Service without endpoints does not refuse")),
    }
}

fn socket<S>(sockets: &[S], number: usize) -> io::Result<&S> {
    sockets.get(number).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

fn udp_sockets(peers: &Peers) -> io::Result<Vec<UdpSocket>> {
    (0..CALLS).map(|_| peers.client()).collect()
}

fn tcp_sockets(peers: &Peers) -> io::Result<Vec<OwnedFd>> {
    (0..CALLS).map(|_| tcp_socket(peers)).collect()
}

/// A TCP socket that leaves no state when it is closed, not even TIME_WAIT.
fn tcp_socket(peers: &Peers) -> io::Result<OwnedFd> {
    let socket = socket_with(peers.family.domain(), SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_linger(&socket, Some(Duration::ZERO))?;
    Ok(socket)
}
