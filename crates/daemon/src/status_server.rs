//! Plain HTTP server for metrics and health checks. A client may take little: few connections, short requests, a few
//! seconds. Whatever it does, no other client waits for it.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    convert::Infallible,
    future::pending,
    io,
    net::{self, IpAddr},
    os::{fd::OwnedFd, unix},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http::{
    HeaderValue, Method, Request, Response, StatusCode,
    header::{ACCEPT, ALLOW, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS},
};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    task::{AbortHandle, yield_now},
    time::{sleep, timeout},
};
use tokio_vsock::{VMADDR_CID_ANY, VsockAddr, VsockListener};

use crate::{
    ListenAddress,
    unix_socket::{self, SocketFile},
};

/// Connections at once: probes and a few scrapers. For more, see [`giving_way`].
const CONNECTIONS_MAX: usize = 32;
/// Time of a connection, which is for one request.
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(10);
/// Bytes of a request and of what is written at once: the least that the library allows.
const BUFFER_BYTES_MAX: usize = 8 << 10;
/// Headers of a request.
const HEADERS_MAX: usize = 32;
/// Pause after a failure to accept, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Listening socket that belongs to no runtime yet.
#[derive(Debug)]
pub enum StatusListener {
    /// TCP.
    Tcp(net::TcpListener),
    /// Unix socket, and its file.
    Unix(unix::net::UnixListener, Arc<SocketFile>),
    /// vsock.
    Vsock(OwnedFd),
}

/// Listening socket of the present runtime.
enum Accepting {
    Tcp(TcpListener),
    Unix(UnixListener, Arc<SocketFile>),
    Vsock(VsockListener),
}

/// Client, as far as clients can be told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Peer {
    /// Address, over TCP.
    Address(IpAddr),
    /// User, over a unix socket.
    User(u32),
    /// Context id, over vsock.
    Context(u32),
}

/// Connection that is open.
struct Open {
    peer: Peer,
    /// Whether the client has sent its whole request.
    has_request: Arc<AtomicBool>,
    task: AbortHandle,
}

/// Connection of any kind, so that the server's code is there once.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// Request of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusRequest {
    /// Path, without a query.
    pub path: String,
    /// Header `Accept`.
    pub accept: Option<String>,
}

impl StatusRequest {
    fn of<B>(request: &Request<B>) -> Self {
        let accept = request.headers().get(ACCEPT).and_then(|accept| accept.to_str().ok()).map(str::to_owned);
        Self { path: request.uri().path().to_owned(), accept }
    }
}

/// Response to a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusResponse {
    /// Status code of HTTP.
    pub code: u16,
    /// Header `Content-Type`.
    pub content_type: &'static str,
    /// Body.
    pub body: String,
}

impl StatusResponse {
    /// Response of plain text.
    #[must_use]
    pub fn text(code: u16, body: impl Into<String>) -> Self {
        Self { code, content_type: "text/plain; charset=utf-8", body: body.into() }
    }

    fn into_http(self) -> Response<String> {
        let mut response = Response::new(self.body);
        *response.status_mut() = StatusCode::from_u16(self.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(self.content_type));
        response.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        response
    }
}

impl StatusListener {
    /// Opens a listener. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// The address is in use or cannot be bound.
    pub fn open(address: &ListenAddress) -> io::Result<Self> {
        Ok(match address {
            ListenAddress::Tcp(address) => {
                let listener = net::TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Self::Tcp(listener)
            }
            ListenAddress::Unix(path) => {
                let (listener, file) = unix_socket::listen(path)?;
                Self::Unix(listener.into_std()?, Arc::new(file))
            }
            &ListenAddress::Vsock { cid, port } => {
                let cid = if cid == u32::MAX { VMADDR_CID_ANY } else { cid };
                Self::Vsock(VsockListener::bind(VsockAddr::new(cid, port))?.into())
            }
        })
    }

    /// The address that was asked for; if its port is 0, with the one that the kernel has chosen.
    #[must_use]
    pub fn address(&self, asked: &ListenAddress) -> ListenAddress {
        let own = if let Self::Tcp(listener) = self { listener.local_addr().ok() } else { None };
        own.map_or_else(|| asked.clone(), ListenAddress::Tcp)
    }

    /// File of a unix socket, which is removed when the last owner drops it.
    #[must_use]
    pub fn file(&self) -> Option<&Arc<SocketFile>> {
        if let Self::Unix(_, file) = self { Some(file) } else { None }
    }

    fn register(self) -> io::Result<Accepting> {
        Ok(match self {
            Self::Tcp(listener) => Accepting::Tcp(TcpListener::from_std(listener)?),
            Self::Unix(listener, file) => Accepting::Unix(UnixListener::from_std(listener)?, file),
            Self::Vsock(listener) => Accepting::Vsock(listener.into()),
        })
    }

