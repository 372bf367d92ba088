//! Control planes that many tests use, one after the other. Starting one takes both processors for seconds, and most
//! tests only need its API.
//!
//! A server process has a control plane in a sandbox of its own. A test takes it with a connection to a unix socket,
//! and gives it back when the connection ends, also by being killed. The server then makes etcd's content what it was
//! at the start, key by key, and checks that. Tests reach it over a link between the network namespaces, at the address
//! of a control plane of their own. `cargo xtask test` starts and ends the servers, which share one socket.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{Ipv4Addr, Ipv6Addr, TcpStream},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::{
    control_plane::{ADDRESS, ADDRESS_V6, ControlPlane, ETCD_PORT},
    netns::Netns,
    sandbox::{Sandbox, TEST_PREFIX},
};

/// Variable with the path of the socket.
const VARIABLE: &str = "CPROXY_SHARED_CONTROL_PLANES";

/// Requests of a client of the socket: for the control plane, and for the server's end.
const TAKE: &str = "take";
const END: &str = "end";

/// Addresses of the link's ends, that of the test and that of the server: no test uses these ranges.
const NEAR: Ipv4Addr = Ipv4Addr::new(100, 127, 255, 1);
const FAR: Ipv4Addr = Ipv4Addr::new(100, 127, 255, 2);
const NEAR_V6: Ipv6Addr = Ipv6Addr::new(0xfdcb, 0, 0, 1, 0, 0, 0, 1);
const FAR_V6: Ipv6Addr = Ipv6Addr::new(0xfdcb, 0, 0, 1, 0, 0, 0, 2);

/// All keys of the API server in etcd: from this one to the one before [`LAST_KEY`].
const FIRST_KEY: &str = "/registry/";
const LAST_KEY: &str = "/registry0";

/// Keys that the API server writes itself from time to time, or that expire.
const RESTLESS: [&str; 3] = ["/registry/masterleases/", "/registry/leases/", "/registry/events/"];

/// Lists that are read after keys have changed: each waits until the API server's cache has what etcd has.
const CACHED: [&str; 11] = [
    "/api/v1/services",
    "/api/v1/nodes",
    "/api/v1/namespaces",
    "/api/v1/serviceaccounts",
    "/api/v1/endpoints",
    "/apis/discovery.k8s.io/v1/endpointslices",
    "/apis/networking.k8s.io/v1/ipaddresses",
    "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "/apis/rbac.authorization.k8s.io/v1/roles",
    "/apis/rbac.authorization.k8s.io/v1/rolebindings",
];

/// Attempts to make etcd's content what it was, while the API server's own loops react to each.
const ATTEMPTS: usize = 20;

/// A control plane that this test has until the value is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    /// Directory with its credentials.
    pub(crate) credentials: PathBuf,
    // The connection is the lease.
    _connection: UnixStream,
}

impl Lease {
    /// Waits for a control plane, and connects the sandbox with it. None where no server has been started.
    pub(crate) fn take(sandbox: &Sandbox) -> Option<Self> {
        let socket = PathBuf::from(env::var_os(VARIABLE)?);
        let take = || -> io::Result<(UnixStream, String)> {
            let mut connection = UnixStream::connect(&socket)?;
            writeln!(connection, "{TAKE}")?;
            let mut answer = String::new();
            BufReader::new(&connection).read_line(&mut answer)?;
            Ok((connection, answer))
        };
        let (connection, answer) = take().unwrap_or_else(|error| panic!("cannot use {}: {error}", socket.display()));
        let answer: Value = serde_json::from_str(&answer)
            .unwrap_or_else(|error| panic!("a server of control planes answers {answer:?}: {error}"));
        let text = |name: &str| PathBuf::from(text(&answer, name));
        connect(sandbox, &text("netns"));
        Some(Self { credentials: text("credentials"), _connection: connection })
    }
}

/// Links the sandbox with the server's network namespace. The link ends with the sandbox.
fn connect(sandbox: &Sandbox, netns: &Path) {
    let server = Netns::open(netns);
    let peer = format!("t{}", std::process::id());
    sandbox
        .ip(&format!("link add api type veth peer name {peer} netns {}\nlink set api up\n", server.path().display()));
    let far = format!(
        "link set {peer} up\n\
         address add {FAR}/30 dev {peer}\n\
         address add {FAR_V6}/126 dev {peer} nodad\n"
    );
    server.run(|| sandbox.ip_here(&far));
    // The kernel may not have noticed yet that the link is up at both ends.
    sandbox.ip(&format!(
        "address add {NEAR}/30 dev api\n\
         address add {NEAR_V6}/126 dev api nodad\n\
         route add {ADDRESS} via {FAR} dev api onlink\n\
         route add {ADDRESS_V6} via {FAR_V6} dev api onlink\n"
    ));
}

/// Serves a control plane to one test after the other, until a client asks it to end.
///
/// # Panics
/// When the control plane does not start, or the socket cannot be used.
pub fn serve(listener: &UnixListener) {
    loop {
        let sandbox = Sandbox::new(TEST_PREFIX);
        let control_plane = ControlPlane::start(&sandbox);
        let shared = Shared::new(control_plane);
        match shared.serve(listener) {
            Ended::Asked => return,
            Ended::Unclean(reason) => eprintln!("a shared control plane is started anew: {reason}"),
        }
    }
}

/// Asks one of the servers behind a socket to end, once its test has ended.
///
/// # Errors
/// When no server listens.
pub fn end(socket: &Path) -> io::Result<()> {
    writeln!(UnixStream::connect(socket)?, "{END}")
}

