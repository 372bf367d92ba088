//! Connection to one API server: HTTP/2 for all requests, or HTTP/1.1 with a connection for each request under way.

use std::{
    convert::Infallible,
    future::poll_fn,
    io, mem,
    net::IpAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use h2::{
    Ping, PingPong, Reason, RecvStream,
    client::{Builder, SendRequest},
};
use http::{
    HeaderValue, Request, Uri,
    header::HOST,
    uri::{Authority, PathAndQuery, Scheme},
};
use http_body::{Frame, SizeHint};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::{
    sync::{Notify, watch},
    time::timeout,
};

use crate::{
    client::connect_error::DialError,
    credentials::configuration::Configuration,
    transport::{
        address::ServerAddress,
        connector::{Connector, ReachedAddress, Stream},
        link::{Body, BoxError, Link, Received},
        time_limit::within,
        tls,
    },
};

/// Bytes of one response that may wait in memory, and of all together. Enough for 25 MB/s at a round trip of 10 ms.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;
const CONNECTION_WINDOW_BYTES: u32 = 512 << 10;

/// Longest head of a response.
const HEAD_BYTES_MAX: u32 = 64 << 10;

/// Limit on each step of a connection: with one server, and with others to turn to.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
const FAILOVER_TIMEOUT: Duration = Duration::from_secs(3);

/// Interval of PING where the kernel does not notice a peer that has vanished.
const PING_INTERVAL: Duration = Duration::from_secs(20);
/// Time for the answer to a PING.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Connection to one API server.
#[derive(Debug)]
pub(crate) struct Connection {
    protocol: Protocol,
    scheme: Scheme,
    authority: Authority,
    path_prefix: String,
    reached: ReachedAddress,
    /// Server, with the address that was reached.
    server: Arc<str>,
    superseded: watch::Sender<bool>,
    /// Asks for a PING, and changes with each answer. HTTP/1.1 has none.
    probe: Option<(Arc<Notify>, watch::Receiver<()>)>,
    has_served: AtomicBool,
}

/// HTTP version that the server speaks.
#[derive(Debug)]
enum Protocol {
    Http2(SendRequest<Bytes>),
    /// Connections that are idle or still busy, and the way to more.
    Http1(Mutex<Vec<http1::SendRequest<RequestBody>>>, Box<Dialer>),
}

/// Everything that a new connection to one server needs.
#[derive(Clone, Debug)]
pub(crate) struct Dialer {
    pub(crate) connector: Connector,
    pub(crate) configuration: Arc<Configuration>,
    /// Set if one of the servers speaks TLS.
    pub(crate) tls: Option<Arc<rustls::ClientConfig>>,
    pub(crate) address: ServerAddress,
    /// There are other servers to turn to.
    pub(crate) has_others: bool,
    /// Addresses of the server's name that are tried last.
    pub(crate) avoided: Vec<IpAddr>,
}

impl Dialer {
    /// Connects. Where TLS does not settle the HTTP version, HTTP/2 is tried first.
    ///
    /// # Errors
    /// The server cannot be reached, or speaks neither version.
    pub(crate) async fn connect(self) -> Result<Connection, DialError> {
        let (stream, reached, is_http2) = self.open().await?;
        match is_http2 {
            Some(is_http2) => self.speak(stream, reached, is_http2).await,
            None => match self.http2(stream, reached, true).await {
                Ok(connection) => Ok(connection),
                // A server of HTTP/1.1 refuses what it does not know. One that is silent is slow.
                Err(error) if error.is_timeout() => Err(error),
                Err(error) => {
                    tracing::debug!("no HTTP/2 at {}: {error}", self.address);
                    let (stream, reached, _) = self.open().await?;
                    self.http1(stream, reached).await
                }
            },
        }
    }

    /// Speaks HTTP over a stream on which TLS has chosen the version.
    ///
    /// # Errors
    /// The server does not speak it.
    pub(crate) async fn speak(
        self,
        stream: Box<dyn Stream>,
        reached: ReachedAddress,
        is_http2: bool,
    ) -> Result<Connection, DialError> {
        if is_http2 { self.http2(stream, reached, false).await } else { self.http1(stream, reached).await }
    }

    /// Limit on each step.
    fn limit(&self) -> Duration {
        if self.has_others { FAILOVER_TIMEOUT } else { CONNECT_TIMEOUT }
    }

    /// Opens a stream. Returns whether TLS has chosen HTTP/2, too; `None` without TLS.
    async fn open(&self) -> io::Result<(Box<dyn Stream>, ReachedAddress, Option<bool>)> {
        let proxy = self.configuration.proxy.as_ref();
        let (stream, reached) = self.connector.connect(&self.address, proxy, &self.avoided, self.limit()).await?;
        let name = self.configuration.tls_name(&self.address);
        let Some((name, config)) = name.zip(self.tls.clone()) else { return Ok((stream, reached, None)) };
        let handshake = within(self.limit(), tls::handshake(config, name, stream)).await;
        let explain = |error: &io::Error| tls::explain(error, &self.configuration.material);
        let (stream, is_http2) =
            handshake.map_err(|error| io::Error::new(error.kind(), format!("TLS: {}", explain(&error))))?;
        Ok((Box::new(stream), reached, Some(is_http2)))
    }

    /// Speaks HTTP/2. `is_uncertain`: the peer must first show that it does, too.
    async fn http2(
        &self,
        stream: Box<dyn Stream>,
        reached: ReachedAddress,
        is_uncertain: bool,
    ) -> Result<Connection, DialError> {
        let mut builder = Builder::new();
        builder
            .enable_push(false)
            .initial_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_header_list_size(HEAD_BYTES_MAX);
        let (sender, mut driver) = builder.handshake::<_, Bytes>(stream).await?;
        let mut pings = driver.ping_pong().ok_or(DialError::NoPing)?;
        if is_uncertain {
            tokio::select! {
                end = &mut driver => {
                    end?;
                    return Err(DialError::Closed);
                }
                pong = within(self.limit(), async { pings.ping(Ping::opaque()).await.map_err(io::Error::other) }) => {
                    pong?;
                }
            }
        }
        let (probe, answers) = (Arc::new(Notify::new()), watch::Sender::new(()));
        let answered = answers.subscribe();
        // The kernel watches TCP connections itself, but not what is behind a proxy or a local socket.
        let is_watched = !self.address.is_local() && self.configuration.proxy.is_none();
        drop(tokio::spawn(drive(driver, pings, probe.clone(), answers, (!is_watched).then_some(PING_INTERVAL))));
        Ok(self.connection(Protocol::Http2(sender), reached, Some((probe, answered))))
    }

    async fn http1(self, stream: Box<dyn Stream>, reached: ReachedAddress) -> Result<Connection, DialError> {
        let sender = start_http1(stream).await?;
        let protocol = Protocol::Http1(Mutex::new(vec![sender]), Box::new(self.clone()));
        Ok(self.connection(protocol, reached, None))
    }

    fn connection(
        &self,
        protocol: Protocol,
        reached: ReachedAddress,
        probe: Option<(Arc<Notify>, watch::Receiver<()>)>,
    ) -> Connection {
        let has_tls = self.configuration.tls_name(&self.address).is_some();
        Connection {
            protocol,
            scheme: if has_tls { Scheme::HTTPS } else { Scheme::HTTP },
            authority: self.address.authority(),
            path_prefix: self.address.path_prefix().to_owned(),
            reached,
            server: server_text(&self.address, reached).into(),
            superseded: watch::Sender::new(false),
            probe,
            has_served: AtomicBool::new(false),
        }
    }
}

/// A server, with the address that its name had.
fn server_text(address: &ServerAddress, reached: ReachedAddress) -> String {
    match reached.ip {
        Some(ip) if reached.other_count > 0 => format!("{address} ({ip})"),
        _ => address.to_string(),
    }
}

impl Connection {
    /// Whether new requests can be sent: the connection is open, and the server has not said GOAWAY.
    pub(crate) async fn is_open(&self) -> bool {
        match &self.protocol {
            Protocol::Http2(sender) => {
                let mut sender = sender.clone();
                // Ready at once, as requests are few, or never again.
                matches!(timeout(Duration::ZERO, poll_fn(|context| sender.poll_ready(context))).await, Ok(Ok(())))
            }
            // Another one is made when needed.
            Protocol::Http1(..) => true,
        }
    }

    /// Address that it has reached.
    pub(crate) fn reached(&self) -> ReachedAddress {
        self.reached
    }

    /// Records a response without an error. Returns whether it is the first one.
    pub(crate) fn record_service(&self) -> bool {
        !self.has_served.swap(true, Ordering::Relaxed)
    }

    /// Ends waits for [`Link::superseded`]. Responses go on.
    pub(crate) fn supersede(&self) {
        self.superseded.send_replace(true);
    }

    /// Sends a request and waits for the head of the response.
    pub(crate) async fn send(&self, request: Request<Bytes>) -> Result<Received, BoxError> {
        let (mut parts, body) = request.into_parts();
        let path = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
        let path = format!("{}{path}", self.path_prefix);
        let response = match &self.protocol {
            Protocol::Http2(sender) => {
                let uri = Uri::builder().scheme(self.scheme.clone()).authority(self.authority.clone());
                parts.uri = uri.path_and_query(path).build()?;
                let mut sender = sender.clone().ready().await?;
                let (response, mut stream) = sender.send_request(Request::from_parts(parts, ()), body.is_empty())?;
                if !body.is_empty() {
                    stream.send_data(body, true)?;
                }
                response.await?.map(|body| Body::new(Http2Body(body)))
            }
            Protocol::Http1(senders, dialer) => {
                parts.uri = path.parse()?;
                parts.headers.insert(HOST, HeaderValue::try_from(self.authority.as_str())?);
                let mut sender = match take_idle(senders) {
                    Some(sender) => sender,
                    None => start_http1(dialer.open().await?.0).await?,
                };
                let response = sender.send_request(Request::from_parts(parts, RequestBody(body))).await?;
                senders.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
                response.map(|body| Body::new(Http1Body(body)))
            }
        };
        Ok(Received { response, link: self.link() })
    }

    /// State of the connection, for those who wait for something on it.
    pub(crate) fn link(&self) -> Link {
        Link::new(self.server.clone(), self.superseded.subscribe(), self.probe.as_ref().map(|(probe, _)| probe.clone()))
    }

    /// Waits for the answer to a PING; false if the connection has ended. True at once for HTTP/1.1.
    pub(crate) async fn ping(&self) -> bool {
        let Some((probe, mut answered)) = self.probe.clone() else { return true };
        // Answers so far do not count.
        answered.mark_unchanged();
        probe.notify_one();
        answered.changed().await.is_ok()
    }
}

/// Drives an HTTP/2 connection to its end, or until the peer leaves a PING unanswered.
async fn drive(
    connection: h2::client::Connection<Box<dyn Stream>, Bytes>,
    mut pings: PingPong,
    probe: Arc<Notify>,
    answers: watch::Sender<()>,
    interval: Option<Duration>,
) {
    let watch = async {
        loop {
            match interval {
                Some(interval) => drop(timeout(interval, probe.notified()).await),
                None => probe.notified().await,
            }
            if !matches!(timeout(PING_TIMEOUT, pings.ping(Ping::opaque())).await, Ok(Ok(_))) {
                return;
            }
            answers.send_replace(());
        }
    };
    tokio::select! {
        end = connection => tracing::debug!("the connection to the API server has ended: {end:?}"),
        // This drops the connection, which ends its responses.
        () = watch => tracing::debug!("the API server does not answer a PING"),
    }
}

async fn start_http1(stream: Box<dyn Stream>) -> hyper::Result<http1::SendRequest<RequestBody>> {
    let mut builder = http1::Builder::new();
    let builder = builder.max_buf_size(HEAD_BYTES_MAX as usize);
    let (mut sender, driver) = builder.handshake(TokioIo::new(stream)).await?;
    drop(tokio::spawn(driver));
    // Until then it counts as busy.
    sender.ready().await?;
    Ok(sender)
}

/// Removes a connection whose last response has been read. Forgets closed ones.
fn take_idle(senders: &Mutex<Vec<http1::SendRequest<RequestBody>>>) -> Option<http1::SendRequest<RequestBody>> {
    let mut senders = senders.lock().unwrap_or_else(PoisonError::into_inner);
    senders.retain(|sender| !sender.is_closed());
    let index = senders.iter().position(http1::SendRequest::is_ready)?;
    Some(senders.swap_remove(index))
}

/// Body of a request, which most have not.
struct RequestBody(Bytes);

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let body = mem::take(&mut self.0);
        Poll::Ready(Some(body).filter(|body| !body.is_empty()).map(|body| Ok(Frame::data(body))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.len() as u64)
    }
}

