//! TCP relay in front of a server, plain or as an HTTP proxy, which records connections and breaks them on command.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use crate::{
    echo, http,
    process::eventually,
    sandbox::Sandbox,
    server::{Server, Signals},
};

/// Any free port of this machine.
const ANY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Time between two looks whether what the server sends is still held.
const HOLD_POLL: Duration = Duration::from_millis(2);

/// A running relay. Dropping it ends it and all its connections.
pub struct Relay {
    server: Server,
    connections: Arc<Mutex<Connections>>,
}

/// Change of the relayed connections, which are numbered from 0 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RelayChange {
    /// A connection was made.
    Opened(usize),
    /// A connection has ended.
    Closed(usize),
}

/// Fault of a relay, for all its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// All that clients send is lost, and nobody is told.
    LosesRequests,
    /// All that the server sends is lost, and nobody is told.
    LosesResponses,
    /// Everything is lost, as by a router that has forgotten the connections: those never work again that have sent
    /// something meanwhile.
    Forgets,
    /// A connection ends after this many bytes from the server.
    EndsAfter(usize),
    /// All that the server sends is changed.
    Garbles,
    /// All that the server sends comes once the fault is over.
    HoldsResponses,
}

impl Fault {
    /// Bytes that are passed on in place of these; `None`: the end of the connection. `sent` bytes came before.
    fn apply(self, is_response: bool, sent: usize, bytes: &mut [u8]) -> Option<&[u8]> {
        match self {
            Self::LosesRequests if !is_response => return Some(&[]),
            Self::LosesResponses if is_response => return Some(&[]),
            Self::Forgets => return Some(&[]),
            Self::EndsAfter(most) if is_response && sent + bytes.len() > most => return None,
            Self::Garbles if is_response => bytes.fill(b'?'),
            _ => {}
        }
        Some(bytes)
    }
}

#[derive(Default)]
struct Connections {
    history: Vec<RelayChange>,
    opened: usize,
    open: BTreeMap<usize, TcpStream>,
    fault: Option<Fault>,
    /// Bytes of servers that were lost.
    lost: usize,
}

impl Relay {
    /// Relays every connection to `target`.
    pub fn start(sandbox: &Sandbox, target: SocketAddr) -> Self {
        Self::start_at(sandbox, ANY, target)
    }

    /// Like [`Relay::start`], at this address.
    pub fn start_at(sandbox: &Sandbox, address: SocketAddr, target: SocketAddr) -> Self {
        Self::serve(sandbox, address, move |_, _| Ok(Some(target)))
    }

    /// Relays every connection to the target of its CONNECT request. With `authorization`, such as `Basic dTpw`, it
    /// refuses requests that do not carry it.
    pub fn start_proxy(sandbox: &Sandbox, authorization: Option<&'static str>) -> Self {
        Self::serve(sandbox, ANY, move |stream, signals| accept_tunnel(stream, authorization, signals))
    }

    fn serve(
        sandbox: &Sandbox,
        address: SocketAddr,
        target: impl Fn(&TcpStream, &Signals) -> io::Result<Option<SocketAddr>> + Send + Sync + 'static,
    ) -> Self {
        let connections = Arc::<Mutex<Connections>>::default();
        let ours = connections.clone();
        let server = echo::listen(sandbox, address, move |client, _, signals| {
            let Some(target) = target(client, signals)? else { return Ok(()) };
            let server = TcpStream::connect(target)?;
            let number = lock(&ours).open(client)?;
            thread::scope(|scope| {
                scope.spawn(|| copy(&server, client, true, &ours, signals));
                copy(client, &server, false, &ours, signals);
            });
            lock(&ours).close(number);
            Ok(())
        });
        Self { server, connections }
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// All changes so far, in order.
    pub fn history(&self) -> Vec<RelayChange> {
        lock(&self.connections).history.clone()
    }

    /// The number of open connections.
    pub fn open_count(&self) -> usize {
        lock(&self.connections).open.len()
    }

    /// Waits until this many connections are open.
    ///
    /// # Panics
    /// After `timeout`.
    pub fn wait_for_connections(&self, count: usize, timeout: Duration) {
        eventually(timeout, format_args!("{count} connections are open"), || match self.open_count() {
            open if open == count => Ok(()),
            open => Err(open),
        });
    }

    /// Bytes from servers that a fault has lost so far.
    pub fn lost_bytes(&self) -> usize {
        lock(&self.connections).lost
    }

    /// Gives all present and later connections a fault; `None`: they work again. Those that have lost data do not.
    pub fn set_fault(&self, fault: Option<Fault>) {
        lock(&self.connections).fault = fault;
    }

    /// Ends all open connections.
    pub fn cut(&self) {
        // A connection that has just ended needs no end.
        lock(&self.connections).open.values().for_each(|client| drop(client.shutdown(Shutdown::Both)));
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // Connections whose data is held do not see that they are to end.
        self.set_fault(None);
    }
}

impl Connections {
    fn open(&mut self, client: &TcpStream) -> io::Result<usize> {
        let number = self.opened;
        self.open.insert(number, client.try_clone()?);
        self.history.push(RelayChange::Opened(number));
        self.opened += 1;
        Ok(number)
    }

    fn close(&mut self, number: usize) {
        self.open.remove(&number);
        self.history.push(RelayChange::Closed(number));
    }
}

fn lock(connections: &Mutex<Connections>) -> MutexGuard<'_, Connections> {
    connections.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Copies until either side ends, and then ends both. `is_response`: from the server.
fn copy(
    mut from: &TcpStream,
    mut to: &TcpStream,
    is_response: bool,
    connections: &Mutex<Connections>,
    signals: &Signals,
) {
    let (mut buffer, mut sent, mut is_forgotten) = (vec![0; 16 << 10], 0, false);
    while signals.wait_for(&from)
        && let Ok(length @ 1..) = from.read(&mut buffer)
    {
        while is_response && lock(connections).fault == Some(Fault::HoldsResponses) {
            thread::sleep(HOLD_POLL);
        }
        let bytes = buffer.get_mut(..length).unwrap_or_default();
        is_forgotten |= lock(connections).fault == Some(Fault::Forgets);
        let fault = if is_forgotten { Some(Fault::Forgets) } else { lock(connections).fault };
        let passed = match fault {
            Some(fault) => fault.apply(is_response, sent, bytes),
            None => Some(&*bytes),
        };
        if is_response && passed.is_some_and(<[u8]>::is_empty) {
            lock(connections).lost += length;
        }
        if passed.is_none_or(|passed| to.write_all(passed).is_err()) {
            break;
        }
        sent += length;
    }
    for stream in [from, to] {
        drop(stream.shutdown(Shutdown::Both));
    }
}

/// Target of a CONNECT request, which is granted or refused.
fn accept_tunnel(
    mut client: &TcpStream,
    authorization: Option<&str>,
    signals: &Signals,
) -> io::Result<Option<SocketAddr>> {
    let Some(head) = http::read_head(client, signals)? else { return Ok(None) };
    let head = String::from_utf8_lossy(&head);
    let is_permitted = authorization
        .is_none_or(|value| head.lines().any(|line| line.strip_prefix("Proxy-Authorization: ") == Some(value)));
    let target = head.strip_prefix("CONNECT ").and_then(|rest| rest.split(' ').next()?.parse().ok());
    let (status, target) = match target {
        Some(target) if is_permitted => ("200 Connection established", Some(target)),
        Some(_) => ("407 Proxy Authentication Required", None),
        None => ("400 Bad Request", None),
    };
    write!(client, "HTTP/1.1 {status}\r\n\r\n")?;
    Ok(target)
}
