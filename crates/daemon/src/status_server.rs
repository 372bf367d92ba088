//! Plain HTTP server for metrics and health checks. A client may take little: few connections, short requests, a few
//! seconds. Whatever it does, no other client waits for it.

use std::{collections::VecDeque, convert::Infallible, io, net, os::fd::OwnedFd, os::unix, sync::Arc, time::Duration};

use http::{
    HeaderValue, Method, Request, Response, StatusCode,
    header::{ACCEPT, ALLOW, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS},
};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    task::AbortHandle,
    time::{sleep, timeout},
};
use tokio_vsock::{VMADDR_CID_ANY, VsockAddr, VsockListener};

use crate::{
    ListenAddress,
    unix_socket::{self, SocketFile},
};

/// Connections at once: probes and a few scrapers. More take the place of the oldest.
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
    /// Unix socket.
    Unix(unix::net::UnixListener),
    /// vsock.
    Vsock(OwnedFd),
}

/// Listening socket of the present runtime.
enum Accepting {
    Tcp(TcpListener),
    Unix(UnixListener),
    Vsock(VsockListener),
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
    /// Opens a listener. Call it inside a tokio runtime. The file of a unix socket is removed when it is dropped.
    ///
    /// # Errors
    /// The address is in use or cannot be bound.
    pub fn open(address: &ListenAddress) -> io::Result<(Self, Option<SocketFile>)> {
        Ok(match address {
            ListenAddress::Tcp(address) => {
                let listener = net::TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                (Self::Tcp(listener), None)
            }
            ListenAddress::Unix(path) => {
                let (listener, file) = unix_socket::listen(path)?;
                (Self::Unix(listener.into_std()?), Some(file))
            }
            &ListenAddress::Vsock { cid, port } => {
                let cid = if cid == u32::MAX { VMADDR_CID_ANY } else { cid };
                (Self::Vsock(VsockListener::bind(VsockAddr::new(cid, port))?.into()), None)
            }
        })
    }

    /// The address that was asked for; if its port is 0, with the one that the kernel has chosen.
    #[must_use]
    pub fn address(&self, asked: &ListenAddress) -> ListenAddress {
        let own = if let Self::Tcp(listener) = self { listener.local_addr().ok() } else { None };
        own.map_or_else(|| asked.clone(), ListenAddress::Tcp)
    }

    fn register(self) -> io::Result<Accepting> {
        Ok(match self {
            Self::Tcp(listener) => Accepting::Tcp(TcpListener::from_std(listener)?),
            Self::Unix(listener) => Accepting::Unix(UnixListener::from_std(listener)?),
            Self::Vsock(listener) => Accepting::Vsock(listener.into()),
        })
    }

    /// Serves GET and HEAD by `respond` for ever.
    ///
    /// # Errors
    /// The runtime cannot wait for the socket.
    pub async fn serve<F>(self, respond: impl Fn(StatusRequest) -> F + Send + Sync + 'static) -> io::Result<Infallible>
    where
        F: Future<Output = StatusResponse> + Send + 'static,
    {
        let (listener, respond) = (self.register()?, Arc::new(respond));
        let mut open: VecDeque<AbortHandle> = VecDeque::new();
        loop {
            let Ok(stream) = listener.accept().await else {
                sleep(ACCEPT_PAUSE).await;
                continue;
            };
            open.retain(|connection| !connection.is_finished());
            if open.len() >= CONNECTIONS_MAX
                && let Some(oldest) = open.pop_front()
            {
                oldest.abort();
            }
            let serving = tokio::spawn(timeout(CONNECTION_TIME_MAX, serve_connection(stream, respond.clone())));
            open.push_back(serving.abort_handle());
        }
    }
}

impl Accepting {
    async fn accept(&self) -> io::Result<Box<dyn Stream>> {
        Ok(match self {
            Self::Tcp(listener) => Box::new(listener.accept().await?.0),
            Self::Unix(listener) => Box::new(listener.accept().await?.0),
            Self::Vsock(listener) => Box::new(listener.accept().await?.0),
        })
    }
}

async fn serve_connection<F: Future<Output = StatusResponse>>(
    stream: Box<dyn Stream>,
    respond: Arc<impl Fn(StatusRequest) -> F>,
) {
    let service = service_fn(async |request: Request<Incoming>| {
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
