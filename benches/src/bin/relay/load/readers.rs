//! Clients that read lists and then watch, but decode nothing: thousands of them can arrive within seconds, which the
//! agent's own code cannot decode on one CPU.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use h2::{
    RecvStream,
    client::{SendRequest, handshake},
};
use http::{Request, StatusCode};
use prost::bytes::Bytes;
use tokio::{
    net::TcpSocket,
    time::{Instant, sleep_until},
};

use crate::clock::now_ns;

/// Resources of a client, with the selectors of the agent.
const LISTS: [&str; 2] = [
    "/api/v1/services?labelSelector=%21service.kubernetes.io%2Fservice-proxy-name\
     &fieldSelector=spec.clusterIP%21%3DNone%2Cspec.type%21%3DExternalName",
    "/apis/discovery.k8s.io/v1/endpointslices?labelSelector=%21service.kubernetes.io%2Fheadless",
];

const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
const PROTOBUF_STREAM: &str = "application/vnd.kubernetes.protobuf;stream=watch";

/// Source addresses, in turn.
const SOURCES: u32 = 8;

/// Counters of all readers.
#[derive(Default)]
pub(crate) struct Readers {
    /// Readers that have both lists and watch.
    pub(crate) watching: AtomicU64,
    /// Readers that have failed.
    pub(crate) failed: AtomicU64,
    /// Moment at which the last reader had both lists.
    pub(crate) last_ns: AtomicU64,
}

/// Starts readers, evenly spread over a time, which watch after these versions.
pub(crate) async fn start(readers: Arc<Readers>, count: u32, server: SocketAddr, versions: [u64; 2], spread: Duration) {
    let begin = Instant::now();
    for id in 0..count {
        let readers = readers.clone();
        drop(tokio::spawn(async move {
            if let Err(error) = read(&readers, id, server, versions).await
                && readers.failed.fetch_add(1, Ordering::Relaxed) == 0
            {
                eprintln!("the first reader that fails: {error:#}");
            }
        }));
        sleep_until(begin + spread * (id + 1) / count).await;
    }
}

async fn read(readers: &Readers, id: u32, server: SocketAddr, versions: [u64; 2]) -> Result<()> {
    let socket = TcpSocket::new_v4()?;
    socket.set_nodelay(true)?;
    socket.bind((Ipv4Addr::from_bits(Ipv4Addr::new(127, 0, 3, 1).to_bits() + id % SOURCES), 0).into())?;
    let stream = socket.connect(server).await.context("connecting")?;
    let (requests, connection) = handshake(stream).await?;
    let driver = tokio::spawn(connection);
    let lists = LISTS.map(|path| format!("{path}&resourceVersion=0"));
    let [services, slices] = &lists;
    let list = async |path: &str| discard(get(&requests, server, path, PROTOBUF).await?).await;
    tokio::try_join!(list(services), list(slices)).context("a list")?;
    readers.last_ns.fetch_max(now_ns(), Ordering::Relaxed);
    readers.watching.fetch_add(1, Ordering::Relaxed);
    let watch = async |path: &str, version: u64| {
        let path = format!("{path}&watch=true&allowWatchBookmarks=true&timeoutSeconds=3600&resourceVersion={version}");
        discard(get(&requests, server, &path, PROTOBUF_STREAM).await?).await
    };
    let ([services, slices], [of_services, of_slices]) = (LISTS, versions);
    tokio::try_join!(watch(services, of_services), watch(slices, of_slices)).context("a watch")?;
    drop(driver);
    Ok(())
}

async fn get(requests: &SendRequest<Bytes>, server: SocketAddr, path: &str, accept: &str) -> Result<RecvStream> {
    let request = Request::get(format!("http://{server}{path}"));
    let request = request.header("accept", accept).header("accept-encoding", "zstd").body(())?;
    let (response, _) = requests.clone().ready().await?.send_request(request, true)?;
    let response = response.await?;
    ensure!(response.status() == StatusCode::OK, "{path}: {}", response.status());
    Ok(response.into_body())
}

async fn discard(mut body: RecvStream) -> Result<()> {
    while let Some(data) = body.data().await {
        body.flow_control().release_capacity(data?.len())?;
    }
    Ok(())
}
