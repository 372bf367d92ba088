//! TCP connections to Services that do not change, far more than the first level of places has room for. Their number
//! rises and falls, some are replaced all the time, and each shows the ClusterIP for as long as it lives.

use std::{
    fmt::Display,
    net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use cproxy_tests::{
    manifest::{Service, Slice},
    own_files::own_files,
    random::Random,
    sandbox::Sandbox,
    storm::{
        Storm,
        addresses::{LONER, SERVICES, backend, cluster_ip},
        client::socket,
    },
    world::{Form, Host, PORT},
};
use rustix::net::{SocketType, connect, sockopt};
use serde_json::Value;

/// Number of threads. Each holds connections to a Service of its own, which has a frontend of each family.
pub(crate) const THREADS: usize = 3;
pub(crate) const FRONTENDS: usize = 2 * THREADS;

/// Index of the first of these Services, and number of its pod, after those that others use.
const FIRST_SERVICE: usize = SERVICES + 3;
const FIRST_POD: u32 = LONER + 5;
const FIRST_PORT: u16 = 8070;

/// Numbers of connections of one thread, one after the other: 20,100 of all threads at most. The first level has 2,048
/// places, the second one 16,384.
const NUMBERS: [usize; 4] = [6_700, 100, 1_500, 6_700];

/// Time at each number.
const STAY: Duration = Duration::from_secs(12);

/// Most connections that are opened, and most surplus ones that are closed, between two looks at all; and how many are
/// replaced then.
const OPENED_MAX: usize = 500;
const REPLACED: usize = 10;

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// The Services.
pub(crate) fn objects() -> impl Iterator<Item = Value> {
    (0..THREADS).flat_map(|thread| {
        let (name, pod, port) = (format!("held-{thread}"), backend(FIRST_POD + thread as u32), port(thread));
        let service = Service::new(&name).cluster_ips(service(thread).addresses()).tcp("tcp", PORT, port);
        let v4 = Slice::v4(&name).tcp("tcp", port).ready([pod.v4]);
        let v6 = Slice::v6(&name).tcp("tcp", port).ready([pod.v6]);
        [service.into(), v4.into(), v6.into()]
    })
}

fn service(thread: usize) -> Host {
    cluster_ip(FIRST_SERVICE + thread)
}

fn port(thread: usize) -> u16 {
    FIRST_PORT + thread as u16
}

/// Holds connections until it is over. While `is_out`, new ones may fail, since somebody has disturbed a hook.
pub(crate) fn run(
    storm: &Storm,
    sandbox: &Sandbox,
    (thread, random): (usize, Random),
    is_over: &AtomicBool,
    is_out: &AtomicBool,
) {
    sandbox.enter();
    // SAFETY: from now on, this thread uses descriptors alone that it opens.
    unsafe { own_files() }.unwrap();
    let mut held = Held::new(thread, random);
    let mut next = Instant::now();
    let mut numbers = NUMBERS.into_iter().cycle();
    let mut number = 0;
    while !is_over.load(Ordering::Relaxed) && !storm.has_failed() {
        if Instant::now() >= next {
            (number, next) = (numbers.next().unwrap_or_default(), Instant::now() + STAY);
        }
        if let Err(reason) = held.proceed(number, is_out) {
            return storm.fail(reason);
        }
        thread::sleep(PAUSE);
    }
}

/// The connections.
struct Held {
    cluster_ip: Host,
    listener: TcpListener,
    /// UDP socket at the TCP port: misdirected datagrams are not counted as lost.
    _silent: UdpSocket,
    connections: Vec<Connection>,
    opened: usize,
    random: Random,
}

/// A connection with its server's end, and the ClusterIP that it shows.
struct Connection {
    vip: SocketAddr,
    client: TcpStream,
    _server: TcpStream,
}

impl Held {
    fn new(thread: usize, random: Random) -> Self {
        let server = (Ipv6Addr::UNSPECIFIED, port(thread));
        let (listener, silent) = (TcpListener::bind(server).unwrap(), UdpSocket::bind(server).unwrap());
        Self { cluster_ip: service(thread), listener, _silent: silent, connections: Vec::new(), opened: 0, random }
    }

    /// Looks at all, replaces some, and goes on to this number.
    fn proceed(&mut self, number: usize, is_out: &AtomicBool) -> Result<(), String> {
        self.connections.iter().try_for_each(Connection::check)?;
        let surplus = self.connections.len().saturating_sub(number).min(OPENED_MAX);
        for _ in 0..(surplus + REPLACED).min(self.connections.len()) {
            let index = self.random.below(self.connections.len());
            self.connections.swap_remove(index);
        }
        for _ in 0..number.saturating_sub(self.connections.len()).min(OPENED_MAX) {
            match self.open() {
                Ok(connection) => self.connections.push(connection),
                Err(_) if is_out.load(Ordering::SeqCst) => return Ok(()),
                Err(reason) => return Err(reason),
            }
        }
        Ok(())
    }

    fn open(&mut self) -> Result<Connection, String> {
        self.opened += 1;
        let form = Form::ALL[self.opened % Form::ALL.len()];
        let vip = form.address(self.cluster_ip, PORT);
        let failed = |error: &dyn Display| format!("held connection {} to {vip}: {error}", self.opened);
        let client = socket(form, SocketType::STREAM).map_err(|error| failed(&error))?;
        // Otherwise its port stays in use for a minute.
        sockopt::set_socket_linger(&client, Some(Duration::ZERO)).map_err(|error| failed(&error))?;
        connect(&client, &vip).map_err(|error| failed(&error))?;
        let (server, _) = self.listener.accept().map_err(|error| failed(&error))?;
        let connection = Connection { vip, client: client.into(), _server: server };
        connection.check().map(|()| connection)
    }
}

impl Connection {
    fn check(&self) -> Result<(), String> {
        let Self { vip, client, .. } = self;
        let peer = client.peer_addr().map_err(|error| format!("held connection to {vip}: {error}"))?;
        if peer == *vip { Ok(()) } else { Err(format!("held connection to {vip} shows {peer}")) }
    }
}
