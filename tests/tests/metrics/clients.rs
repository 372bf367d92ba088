//! Clients that ask for something else, or misbehave.

use std::{
    collections::VecDeque,
    io::{Read, Write},
    net::TcpStream,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use cproxy_tests::Done;

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

/// Connections of another process on the same machine, from the same address.
#[test]
fn a_client_that_opens_connections_without_end_fails_no_probe() {
    let world = world();
    let sandbox = &world.sandbox;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // The thread enters the namespace for good.
            sandbox.enter();
            let mut idle = VecDeque::new();
            while !is_over.load(Ordering::Relaxed) {
                let Ok(mut stream) = TcpStream::connect(HEALTHZ) else { continue };
                stream.write_all(b"GET /livez HTTP/1.1\r\nHost:").ok();
                idle.push_back(stream);
                idle.drain(..idle.len().saturating_sub(100));
            }
        });
        let _done = Done(&is_over);
        for number in 0..100 {
            let response = try_get(HEALTHZ, "/livez");
            assert_eq!(response.as_ref().map(|response| response.code).ok(), Some(200), "{number}: {response:?}");
        }
    });
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
