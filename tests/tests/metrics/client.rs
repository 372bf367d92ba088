//! Agents with endpoints, and a client for them.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use cproxy_tests::{
    process::Agent,
    sandbox::Sandbox,
    world::{World, web_with},
};
use serde_json::Value;

/// Address of the metrics, as kube-proxy's default is.
pub(crate) const METRICS: &str = "127.0.0.1:10249";
/// The same of the health checks.
pub(crate) const HEALTHZ: &str = "127.0.0.1:10256";

/// Limit on every wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(40);

/// Flags for both endpoints.
pub(crate) const FLAGS: [&str; 4] = ["--metrics-bind-address", METRICS, "--healthz-bind-address", HEALTHZ];

/// Response to a request.
#[derive(Clone, Debug)]
pub(crate) struct Response {
    pub(crate) code: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Response {
    /// The body as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("not JSON ({error}): {self:?}"))
    }
}

/// A world with one pod and both endpoints.
pub(crate) fn world() -> World {
    World::builder().pods([1]).objects(web_with([1])).args(FLAGS).start()
}

/// An agent on the sandbox's manifests with both endpoints.
pub(crate) fn agent(sandbox: &Sandbox) -> Agent<'_> {
    Agent::new(sandbox).manifests(sandbox.manifest_dir()).args(FLAGS)
}

/// Sends a request and reads the response to its end.
pub(crate) fn exchange(mut stream: impl Read + Write, request: &str) -> io::Result<Response> {
    stream.write_all(request.as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").ok_or(io::ErrorKind::UnexpectedEof)?;
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).ok_or(io::ErrorKind::InvalidData)?;
    Ok(Response { code, head: head.to_owned(), body: body.to_owned() })
}

fn request(path: &str, accept: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: cproxy\r\nAccept: {accept}\r\nConnection: close\r\n\r\n")
}

/// Gets a path over TCP.
pub(crate) fn try_get(address: &str, path: &str) -> io::Result<Response> {
    exchange(TcpStream::connect(address)?, &request(path, "*/*"))
}

/// The same, with a response.
#[track_caller]
pub(crate) fn get(address: &str, path: &str) -> Response {
    try_get(address, path).unwrap()
}

/// The same in another format.
#[track_caller]
pub(crate) fn get_as(address: &str, path: &str, accept: &str) -> Response {
    exchange(TcpStream::connect(address).unwrap(), &request(path, accept)).unwrap()
}

/// Gets a path over a unix socket.
#[track_caller]
pub(crate) fn get_unix(socket: &Path, path: &str) -> Response {
    exchange(UnixStream::connect(socket).unwrap(), &request(path, "*/*")).unwrap()
}

/// Value of a line of the metrics, with these labels as they are written.
#[track_caller]
pub(crate) fn value(series: &str) -> f64 {
    let text = get(METRICS, "/metrics").body;
    let value = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {series} in {text}"))
}
