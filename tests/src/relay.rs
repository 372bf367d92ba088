//! TCP relay in front of a server, plain or as an HTTP proxy, which records connections, and can cut or silence them.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use crate::{
    echo, http,
    sandbox::Sandbox,
    server::{Server, Signals},
};

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

#[derive(Default)]
struct Connections {
    history: Vec<RelayChange>,
    opened: usize,
    open: BTreeMap<usize, TcpStream>,
    /// Data of new connections is lost.
    is_silent: bool,
    /// Signs of open connections that what they send is lost.
    silent: BTreeMap<usize, Arc<AtomicBool>>,
}

impl Relay {
    /// Relays every connection to `target`.
    pub fn start(sandbox: &Sandbox, target: SocketAddr) -> Self {
        Self::serve(sandbox, move |_, _| Ok(Some(target)))
    }

    /// Relays every connection to the target of its CONNECT request. With `authorization`, such as `Basic dTpw`, it
    /// refuses requests that do not carry it.
    pub fn start_proxy(sandbox: &Sandbox, authorization: Option<&'static str>) -> Self {
        Self::serve(sandbox, move |stream, signals| accept_tunnel(stream, authorization, signals))
    }

    fn serve(
        sandbox: &Sandbox,
        target: impl Fn(&TcpStream, &Signals) -> io::Result<Option<SocketAddr>> + Send + Sync + 'static,
    ) -> Self {
        let connections = Arc::<Mutex<Connections>>::default();
        let ours = connections.clone();
        let server = echo::listen(sandbox, SocketAddr::from(([127, 0, 0, 1], 0)), move |client, _, signals| {
            let Some(target) = target(client, signals)? else { return Ok(()) };
            let server = TcpStream::connect(target)?;
            let (number, is_silent) = lock(&ours).open(client)?;
            thread::scope(|scope| {
                scope.spawn(|| copy(&server, client, signals, &is_silent));
                copy(client, &server, signals, &is_silent);
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

    /// Loses what all connections send from now on, as a router does that has forgotten them: until
    /// [`Relay::let_new_ones_pass`], and for ever on connections that were made before.
    pub fn silence(&self) {
        let mut connections = lock(&self.connections);
        connections.is_silent = true;
        connections.silent.values().for_each(|is_silent| is_silent.store(true, Ordering::Relaxed));
    }

    /// Relays connections that are made from now on.
    pub fn let_new_ones_pass(&self) {
        lock(&self.connections).is_silent = false;
    }

    /// Ends all open connections.
    pub fn cut(&self) {
        // A connection that has just ended needs no end.
        lock(&self.connections).open.values().for_each(|client| drop(client.shutdown(Shutdown::Both)));
    }
}

impl Connections {
    /// Adds a connection. Returns its number, and the sign that what it sends is lost.
    fn open(&mut self, client: &TcpStream) -> io::Result<(usize, Arc<AtomicBool>)> {
        let number = self.opened;
        self.open.insert(number, client.try_clone()?);
        self.history.push(RelayChange::Opened(number));
        self.opened += 1;
        let is_silent = Arc::new(AtomicBool::new(self.is_silent));
        self.silent.insert(number, is_silent.clone());
        Ok((number, is_silent))
    }

    fn close(&mut self, number: usize) {
        self.open.remove(&number);
        self.silent.remove(&number);
        self.history.push(RelayChange::Closed(number));
    }
}

fn lock(connections: &Mutex<Connections>) -> MutexGuard<'_, Connections> {
    connections.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Copies until either side ends, and then ends both.
fn copy(mut from: &TcpStream, mut to: &TcpStream, signals: &Signals, is_silent: &AtomicBool) {
    let mut buffer = vec![0; 16 << 10];
    while signals.wait_for(&from)
        && let Ok(length @ 1..) = from.read(&mut buffer)
        && (is_silent.load(Ordering::Relaxed) || to.write_all(buffer.get(..length).unwrap_or_default()).is_ok())
    {}
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
