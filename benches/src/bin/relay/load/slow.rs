//! Clients that read one byte a second of a watch.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpSocket,
    time::interval,
};

/// Bytes that the kernel holds for such a client.
const RECEIVE_BYTES: u32 = 4 << 10;

/// Counters of all slow clients.
#[derive(Default)]
pub(crate) struct Slow {
    /// Bytes that were read.
    pub(crate) bytes: AtomicU64,
    /// Connections that have ended.
    pub(crate) ended: AtomicU64,
}

/// Starts clients that watch slices after a version.
pub(crate) fn start(slow: &Arc<Slow>, count: u32, server: &str, version: u64) {
    let Ok(server) = server.parse::<SocketAddr>() else { return };
    for id in 0..count {
        let slow = slow.clone();
        drop(tokio::spawn(async move {
            read_slowly(&slow, id, server, version).await.ok();
            slow.ended.fetch_add(1, Ordering::Relaxed);
        }));
    }
}

async fn read_slowly(slow: &Slow, id: u32, server: SocketAddr, version: u64) -> std::io::Result<()> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(RECEIVE_BYTES)?;
    socket.bind((Ipv4Addr::from_bits(Ipv4Addr::new(127, 0, 2, 1).to_bits() + id % 8), 0).into())?;
    let mut stream = socket.connect(server).await?;
    let path = "/apis/discovery.k8s.io/v1/endpointslices?watch=true&allowWatchBookmarks=true&timeoutSeconds=3600";
    let accept = "application/vnd.kubernetes.protobuf;stream=watch";
    let request =
        format!("GET {path}&resourceVersion={version} HTTP/1.1\r\nHost: {server}\r\nAccept: {accept}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut seconds = interval(Duration::from_secs(1));
    loop {
        seconds.tick().await;
        stream.read_u8().await?;
        slow.bytes.fetch_add(1, Ordering::Relaxed);
    }
}
