//! Clients that ask for something else, or misbehave.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    time::{Duration, Instant},
};

use rustix::net::{AddressFamily, SocketType};

use crate::client::{HEALTHZ, METRICS, exchange, get, try_get, world};

/// Time of the server for a connection, and some more.
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(20);

#[test]
fn each_endpoint_serves_its_own_paths_and_changes_nothing() {
    let _world = world();
    for (address, path, code) in [
        (METRICS, "/metrics", 200),
        (METRICS, "/metrics?name=x", 200),
        (METRICS, "/healthz", 404),
        (METRICS, "/", 404),
        (HEALTHZ, "/metrics", 404),
        (HEALTHZ, "/readyz", 200),
    ] {
        let response = get(address, path);
        assert_eq!(response.code, code, "{address}{path}: {response:?}");
        assert!(response.head.to_lowercase().contains("x-content-type-options: nosniff"), "{response:?}");
    }
    let post = "POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n";
    let refused = exchange(TcpStream::connect(METRICS).unwrap(), post).unwrap();
    assert_eq!(refused.code, 405);
    assert!(refused.head.to_lowercase().contains("allow: get, head"), "{refused:?}");
    let head = exchange(TcpStream::connect(METRICS).unwrap(), "HEAD /metrics HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    assert_eq!((head.code, &*head.body), (200, ""));
}

#[test]
fn slow_clients_and_many_connections_harm_no_other() {
    let _world = world();
    // They say nothing, half a request, or never read.
    let mut idle: Vec<_> = (0..100).map(|_| TcpStream::connect(METRICS).unwrap()).collect();
    for stream in &mut idle {
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost:").ok();
    }
    let started = Instant::now();
    assert_eq!(get(METRICS, "/metrics").code, 200);
    assert_eq!(get(HEALTHZ, "/livez").code, 200);
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    for mut stream in idle {
        stream.set_read_timeout(Some(CONNECTION_TIME_MAX)).unwrap();
        // The server ends it: by an end, a reset, or a response that says that the time is over.
        let end = stream.read_to_end(&mut Vec::new());
        let is_timeout = end.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
        assert!(!is_timeout, "{end:?}");
    }
}

/// A connection to /livez from this loopback address.
fn connect_from(source: Ipv4Addr) -> TcpStream {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrV4::new(source, 0)).unwrap();
    rustix::net::connect(&socket, &HEALTHZ.parse::<SocketAddrV4>().unwrap()).unwrap();
    TcpStream::from(socket)
}

#[test]
fn a_client_that_opens_connections_without_end_fails_no_probe() {
    let _world = world();
    // It is the oldest, and slow with its request.
    let probe = connect_from(Ipv4Addr::LOCALHOST);
    let idle: Vec<_> = (0..200)
        .map(|_| {
            let mut stream = connect_from(Ipv4Addr::new(127, 0, 0, 2));
            stream.write_all(b"GET /livez HTTP/1.1\r\nHost:").ok();
            stream
        })
        .collect();
    assert_eq!(try_get(HEALTHZ, "/livez").unwrap().code, 200, "a new one");
    let request = "GET /livez HTTP/1.1\r\nHost: a\r\n\r\n";
    assert_eq!(exchange(probe, request).unwrap().code, 200, "the oldest one");
    drop(idle);
}

#[test]
fn requests_that_are_too_long_or_no_http_are_refused() {
    let _world = world();
    let long = format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(64 << 10));
    let headers = "X-A: b\r\n".repeat(1000);
    let many = format!("GET /metrics HTTP/1.1\r\n{headers}\r\n");
    for request in [&*long, &*many, "\0\0\0\0\r\n\r\n", "GET /metrics\r\n\r\n"] {
        let response = TcpStream::connect(METRICS).and_then(|stream| exchange(stream, request));
        let is_refused = response.as_ref().map_or(true, |response| (400..500).contains(&response.code));
        assert!(is_refused, "{response:?}");
        assert_eq!(try_get(METRICS, "/metrics").unwrap().code, 200);
    }
}
