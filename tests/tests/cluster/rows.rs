//! The kernel's table as rows of text, and connections that check one row.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use cproxy_tests::{
    echo::{self, Server},
    process::cproxy,
    sandbox::Sandbox,
};
use serde_json::Value;

/// Number of connections after which a backend without an answer counts as unreachable. By chance, one of three is
/// missed that often once in 10^35.
const TRIES: usize = 200;

/// Limit on the wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// One frontend: `TCP 10.96.0.10:80 10.244.0.1:8080 10.244.0.2:8080`, or `TCP 10.96.0.10:80 refuse`, or `... drop`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) protocol: String,
    pub(crate) frontend: SocketAddr,
    /// Backends; empty if connections are refused or dropped.
    pub(crate) backends: Vec<SocketAddr>,
    pub(crate) drops: bool,
}

impl Row {
    pub(crate) fn parse(text: &str) -> Self {
        let mut words = text.split(' ');
        let protocol = words.next().unwrap().to_owned();
        let frontend = words.next().expect("a row has an address").parse().expect("the second word is an address");
        let backend = |word: &str| word.parse().unwrap_or_else(|_| panic!("{word:?} is no backend"));
        let (actions, backends): (Vec<_>, Vec<_>) = words.partition(|word| ["refuse", "drop"].contains(word));
        let backends = backends.into_iter().map(backend).collect();
        Self { protocol, frontend, backends, drops: actions == ["drop"] }
    }

    fn from_json(row: &Value) -> Self {
        let address = |object: &Value| {
            let address = object["address"].as_str().and_then(|text| text.parse::<IpAddr>().ok());
            SocketAddr::new(address.expect("an address"), object["port"].as_u64().unwrap().try_into().unwrap())
        };
        let backends = row["backends"].as_array().unwrap().iter().map(address).collect::<Vec<_>>();
        let drops = row["action"] == "drop";
        let action = if backends.is_empty() { "refuse" } else { "forward" };
        assert!(row["action"] == action || (drops && backends.is_empty()), "{row}");
        Self { protocol: row["protocol"].as_str().unwrap().to_owned(), frontend: address(row), backends, drops }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.protocol, self.frontend)?;
        self.backends.iter().try_for_each(|backend| write!(f, " {backend}"))?;
        f.write_str(match self.backends.is_empty() {
            false => "",
            true if self.drops => " drop",
            true => " refuse",
        })
    }
}

/// Rows of the kernel's table, in the order of `cproxy get services`.
pub(crate) fn in_kernel(sandbox: &Sandbox) -> Vec<Row> {
    let json = cproxy(sandbox, &["get", "services", "-o", "json"]).json();
    json.as_array().expect("an array of rows").iter().map(Row::from_json).collect()
}

/// Servers of the pods, which start when a row first mentions them and return their addresses.
pub(crate) struct Pods<'s> {
    sandbox: &'s Sandbox,
    servers: RefCell<BTreeMap<(String, SocketAddr), Server>>,
}

impl<'s> Pods<'s> {
    pub(crate) fn new(sandbox: &'s Sandbox) -> Self {
        let pods = (1..=9).flat_map(|n| [format!("10.244.0.{n}"), format!("fd00:10:244::{n}")]);
        sandbox.add_addresses(pods);
        Self { sandbox, servers: RefCell::default() }
    }

    /// Connects to the frontend until each of its backends has answered. No other backend may answer.
    pub(crate) fn check(&self, row: &Row) {
        row.backends.iter().for_each(|backend| self.serve(&row.protocol, *backend));
        if row.backends.is_empty() {
            let error = ask(&row.protocol, row.frontend).expect_err("a refused connection");
            // Sockets of UDP are connected here, and refused in both cases.
            let is_unreachable = row.drops && row.protocol == "TCP";
            let expected =
                if is_unreachable { io::ErrorKind::HostUnreachable } else { io::ErrorKind::ConnectionRefused };
            assert_eq!(error.kind(), expected, "{row}: {error}");
            return;
        }
        let mut missing = row.backends.iter().map(SocketAddr::to_string).collect::<BTreeSet<_>>();
        for _ in 0..TRIES {
            let name = ask(&row.protocol, row.frontend).unwrap_or_else(|error| panic!("{row}: {error}"));
            assert!(row.backends.iter().any(|backend| backend.to_string() == name), "{row}: reached {name}");
            missing.remove(&name);
            if missing.is_empty() {
                return;
            }
        }
        panic!("{row}: never reached {missing:?}");
    }

    fn serve(&self, protocol: &str, address: SocketAddr) {
        let start = || match protocol {
            "TCP" => echo::tcp(self.sandbox, address, &address.to_string()),
            _ => echo::udp(self.sandbox, address, &address.to_string()),
        };
        self.servers.borrow_mut().entry((protocol.to_owned(), address)).or_insert_with(start);
    }
}

/// The name of the server that answers at an address.
pub(crate) fn ask(protocol: &str, address: SocketAddr) -> io::Result<String> {
    if protocol == "TCP" {
        return echo::ask_tcp(address).map(|greeting| greeting.name);
    }
    let socket = UdpSocket::bind(if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    socket.connect(address)?;
    socket.send(b"?")?;
    let mut answer = vec![0; 2048];
    let length = socket.recv(&mut answer)?;
    answer.truncate(length);
    String::from_utf8(answer).map_err(io::Error::other)
}
