//! Clients that send garbage, too much, or read nothing: others do not notice, and memory stays bounded.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use cproxy_tests::{manifest::Slice, process::eventually, sandbox::Sandbox, usage::Memory};
use serde_json::Value;

use crate::{
    client::Version,
    fixture::{PATIENCE, RELAY, SERVICES, SLICES, World, service},
};

/// Memory of a relay in a debug build, whatever its clients do.
const RESIDENT_MAX: u64 = 100 << 20;

/// Memory of large pieces of responses that clients have not taken.
const UNREAD_MAX: u64 = 64 << 20;

/// Requests of the flood.
const FLOOD: usize = 20_000;

/// Empty SETTINGS frame (RFC 9113, 6.5).
const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

/// Bytes that a flood of frames gets rid of: those that the relay reads at once, and the kernel's buffers.
const FLOOD_BYTES_MAX: usize = 32 << 20;

fn connect() -> TcpStream {
    let stream = TcpStream::connect(RELAY).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Everything that the relay sends until it closes.
fn read_to_end(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset is an end, too.
    drop(stream.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Sends as much as the relay takes.
fn send(bytes: &[u8]) -> TcpStream {
    let mut stream = connect();
    drop(stream.write_all(bytes));
    stream
}

#[test]
fn wrong_requests_are_refused_or_closed() {
    let sandbox = Sandbox::for_test();
    let world = World::start(&sandbox);
    let long_header = [b"GET / HTTP/1.1\r\nHost: a\r\nX: ".as_slice(), &vec![b'a'; 10 << 20]].concat();
    for (bytes, expected) in [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".repeat(50).as_slice(), "400"),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", "400"),
        (b"HELLO\r\n\r\n", "400"),
        (b"GET / HTTP/9.9\r\n\r\n", "400"),
        (&long_header, "431"),
    ] {
        let answer = read_to_end(send(bytes));
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]);
        assert!(answer.is_empty() || answer.starts_with(&format!("HTTP/1.1 {expected}")), "{shown}: {answer}");
    }
    let body = world.client().send(&["--data-binary", &"a".repeat(100 << 10)], SERVICES);
    assert_eq!(body.code, 405);
    let long_path = format!("{SERVICES}?labelSelector={}", "a".repeat(15_900));
    assert_eq!(world.client().get(&long_path).code, 400);
    // Requests that are not complete.
    let start = Instant::now();
    let halves = [b"".as_slice(), b"GET", b"GET / HTTP/1.1\r\nHost: a\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"];
    let halves = halves.map(send);
    assert_eq!(world.client().get(SERVICES).code, 200);
    for stream in halves {
        drop(read_to_end(stream));
    }
    assert!(start.elapsed() < Duration::from_secs(35));
}

#[test]
fn floods_are_bounded() {
    let sandbox = Sandbox::for_test();
    let world = World::start(&sandbox);
    let watching = world.client().watch(&format!("{SERVICES}?watch=true&resourceVersion=0"));

    // Different paths on one connection, faster than answers are read.
    let mut stream = connect();
    let reader = stream.try_clone().unwrap();
    let reading = std::thread::spawn(move || read_to_end(reader));
    for number in 0..FLOOD {
        if write!(stream, "GET /api/v1/{number} HTTP/1.1\r\nHost: a\r\n\r\n").is_err() {
            break;
        }
    }
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let answers = reading.join().unwrap();
    assert!(answers.contains("HTTP/1.1 429 "), "one connection may not send any number of requests at once");
    let series = world.relay.metrics().lines().filter(|line| line.contains("requests_total{")).count();
    assert!(series < 40, "{series} series");

    // Connections to the metrics that ask for nothing.
    let metrics = world.relay.metrics_address();
    let _idle: Vec<_> = (0..200).map(|_| TcpStream::connect(metrics).unwrap()).collect();
    assert!(!world.relay.metrics().is_empty());

    // Control frames of HTTP/2: an empty SETTINGS again and again.
    let mut stream = connect();
    stream.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    stream.write_all(&[preface.as_slice(), &SETTINGS].concat()).unwrap();
    let answers = stream.try_clone().unwrap();
    let reading = std::thread::spawn(move || read_to_end(answers));
    let flood = SETTINGS.repeat(10_000);
    // The write that waits for two seconds ends it.
    let sent = (0..1_000).take_while(|_| stream.write_all(&flood).is_ok()).count() * flood.len();
    assert!(sent < FLOOD_BYTES_MAX, "{sent} bytes of control frames were read");
    // The relay may have cut it already.
    stream.shutdown(std::net::Shutdown::Both).ok();
    drop(reading.join().unwrap());

    // A thousand streams.
    let target = format!("{SERVICES}?watch=true&timeoutSeconds=3&number=[1-1000]");
    let many = world.client().version(Version::Http2).args(["--globoff"]);
    let _streams = many.args(["--no-globoff", "--parallel", "--parallel-max", "300"]).watch(&target);

    // Clients that never read, while a large object changes.
    let ask = format!("GET {SLICES}?watch=true HTTP/1.1\r\nHost: a\r\n\r\n");
    let sleepers: Vec<_> = (0..100).map(|_| send(ask.as_bytes())).collect();
    let addresses = |from: u32| (0..100).map(move |host| format!("10.{}.{host}.1", from % 250));
    let slice = |from| -> Value { Slice::v4("large").namespace("team").tcp("http", 80).ready(addresses(from)).into() };
    world.cluster.create(&slice(0));
    for round in 1..100 {
        let path = "/apis/discovery.k8s.io/v1/namespaces/team/endpointslices/large-ipv4";
        world.cluster.patch(path, &slice(round));
    }
    world.cluster.create(&service("team", "late"));
    eventually(PATIENCE, "a client that reads has the last change", || {
        let changes = watching.changes();
        if changes.contains(&"ADDED late".to_owned()) { Ok(()) } else { Err(format!("{changes:?}")) }
    });
    let memory = Memory::of(world.relay.pid());
    assert!(memory.peak < RESIDENT_MAX, "{memory:?} with {} clients that do not read", sleepers.len());
}