/// Why a server serves no more.
enum Ended {
    Asked,
    /// Remains of a test could not be removed.
    Unclean(String),
}

/// A control plane, and etcd's content when nobody had used it.
struct Shared<'s> {
    control_plane: ControlPlane<'s>,
    runtime: tokio::runtime::Runtime,
    client: kube::Client,
    before: BTreeMap<String, String>,
}

impl<'s> Shared<'s> {
    fn new(control_plane: ControlPlane<'s>) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("no tokio runtime");
        let client = runtime.block_on(control_plane.client());
        let before = content().expect("cannot read etcd");
        Self { control_plane, runtime, client, before }
    }

    fn serve(&self, listener: &UnixListener) -> Ended {
        // The thread's own: others of this process are elsewhere.
        let netns = format!("/proc/{}/task/{}/ns/net", std::process::id(), rustix::thread::gettid().as_raw_nonzero());
        let answer = json!({"netns": netns, "credentials": self.control_plane.credentials_directory()});
        loop {
            let (mut connection, _) = listener.accept().expect("cannot accept a client");
            let mut request = String::new();
            // A client that fails here has no lease.
            if BufReader::new(&connection).read_line(&mut request).is_err() {
                continue;
            }
            match request.trim() {
                END => return Ended::Asked,
                TAKE if writeln!(connection, "{answer}").is_ok() => {}
                _ => continue,
            }
            // The test ends, in whatever way.
            drop(connection.read(&mut [0]));
            if let Err(reason) = self.clean() {
                return Ended::Unclean(reason);
            }
        }
    }

    /// Makes etcd's content what it was, waits until the API server has seen it, and checks that it stays.
    fn clean(&self) -> Result<(), String> {
        for _ in 0..ATTEMPTS {
            let now = content().map_err(|error| format!("reading etcd: {error}"))?;
            if now == self.before {
                return Ok(());
            }
            self.put_back(&now).map_err(|error| format!("writing etcd: {error}"))?;
            for path in CACHED {
                let request = http::Request::get(path).body(Vec::new()).map_err(|error| error.to_string())?;
                let listed = self.runtime.block_on(self.client.request_text(request));
                listed.map_err(|error| format!("listing {path}: {error}"))?;
            }
        }
        Err(format!("etcd's content still differs after {ATTEMPTS} attempts"))
    }

    fn put_back(&self, now: &BTreeMap<String, String>) -> io::Result<()> {
        let keys: BTreeSet<&String> = self.before.keys().chain(now.keys()).collect();
        for key in keys {
            match (self.before.get(key), now.get(key)) {
                (before, after) if before == after => {}
                (Some(value), _) => drop(ask_etcd("put", &json!({"key": key, "value": value}))?),
                (None, _) => drop(ask_etcd("deleterange", &json!({"key": key}))?),
            }
        }
        Ok(())
    }
}

/// Keys and values, as etcd writes both in JSON: in base64.
fn content() -> io::Result<BTreeMap<String, String>> {
    let range = json!({"key": base64(FIRST_KEY.as_bytes()), "range_end": base64(LAST_KEY.as_bytes())});
    let answer = ask_etcd("range", &range)?;
    let entries = answer.get("kvs").and_then(Value::as_array).into_iter().flatten();
    let content = entries.map(|entry| (text(entry, "key").to_owned(), text(entry, "value").to_owned()));
    Ok(content.filter(|(key, _)| !is_restless(key)).collect())
}

/// A field that is text; empty if there is none.
fn text<'v>(value: &'v Value, name: &str) -> &'v str {
    value.get(name).and_then(Value::as_str).unwrap_or_default()
}

/// Whether a key in base64 may change by itself. Three characters are two and a quarter bytes: whole triples compare.
fn is_restless(key: &str) -> bool {
    RESTLESS.iter().any(|prefix| {
        let whole = prefix.len() / 3 * 3;
        prefix.as_bytes().get(..whole).is_some_and(|prefix| key.starts_with(&base64(prefix)))
    })
}

/// A request to etcd's JSON gateway.
fn ask_etcd(method: &str, request: &Value) -> io::Result<Value> {
    let body = request.to_string();
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, ETCD_PORT))?;
    // Of version 1.0: without chunks.
    let head = format!("POST /v3/kv/{method} HTTP/1.0\r\nHost: etcd\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::UnexpectedEof)?;
    if !head.contains(" 200 ") {
        return Err(io::Error::other(format!("{method}: {head}: {body}")));
    }
    serde_json::from_str(body).map_err(io::Error::other)
}

/// Base64 with padding (RFC 4648).
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for part in bytes.chunks(3) {
        let number = part.iter().fold(0, |number, byte| number << 8 | u32::from(*byte)) << (8 * (3 - part.len()));
        for index in 0..4 {
            let digit = usize::try_from(number >> (18 - 6 * index) & 63).unwrap_or_default();
            let digit = DIGITS.get(digit).copied().unwrap_or_default();
            text.push(if index <= part.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_padded() {
        for (plain, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")] {
            assert_eq!(base64(plain.as_bytes()), text);
        }
    }

    #[test]
    fn leases_and_events_change_by_themselves() {
        assert!(is_restless(&base64(b"/registry/leases/kube-system/apiserver-x")));
        assert!(is_restless(&base64(b"/registry/events/default/a")));
        assert!(!is_restless(&base64(b"/registry/services/specs/default/web")));
    }
}
