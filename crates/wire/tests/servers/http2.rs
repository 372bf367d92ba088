//! HTTP/2 servers that misbehave, over real connections: the client gives up their connection, makes another one, and
//! gets its lists from that.

#![expect(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used, reason = "a failed assertion is a failed test")]

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use cproxy_core::{Event, ResourceKind};
use cproxy_network::SocketSetup;
use cproxy_wire::{ApiClient, ApiServer, LastContact, configure, watch};
use http::{Request, Response};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::timeout,
};

const PATIENCE: Duration = Duration::from_secs(60);

/// Frame types (RFC 9113, 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;

const END_HEADERS: u8 = 4;
/// `:status: 200` (RFC 7541, appendix A).
const STATUS_200: &[u8] = &[0x88];

/// Frames of a flood.
const MANY: usize = 20_000;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Bytes that bad servers send after their settings and the first request.
fn bad_servers() -> Vec<(&'static str, Vec<u8>)> {
    let response = frame(HEADERS, END_HEADERS, 1, STATUS_200);
    let half = frame(DATA, 0, 1, br#"{"kind":"ServiceList","items":[{"metadata":{"name":"#);
    let goaway = |last: u32, reason: u32| frame(GOAWAY, 0, 0, &[last.to_be_bytes(), reason.to_be_bytes()].concat());
    vec![
        ("GOAWAY in the middle of a list", [response.clone(), half.clone(), goaway(1, 0)].concat()),
        ("GOAWAY for a request that it has seen", goaway(0, 0)),
        ("GOAWAY with an error", [response.clone(), half, goaway(1, 11)].concat()),
        ("rapid resets", frame(RST_STREAM, 0, 1, &8_u32.to_be_bytes()).repeat(MANY)),
        (
            "headers without an end",
            [frame(HEADERS, 0, 1, STATUS_200), frame(CONTINUATION, 0, 1, &[0x88; 100]).repeat(MANY)].concat(),
        ),
        ("headers for no stream", frame(HEADERS, END_HEADERS, 7, STATUS_200)),
        ("a window that overflows", frame(WINDOW_UPDATE, 0, 0, &0x7fff_ffff_u32.to_be_bytes()).repeat(2)),
        ("a window of zero", frame(WINDOW_UPDATE, 0, 0, &[0; 4])),
        ("settings without end", frame(SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 0]).repeat(MANY)),
        ("PING without end", frame(PING, 0, 0, &[7; 8]).repeat(MANY)),
        ("empty DATA without end", [response, frame(DATA, 0, 1, b"").repeat(MANY)].concat()),
        ("a frame that is too long", frame(DATA, 0, 1, &vec![0; 1 << 20])),
        ("an unknown first frame", b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()),
        ("nothing", Vec::new()),
    ]
}

/// Serves one connection badly: settings, an answer to the client's PING, then `rest` and the end.
async fn serve_badly(mut stream: TcpStream, rest: &[u8]) {
    let settings = [frame(SETTINGS, 0, 0, &[]), frame(SETTINGS, 1, 0, &[])].concat();
    stream.write_all(&settings).await.ok();
    let mut received = vec![0; 64 << 10];
    let mut sent = false;
    while let Ok(length @ 1..) = stream.read(&mut received).await {
        let bytes = &received[..length];
        // The client's PING has 8 bytes of payload after its head.
        let head = [0, 0, 8, PING, 0, 0, 0, 0, 0];
        if let Some(at) = bytes.windows(head.len()).position(|window| window == head) {
            let payload = &bytes[at + head.len()..at + head.len() + 8];
            stream.write_all(&frame(PING, 1, 0, payload)).await.ok();
        }
        let has_request =
            bytes.windows(9).any(|head| head[..2] == [0, 0] && head[3] == HEADERS && head[5..8] == [0; 3]);
        if has_request && !std::mem::replace(&mut sent, true) {
            stream.write_all(rest).await.ok();
            stream.shutdown().await.ok();
        }
    }
}

/// Serves empty lists, and watches without events.
async fn serve_well(stream: TcpStream) {
    let mut connection = h2::server::handshake(stream).await.unwrap();
    let mut open = Vec::new();
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        let is_watch = is_watch(&request);
        let mut body = respond.send_response(Response::new(()), false).unwrap();
        if !is_watch {
            let list = Bytes::from_static(br#"{"metadata":{"resourceVersion":"5"},"items":[]}"#);
            body.send_data(list, true).unwrap();
        }
        open.push(body);
    }
}

fn is_watch<Body>(request: &Request<Body>) -> bool {
    request.uri().query().is_some_and(|query| query.contains("watch=true"))
}

/// Follows a server whose first connection is bad. Returns the number of connections once both lists are complete.
async fn connections_until_listed(name: &str, rest: Vec<u8>) -> usize {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let counter = connections.clone();
    let server = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let rest = rest.clone();
            if counter.fetch_add(1, Ordering::Relaxed) == 0 {
                drop(tokio::spawn(async move { serve_badly(stream, &rest).await }));
            } else {
                drop(tokio::spawn(serve_well(stream)));
            }
        }
    });
    let kubeconfig = std::env::temp_dir().join(format!("cproxy-http2-{}-{}", std::process::id(), address.port()));
    let text = format!(
        "current-context: c\ncontexts: [{{name: c, context: {{cluster: k}}}}]\n\
         clusters: [{{name: k, cluster: {{server: 'http://{address}'}}}}]\n"
    );
    fs::write(&kubeconfig, text).unwrap();
    let options = ApiServer { kubeconfig: Some(kubeconfig.clone()), ..ApiServer::default() };
    let configuration = configure(&options).await.unwrap();
    let client = ApiClient::new(options, configuration, SocketSetup::none());
    let (sender, mut events) = mpsc::channel(4);
    let agent = tokio::spawn(async move { watch(&client, None, LastContact::default(), sender).await });
    let listed = async {
        let mut left = vec![ResourceKind::Services, ResourceKind::EndpointSlices];
        while let Some(batch) = events.recv().await {
            for event in batch {
                if let Event::ListDone(kind) = event {
                    left.retain(|other| *other != kind);
                }
            }
            if left.is_empty() {
                return;
            }
        }
        panic!("{name}: the client has ended");
    };
    timeout(PATIENCE, listed).await.unwrap_or_else(|_| panic!("{name}: no lists"));
    agent.abort();
    server.abort();
    fs::remove_file(kubeconfig).unwrap();
    connections.load(Ordering::Relaxed)
}

#[tokio::test]
async fn a_connection_that_misbehaves_is_replaced() {
    for (name, rest) in bad_servers() {
        let connections = connections_until_listed(name, rest).await;
        println!("{name}: {connections} connections");
        assert!((2..=4).contains(&connections), "{name}: {connections} connections");
    }
}