    /// Serves GET and HEAD by `respond` for ever. It ends only if the runtime cannot wait for the socket, which is
    /// logged.
    pub async fn serve<F>(self, respond: impl Fn(StatusRequest) -> F + Send + Sync + 'static)
    where
        F: Future<Output = StatusResponse> + Send + 'static,
    {
        let mut listener = match self.register() {
            Ok(listener) => listener,
            Err(error) => return tracing::error!("metrics and health checks are not served: {error}"),
        };
        let respond = Arc::new(respond);
        let mut open: Vec<Open> = Vec::new();
        let mut again = pin!(listener.again());
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                new = &mut again => {
                    listener = new;
                    again.set(listener.again());
                    continue;
                }
            };
            let Ok((stream, peer)) = accepted else {
                sleep(ACCEPT_PAUSE).await;
                continue;
            };
            open.retain(|connection| !connection.task.is_finished());
            if open.len() >= CONNECTIONS_MAX {
                let states = open.iter().map(|open| (open.peer, open.has_request.load(Ordering::Relaxed)));
                if let Some(index) = giving_way(&states.collect::<Vec<_>>()) {
                    open.remove(index).task.abort();
                }
            }
            let has_request = Arc::new(AtomicBool::new(false));
            let connection = serve_connection(stream, respond.clone(), has_request.clone());
            let task = tokio::spawn(timeout(CONNECTION_TIME_MAX, connection)).abort_handle();
            open.push(Open { peer, has_request, task });
            // It may have its request already. Other clients must not take its place before it is looked at.
            yield_now().await;
        }
    }
}

impl Accepting {
    /// The listener that takes the place of this one once nobody can reach it any more.
    fn again(&self) -> impl Future<Output = Self> + Send + use<> {
        let file = if let Self::Unix(_, file) = self { Some(file.clone()) } else { None };
        async move {
            match file {
                Some(file) => Self::Unix(file.clone().listen_again().await, file),
                None => pending().await,
            }
        }
    }

    async fn accept(&self) -> io::Result<(Box<dyn Stream>, Peer)> {
        Ok(match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                (Box::new(stream), Peer::Address(address.ip()))
            }
            Self::Unix(listener, _) => {
                let (stream, _) = listener.accept().await?;
                let user = stream.peer_cred()?.uid();
                (Box::new(stream), Peer::User(user))
            }
            Self::Vsock(listener) => {
                let (stream, address) = listener.accept().await?;
                (Box::new(stream), Peer::Context(address.cid()))
            }
        })
    }
}

/// Index of the connection that gives way to a new one, of these from the oldest on, each with whether its request is
/// complete: the oldest one without a complete request of the client that has most of those. Clients send a request at
/// once. Where all are complete, the oldest one of the client that has most.
fn giving_way(open: &[(Peer, bool)]) -> Option<usize> {
    let has_incomplete = open.iter().any(|(_, has_request)| !has_request);
    let candidates = || open.iter().enumerate().filter(|(_, (_, has_request))| !(has_incomplete && *has_request));
    let mut counts = BTreeMap::<Peer, usize>::new();
    for (_, (peer, _)) in candidates() {
        *counts.entry(*peer).or_default() += 1;
    }
    candidates().min_by_key(|(index, (peer, _))| (Reverse(counts.get(peer)), *index)).map(|(index, _)| index)
}

async fn serve_connection<F: Future<Output = StatusResponse>>(
    stream: Box<dyn Stream>,
    respond: Arc<impl Fn(StatusRequest) -> F>,
    has_request: Arc<AtomicBool>,
) {
    let service = service_fn(async |request: Request<Incoming>| {
        has_request.store(true, Ordering::Relaxed);
        let response = match *request.method() {
            Method::GET | Method::HEAD => respond(StatusRequest::of(&request)).await,
            _ => StatusResponse::text(405, "only GET and HEAD are served\n"),
        };
        let mut response = response.into_http();
        if response.status() == StatusCode::METHOD_NOT_ALLOWED {
            // RFC 9110, section 15.5.6.
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        }
        Ok::<_, Infallible>(response)
    });
    let mut builder = http1::Builder::new();
    // The whole connection has a time limit, and so the head needs none.
    builder.keep_alive(false).header_read_timeout(None).max_buf_size(BUFFER_BYTES_MAX).max_headers(HEADERS_MAX);
    if let Err(error) = builder.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!("metrics and health checks: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_without_a_request_give_way_first_those_of_the_client_with_most_of_them() {
        let [probe, other, user] = [Peer::Address([10, 0, 0, 1].into()), Peer::Context(2), Peer::User(1000)];
        let (complete, waits) = (true, false);
        for (open, expected) in [
            (vec![], None),
            (vec![(probe, complete), (user, waits)], Some(1)),
            (vec![(probe, waits), (user, waits), (user, waits)], Some(1)),
            (vec![(probe, complete), (probe, complete), (probe, complete), (user, waits)], Some(3)),
            (vec![(probe, waits), (user, waits), (other, complete), (other, complete)], Some(0)),
            (vec![(probe, complete), (user, complete), (user, complete)], Some(1)),
            (vec![(probe, complete), (user, complete)], Some(0)),
        ] {
            assert_eq!(giving_way(&open), expected, "{open:?}");
        }
    }
}
