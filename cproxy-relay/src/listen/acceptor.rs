//! Connections that sockets accept, and the tasks that serve them.

use std::{io, net::SocketAddr, path::Path, pin::Pin, sync::Arc, time::Duration};

use cproxy_daemon::unix_socket::SocketFile;
use cproxy_relay_auth::{Peer, PeerAddress};
use rustix::net::sockopt;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    task::yield_now,
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;
use tokio_vsock::{VsockAddr, VsockListener, VsockStream};

use crate::{
    clients::{serve::serve, slots::ConnectionSlot},
    listen::tls::ServerTls,
    metrics::Metrics,
    relay::Relay,
    responses::handler::respond,
};

/// Bytes that the kernel holds of what a client has not read.
const KERNEL_SEND_BYTES: usize = 128 << 10;

/// Time after which a client that has vanished, or does not read, is given up.
const USER_TIMEOUT_MS: u32 = 60_000;
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;

/// Time for a TLS handshake.
const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);

/// Pause after a failure to accept, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Socket that accepts connections.
pub(crate) enum Acceptor {
    Tcp(TcpListener, Option<Arc<ServerTls>>),
    Unix(UnixListener, Arc<SocketFile>),
    Vsock(VsockListener),
}

impl Acceptor {
    /// Accepts connections for ever, and serves each by a task of its own.
    pub(crate) async fn run(self, relay: Arc<Relay>) {
        loop {
            match self.accept().await {
                Ok(accepted) => {
                    enter(&relay, accepted);
                    // Those that came before go on first.
                    yield_now().await;
                }
                Err(error) => {
                    tracing::warn!("cannot accept a connection: {error}");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn accept(&self) -> io::Result<Accepted> {
        Ok(match self {
            Self::Tcp(listener, tls) => {
                let (stream, peer) = listener.accept().await?;
                Accepted::Tcp(stream, peer, tls.clone())
            }
            Self::Unix(listener, file) => Accepted::Unix(listener.accept().await?.0, file.path().clone()),
            Self::Vsock(listener) => {
                let (stream, peer) = listener.accept().await?;
                Accepted::Vsock(stream, peer)
            }
        })
    }
}

/// Future that serves a connection.
type Serving = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Connection that was accepted.
enum Accepted {
    Tcp(TcpStream, SocketAddr, Option<Arc<ServerTls>>),
    Unix(UnixStream, Arc<Path>),
    Vsock(VsockStream, VsockAddr),
}

impl Accepted {
    fn peer(&self) -> PeerAddress {
        match self {
            Self::Tcp(_, peer, _) => PeerAddress::Tcp(*peer),
            Self::Unix(_, path) => PeerAddress::Unix(path.clone()),
            Self::Vsock(_, peer) => PeerAddress::Vsock { cid: peer.cid() },
        }
    }
}

/// Starts to serve a connection, if there is a slot for it.
fn enter(relay: &Arc<Relay>, accepted: Accepted) {
    relay.metrics.connections_accepted.add(1);
    let (slot, has_ended) = relay.slots.enter(&accepted.peer());
    relay.metrics.connections_displaced.add(has_ended.into());
    let Some(slot) = slot else { return };
    relay.metrics.connections.add(1);
    let id = slot.id();
    let counted = Counted(relay.metrics.clone());
    let task = tokio::spawn(hold(start(relay.clone(), accepted, slot), counted));
    relay.slots.set_task(id, task.abort_handle());
}

/// Serves a connection, which counts as one until its end.
async fn hold(serving: Serving, counted: Counted) {
    serving.await;
    drop(counted);
}

/// Connection that counts.
struct Counted(Arc<Metrics>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.connections.subtract(1);
    }
}

/// Begins to serve a connection.
fn start(relay: Arc<Relay>, accepted: Accepted, slot: ConnectionSlot) -> Serving {
    let address = accepted.peer();
    match accepted {
        Accepted::Tcp(stream, peer, tls) => {
            if let Err(error) = set_up(&stream) {
                tracing::debug!("{peer}: {error}");
            }
            match tls {
                Some(tls) => Box::pin(serve_tls(relay, stream, address, tls, slot)),
                None => Box::pin(serve_requests(relay, stream, Peer::new(address, None), slot)),
            }
        }
        Accepted::Unix(stream, _) => Box::pin(serve_requests(relay, stream, Peer::new(address, None), slot)),
        Accepted::Vsock(stream, _) => Box::pin(serve_requests(relay, stream, Peer::new(address, None), slot)),
    }
}

/// Serves a connection by the handler of requests.
fn serve_requests(
    relay: Arc<Relay>,
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    peer: Peer,
    slot: ConnectionSlot,
) -> impl Future<Output = ()> + Send {
    let of_requests = relay.clone();
    serve(relay, stream, peer, slot, move |connection, request| respond(of_requests.clone(), connection, request))
}

async fn serve_tls(
    relay: Arc<Relay>,
    stream: TcpStream,
    address: PeerAddress,
    tls: Arc<ServerTls>,
    slot: ConnectionSlot,
) {
    // Boxed so that its memory is freed after the handshake.
    let handshake = Box::pin(timeout(HANDSHAKE_TIME_MAX, TlsAcceptor::from(tls.config()).accept(stream)));
    let serving = match handshake.await {
        Ok(Ok(stream)) => {
            let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
            let peer = Peer::new(address, certificate.map(AsRef::as_ref));
            serve_requests(relay, stream, peer, slot)
        }
        Ok(Err(error)) => {
            relay.metrics.handshakes_failed.add(1);
            tracing::debug!("{address}: TLS: {error}");
            return;
        }
        Err(_) => return relay.metrics.handshakes_failed.add(1),
    };
    serving.await;
}

fn set_up(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    sockopt::set_tcp_user_timeout(stream, USER_TIMEOUT_MS)?;
    Ok(sockopt::set_socket_send_buffer_size(stream, KERNEL_SEND_BYTES)?)
}