struct Http1Body(Incoming);

impl http_body::Body for Http1Body {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut self.0).poll_frame(context).map_err(Into::into)
    }
}

/// Body of an HTTP/2 response. The server may send more once a chunk is read, so that no response can fill the memory.
struct Http2Body(RecvStream);

impl http_body::Body for Http2Body {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let chunk = match ready!(self.0.poll_data(context)) {
            Some(Ok(chunk)) => chunk,
            Some(Err(error)) => return Poll::Ready(Some(Err(describe(error)))),
            None => return Poll::Ready(None),
        };
        let released = self.0.flow_control().release_capacity(chunk.len());
        Poll::Ready(Some(released.map(|()| Frame::data(chunk)).map_err(Into::into)))
    }
}

/// Error of a body. A connection that the server closes in an orderly way is an unexpected end of file, as in HTTP/1.1.
fn describe(error: h2::Error) -> BoxError {
    let is_closed = error
        .get_io()
        .is_some_and(|error| matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof));
    if is_closed || error.is_go_away() && error.reason() == Some(Reason::NO_ERROR) {
        return io::Error::new(io::ErrorKind::UnexpectedEof, error).into();
    }
    error.into()
}

#[cfg(test)]
mod tests {
    use tokio::{io::duplex, time::Instant};

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    /// Time until a connection to a peer that reads nothing ends.
    async fn lifetime(interval: Option<Duration>, is_probed: bool) -> Duration {
        let (client, _server) = duplex(64 << 10);
        let client: Box<dyn Stream> = Box::new(client);
        let (_sender, mut connection) = Builder::new().handshake(client).await.unwrap();
        let pings = connection.ping_pong().unwrap();
        let (probe, start) = (Arc::new(Notify::new()), Instant::now());
        if is_probed {
            probe.notify_one();
        }
        timeout(DAY, drive(connection, pings, probe, watch::Sender::new(()), interval)).await.ok();
        start.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_leaves_a_ping_unanswered_loses_its_connection() {
        assert_eq!(lifetime(Some(PING_INTERVAL), false).await, PING_INTERVAL + PING_TIMEOUT);
        assert_eq!(lifetime(None, true).await, PING_TIMEOUT);
        assert_eq!(lifetime(None, false).await, DAY, "the kernel watches the connection");
    }
}
