//! Real TCP and UDP servers that return their names, so that a client knows which backend it has reached.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

pub use crate::server::Server;
use crate::{
    Done,
    sandbox::{Netns, Sandbox},
    server::Signals,
};

/// Timeout of the clients in this module.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Pause between the connections of [`while_a_client_connects`]: a thousand a second are enough to meet any gap.
const CONNECT_PAUSE: Duration = Duration::from_millis(1);

/// Greets every TCP connection to `address` with two lines, `name` and the client's address as the server sees it, and
/// then echoes all data until the client closes.
///
/// # Panics
/// When `address` cannot be listened on; add it to the sandbox first.
pub fn tcp(sandbox: &Sandbox, address: impl ToSocketAddrs, name: &str) -> Server {
    tcp_in(sandbox.netns(), address, name)
}

/// Like [`tcp`], in any network namespace.
///
/// # Panics
/// When `address` cannot be listened on.
pub fn tcp_in(netns: &Netns, address: impl ToSocketAddrs, name: &str) -> Server {
    let name = name.to_owned();
    listen_in(netns, address, move |stream, peer, signals| converse(stream, &format!("{name}\n{peer}\n"), signals))
}

/// Answers every UDP datagram to `address` with `name`. The address must not be a wildcard: an answer must come from
/// the address that the datagram was sent to.
///
/// # Panics
/// When `address` cannot be bound; add it to the sandbox first.
pub fn udp(sandbox: &Sandbox, address: impl ToSocketAddrs, name: &str) -> Server {
    udp_in(sandbox.netns(), address, name)
}

/// Like [`udp`], in any network namespace.
///
/// # Panics
/// When `address` cannot be bound.
pub fn udp_in(netns: &Netns, address: impl ToSocketAddrs, name: &str) -> Server {
    let address = one_address(address).expect("an address and a port");
    let socket =
        netns.run(|| UdpSocket::bind(address)).unwrap_or_else(|error| panic!("cannot bind UDP {address}: {error}"));
    let bound = socket.local_addr().expect("a bound socket has an address");
    // A datagram with a wrong checksum can end the wait without being there to read.
    socket.set_nonblocking(true).expect("a socket can be made non-blocking");
    let name = name.to_owned();
    Server::start(bound, move |signals| {
        let mut datagram = [0; 2048];
        while signals.wait_for(&socket) {
            // An error here belongs to an earlier answer that had no receiver.
            if let Ok((_, client)) = socket.recv_from(&mut datagram) {
                signals.count();
                drop(socket.send_to(name.as_bytes(), client));
            }
        }
    })
}

/// The first two lines of a [`tcp`] server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The server's name.
    pub name: String,
    /// The client's address as the server sees it.
    pub client: SocketAddr,
}

/// Connects to a [`tcp`] server from the calling thread's namespace and reads its greeting.
pub fn ask_tcp(address: impl ToSocketAddrs) -> io::Result<Greeting> {
    connect_tcp(address).map(|(greeting, _)| greeting)
}

/// Connects to a [`tcp`] server and returns its name. The socket's peer must be `address`.
pub fn ask_name(address: impl ToSocketAddrs) -> io::Result<String> {
    let address = one_address(address)?;
    let (greeting, stream) = connect_tcp(address)?;
    require_same(stream.peer_addr()?, address)?;
    Ok(greeting.name)
}

/// Like [`ask_tcp`], and keeps the connection.
pub fn connect_tcp(address: impl ToSocketAddrs) -> io::Result<(Greeting, TcpStream)> {
    let stream = TcpStream::connect_timeout(&one_address(address)?, CLIENT_TIMEOUT)?;
    stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    let greeting = {
        // The server sends nothing more on its own, so nothing is lost in the buffer.
        let mut lines = BufReader::new(&stream).lines();
        let mut line = || lines.next().unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()));
        let name = line()?;
        let client = line()?.parse().map_err(io::Error::other)?;
        Greeting { name, client }
    };
    Ok((greeting, stream))
}

/// Sends `message` on a connection to a [`tcp`] server and waits for its echo.
pub fn ping_tcp(mut stream: &TcpStream, message: &str) -> io::Result<()> {
    stream.write_all(message.as_bytes())?;
    let mut answer = vec![0; message.len()];
    stream.read_exact(&mut answer)?;
    if answer == message.as_bytes() { Ok(()) } else { Err(io::Error::other("another message came back")) }
}