/// A slice as large as etcd takes.
fn largest_slice() -> Value {
    let addresses = |from: usize| -> Vec<String> {
        (0..100).map(|host| format!("10.{}.{}.{}", 100 + from / 250, from % 250, 100 + host)).collect()
    };
    let endpoints: Vec<_> = (0..750).map(|index| serde_json::json!({"addresses": addresses(index)})).collect();
    serde_json::json!({
        "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "addressType": "IPv4",
        "metadata": {"name": "largest", "namespace": "team", "labels": {"kubernetes.io/service-name": "web"}},
        "ports": [{"name": "http", "port": 80}],
        "endpoints": endpoints,
    })
}

/// Path of that slice, and its length in JSON, once the relay serves it.
fn serve_largest_slice(world: &World<'_>) -> (&'static str, usize) {
    world.cluster.create(&largest_slice());
    let path = "/apis/discovery.k8s.io/v1/namespaces/team/endpointslices/largest";
    let bytes = eventually(PATIENCE, "the relay has the slice", || {
        let response = world.client().get(path);
        if response.code == 200 { Ok(response.body.len()) } else { Err(response.code) }
    });
    (path, bytes)
}

#[test]
fn clients_that_do_not_read_large_objects_hold_little_together() {
    let sandbox = Sandbox::for_test();
    let world = World::start(&sandbox);
    let (path, _) = serve_largest_slice(&world);
    let ask = |target: &str| send(format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes());
    // Each has a copy: the object, a list of a namespace, and the events at the begin of a watch.
    let list = "/apis/discovery.k8s.io/v1/namespaces/team/endpointslices";
    let targets = [path.to_owned(), list.to_owned(), format!("{list}?watch=true")];
    let _clients: Vec<_> = targets.iter().cycle().take(150).map(|target| ask(target)).collect();
    eventually(PATIENCE, "connections end", || match world.relay.metric("cproxy_relay_connections_unread_total") {
        ended if ended >= 50.0 => Ok(()),
        ended => Err(ended),
    });
    let unread = world.relay.metric("cproxy_relay_unread_bytes");
    assert!(unread <= UNREAD_MAX as f64, "{unread} bytes");
    let memory = Memory::of(world.relay.pid());
    assert!(memory.peak < RESIDENT_MAX + UNREAD_MAX, "{memory:?}");
    assert_eq!(world.client().get(path).code, 200);
}

/// Frame of HTTP/2 (RFC 9113, 4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Head of a GET in literals of HPACK (RFC 7541, 6.2.2).
fn get_head(path: &str) -> Vec<u8> {
    let length = u8::try_from(path.len()).unwrap();
    [&[0x82, 0x86, 0x01, 1, b'a', 0x04, length][..], path.as_bytes()].concat()
}

#[test]
fn clients_that_take_all_but_the_last_byte_hold_little_together() {
    let sandbox = Sandbox::for_test();
    let world = World::start(&sandbox);
    let (path, bytes) = serve_largest_slice(&world);
    let window = u32::try_from(bytes - 1).unwrap().to_be_bytes();
    let begin = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(4, 0, 0, &[&[0, 4], window.as_slice()].concat()),
        frame(8, 0, 0, &(1_u32 << 30).to_be_bytes()),
        // END_STREAM and END_HEADERS.
        (0..5).flat_map(|number| frame(1, 5, 2 * number + 1, &get_head(path))).collect(),
    ];
    let clients: Vec<_> = (0..16).map(|_| send(&begin.concat())).collect();
    let readers: Vec<_> = clients
        .iter()
        .map(|client| client.try_clone().unwrap())
        .map(|client| std::thread::spawn(move || read_to_end(client).len()))
        .collect();
    eventually(PATIENCE, "connections end", || match world.relay.metric("cproxy_relay_connections_unread_total") {
        ended if ended >= 3.0 => Ok(()),
        ended => Err(ended),
    });
    let unread = world.relay.metric("cproxy_relay_unread_bytes");
    assert!(unread > bytes as f64 && unread <= UNREAD_MAX as f64, "{unread} bytes");
    let memory = Memory::of(world.relay.pid());
    assert!(memory.peak < RESIDENT_MAX + UNREAD_MAX, "{memory:?}");
    assert_eq!(world.client().get(path).code, 200);
    for client in clients {
        client.shutdown(std::net::Shutdown::Both).ok();
    }
    readers.into_iter().for_each(|reader| drop(reader.join()));
    eventually(PATIENCE, "nothing is held", || match world.relay.metric("cproxy_relay_unread_bytes") {
        0.0 => Ok(()),
        bytes => Err(bytes),
    });
}
