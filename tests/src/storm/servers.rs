//! Servers that answer at every backend's address and return it with the question.

use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use rustix::net::sockopt::{self, Timeout};

use super::{
    addresses::{TCP_PORTS, UDP_PORTS},
    calls::{self, Control},
};
use crate::sandbox::Sandbox;

/// Number of threads for each port. One serves a connection at a time.
const THREADS: usize = 8;

/// Space for the questions of all clients.
const RECEIVE_BUFFER_BYTES: usize = 8 << 20;

/// Pause between two checks for the end.
const LOOK: Duration = Duration::from_millis(100);

/// Limit on the wait for the question on a connection.
const PATIENCE: Duration = Duration::from_secs(20);

/// Bit of a question after which a TCP client asks more.
pub const STAYS: u64 = 1 << 63;

/// Length of a client's number for a question.
pub(crate) const QUESTION_BYTES: usize = 8;
/// Length of an answer: the question, the server's address in 16 bytes, and its port.
pub const ANSWER_BYTES: usize = QUESTION_BYTES + 18;

/// All servers; they end when this is dropped.
#[derive(Debug)]
pub struct Servers {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    /// UDP sockets at the TCP ports: misdirected datagrams are not counted as lost.
    _silent: Vec<UdpSocket>,
}

impl Servers {
    /// Starts them.
    ///
    /// # Panics
    /// When a port is taken.
    pub fn start(sandbox: &Sandbox) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let anywhere = |port| SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port);
        let silent = TCP_PORTS.map(|port| sandbox.netns().run(|| UdpSocket::bind(anywhere(port))).unwrap());
        let mut servers = Self { is_over, threads: Vec::new(), _silent: silent.into() };
        for port in TCP_PORTS {
            let listener = Arc::new(sandbox.netns().run(|| TcpListener::bind(anywhere(port))).unwrap());
            let is_over = servers.is_over.clone();
            servers.threads(&listener, move |listener| drop(accept(listener, &is_over)));
        }
        for port in UDP_PORTS {
            let socket = Arc::new(sandbox.netns().run(|| UdpSocket::bind(anywhere(port))).unwrap());
            calls::enable_destinations(&socket).unwrap();
            sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER_BYTES).unwrap();
            servers.threads(&socket, move |socket| drop(respond(socket, port)));
        }
        servers
    }

    fn threads<S: AsFd + Send + Sync + 'static>(
        &mut self,
        socket: &Arc<S>,
        serve: impl Fn(&S) + Clone + Send + 'static,
    ) {
        sockopt::set_socket_timeout(socket, Timeout::Recv, Some(LOOK)).unwrap();
        for _ in 0..THREADS {
            let (is_over, socket, serve) = (self.is_over.clone(), socket.clone(), serve.clone());
            self.threads.push(thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    serve(&socket);
                }
            }));
        }
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Serves one connection, or gives it a thread of its own if the client asks more. An error means that the client has
/// gone, or that there was no connection.
fn accept(listener: &TcpListener, is_over: &Arc<AtomicBool>) -> io::Result<()> {
    let (mut stream, _) = listener.accept()?;
    if answer(&mut stream)? & STAYS == 0 {
        return Ok(());
    }
    let is_over = is_over.clone();
    thread::spawn(move || while !is_over.load(Ordering::Relaxed) && answer(&mut stream).is_ok() {});
    Ok(())
}

/// Answers one question, and returns it.
fn answer(stream: &mut TcpStream) -> io::Result<u64> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut question = [0; QUESTION_BYTES];
    stream.read_exact(&mut question)?;
    stream.write_all(&encode(question, stream.local_addr()?))?;
    Ok(u64::from_be_bytes(question))
}

/// Answers one datagram from the address it was sent to.
fn respond(socket: &UdpSocket, port: u16) -> io::Result<()> {
    let mut question = [0; QUESTION_BYTES];
    let mut control = Control::default();
    let client = calls::receive(socket, IoSliceMut::new(&mut question), &mut control)?;
    let answer = encode(question, SocketAddr::new(control.destination().into(), port));
    calls::send(socket, IoSlice::new(&answer), &client, &control)
}

fn encode(question: [u8; QUESTION_BYTES], server: SocketAddr) -> [u8; ANSWER_BYTES] {
    let octets = match server.ip() {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    };
    let mut answer = [0; ANSWER_BYTES];
    answer[..QUESTION_BYTES].copy_from_slice(&question);
    answer[QUESTION_BYTES..ANSWER_BYTES - 2].copy_from_slice(&octets);
    answer[ANSWER_BYTES - 2..].copy_from_slice(&server.port().to_be_bytes());
    answer
}

/// The question, and the server's address with IPv4 unmapped.
pub(crate) fn decode(answer: [u8; ANSWER_BYTES]) -> (u64, SocketAddr) {
    let (question, server) = answer.split_first_chunk().unwrap();
    let (octets, port) = server.split_first_chunk::<16>().unwrap();
    let address = Ipv6Addr::from_octets(*octets).to_canonical();
    (u64::from_be_bytes(*question), SocketAddr::new(address, u16::from_be_bytes(port.try_into().unwrap())))
}