/// Does `work` while a client connects to the server at `address` again and again, and keeps one connection all the
/// time.
///
/// # Panics
/// When a connection fails, or reaches a server of another name.
pub fn while_a_client_connects<R>(address: impl ToSocketAddrs, name: &str, work: impl FnOnce() -> R) -> R {
    let address = one_address(address).expect("an address and a port");
    let (greeting, kept) = connect_tcp(address).expect("the first connection");
    assert_eq!(greeting.name, name);
    let (is_over, connected) = (AtomicBool::new(false), AtomicBool::new(false));
    let client = || {
        while !is_over.load(Ordering::Relaxed) || !connected.load(Ordering::Relaxed) {
            assert_eq!(ask_tcp(address).expect("a connection").name, name);
            connected.store(true, Ordering::Relaxed);
            thread::sleep(CONNECT_PAUSE);
        }
    };
    let result = thread::scope(|scope| {
        let client = scope.spawn(client);
        // The client ends with the work, even if that panics.
        let done = Done(&is_over);
        let result = work();
        drop(done);
        client.join().expect("every connection reaches the server");
        result
    });
    ping_tcp(&kept, "still there?").expect("the connection that was kept");
    result
}

/// Sends one datagram from an unconnected socket to a [`udp`] server. Returns its name and the source of the answer.
pub fn ask_udp(address: impl ToSocketAddrs) -> io::Result<(String, SocketAddr)> {
    let address = one_address(address)?;
    ask_udp_from(&udp_client(address)?, address)
}

/// Like [`ask_udp`], from a socket the caller keeps.
pub fn ask_udp_from(socket: &UdpSocket, address: impl ToSocketAddrs) -> io::Result<(String, SocketAddr)> {
    socket.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    socket.send_to(b"?", address)?;
    let mut answer = vec![0; 2048];
    let (length, from) = socket.recv_from(&mut answer)?;
    answer.truncate(length);
    Ok((String::from_utf8(answer).map_err(io::Error::other)?, from))
}

/// A UDP socket for datagrams to `address`.
pub fn udp_client(address: impl ToSocketAddrs) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(if one_address(address)?.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    Ok(socket)
}

/// Connects a UDP socket to a [`udp`] server and returns its name. The socket's peer must be `address`.
pub fn ask_connected_udp(address: impl ToSocketAddrs) -> io::Result<String> {
    let address = one_address(address)?;
    let socket = udp_client(address)?;
    socket.connect(address)?;
    require_same(socket.peer_addr()?, address)?;
    ask_peer(&socket)
}

/// The name of the [`udp`] server that a socket is connected to.
pub fn ask_peer(socket: &UdpSocket) -> io::Result<String> {
    socket.send(b"?")?;
    let mut answer = vec![0; 2048];
    let length = socket.recv(&mut answer)?;
    answer.truncate(length);
    String::from_utf8(answer).map_err(io::Error::other)
}

/// Whether a call failed with ECONNREFUSED.
pub fn is_refused<T>(result: io::Result<T>) -> bool {
    result.is_err_and(|error| error.raw_os_error() == Some(libc::ECONNREFUSED))
}

fn require_same(shown: SocketAddr, asked: SocketAddr) -> io::Result<()> {
    if shown == asked { Ok(()) } else { Err(io::Error::other(format!("the socket shows {shown}, not {asked}"))) }
}

/// Resolves `address`, which may be text such as `10.0.0.1:80`.
pub(crate) fn one_address(address: impl ToSocketAddrs) -> io::Result<SocketAddr> {
    address.to_socket_addrs()?.next().ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// Listens on `address` inside the sandbox.
pub(crate) fn listen(
    sandbox: &Sandbox,
    address: impl ToSocketAddrs,
    serve: impl Fn(&TcpStream, SocketAddr, &Signals) -> io::Result<()> + Send + Sync + 'static,
) -> Server {
    listen_in(sandbox.netns(), address, serve)
}

fn listen_in(
    netns: &Netns,
    address: impl ToSocketAddrs,
    serve: impl Fn(&TcpStream, SocketAddr, &Signals) -> io::Result<()> + Send + Sync + 'static,
) -> Server {
    let address = one_address(address).expect("an address and a port");
    netns
        .run(|| TcpListener::bind(address))
        .and_then(|listener| Server::accept(listener, serve))
        .unwrap_or_else(|error| panic!("cannot listen on TCP {address}: {error}"))
}

/// Serves one connection to its end.
fn converse(mut stream: &TcpStream, greeting: &str, signals: &Signals) -> io::Result<()> {
    stream.write_all(greeting.as_bytes())?;
    let mut buffer = [0; 4096];
    while signals.wait_for(&stream) {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            break;
        }
        stream.write_all(buffer.get(..length).unwrap_or_default())?;
    }
    Ok(())
}
