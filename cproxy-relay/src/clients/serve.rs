//! HTTP/1.1 or HTTP/2 on a client's connection, from its first byte to its end.

use std::{
    convert::Infallible,
    error::Error,
    pin::pin,
    sync::{Arc, LazyLock},
    time::Duration,
};

use bytes::Bytes;
use cproxy_relay_auth::Peer;
use http::{Request, Response};
use http_body::Body;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, interval, sleep, timeout},
};

use crate::{
    clients::{
        budget::HEAD_TIME_MAX,
        connection::{Connection, EndReason},
        slots::ConnectionSlot,
        throttle::Throttled,
    },
    jitter::jitter,
    relay::Relay,
};

/// Interval at which the times of a connection are looked at.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Age at which a connection is moved, possibly to another replica: this and up to as much again.
const AGE: Duration = Duration::from_secs(30 * 60);
/// Time for a client to end its requests after GOAWAY.
const LEAVE_TIME_MAX: Duration = Duration::from_secs(10);
/// The same for a client that is cut.
const CUT_TIME_MAX: Duration = Duration::from_secs(1);

/// Time over which clients are moved when the views have changed, so that they get theirs.
const VIEWS_TIME: Duration = Duration::from_secs(60);

/// Longest head of a request. A bearer token takes one or two KiB.
const HEAD_BYTES_MAX: u32 = 16 << 10;
/// Bytes of one response that wait in a connection.
const SEND_BYTES_MAX: usize = 32 << 10;
/// Requests of one client at once. client-go has all its watches on one connection.
const STREAMS_MAX: u32 = 16;
/// Bytes of request bodies, which are not read.
const RECEIVE_WINDOW_BYTES: u32 = 16 << 10;
const RECEIVE_WINDOW_OF_ALL_BYTES: u32 = 64 << 10;

/// Settings of HTTP.
static HTTP: LazyLock<Builder<TokioExecutor>> = LazyLock::new(|| {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME_MAX)
        .max_buf_size(HEAD_BYTES_MAX as usize)
        .keep_alive(true);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(HEAD_BYTES_MAX)
        .max_send_buf_size(SEND_BYTES_MAX)
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(RECEIVE_WINDOW_BYTES)
        .initial_connection_window_size(RECEIVE_WINDOW_OF_ALL_BYTES);
    builder
});

/// Serves a connection to its end, with a function that responds to each request. The future is a small one: a large
/// one would be in each client's memory twice, as argument of the task and as its state.
pub(crate) fn serve<R, F, B>(
    relay: Arc<Relay>,
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    peer: Peer,
    slot: ConnectionSlot,
    respond: R,
) -> impl Future<Output = ()> + Send
where
    R: Fn(Arc<Connection>, Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static,
{
    let connection = Arc::new(Connection::new(peer, slot));
    let service = {
        let connection = connection.clone();
        service_fn(move |request: Request<Incoming>| {
            let (connection, respond) = (connection.clone(), respond.clone());
            // Boxed so that the request's memory is freed before a long watch starts streaming.
            Box::pin(async move {
                // Until the response begins. A list or watch has a guard of its own in its body by then.
                let _guard = connection.begin();
                Ok::<_, Infallible>(respond(connection.clone(), request).await)
            })
        })
    };
    let mut http = Box::pin(HTTP.serve_connection(TokioIo::new(Throttled::new(stream)), service));
    async move {
        let mut checks = interval(CHECK_INTERVAL);
        let mut must_move = pin!(must_move(&relay));
        let reason = loop {
            tokio::select! {
                end = http.as_mut() => {
                    if let Err(error) = end {
                        tracing::debug!("{}: {error}", connection.peer().address());
                    }
                    return;
                }
                _ = checks.tick() => {
                    if let Some(fault) = connection.fault(Instant::now()) {
                        relay.metrics.connections_cut.add(1);
                        tracing::debug!("{} is cut: {fault}", connection.peer().address());
                        http.as_mut().graceful_shutdown();
                        connection.end_watches(EndReason::Time);
                        timeout(CUT_TIME_MAX, http).await.ok();
                        return;
                    }
                }
                reason = must_move.as_mut() => break reason,
            }
        };
        relay.metrics.connections_moved.add(1);
        http.as_mut().graceful_shutdown();
        connection.end_watches(reason);
        timeout(LEAVE_TIME_MAX, http).await.ok();
    }
}

/// Waits until the client of a connection has to move: because of its age, because the views have changed, or because
/// the relay stops.
async fn must_move(relay: &Relay) -> EndReason {
    tokio::select! {
        () = sleep(AGE + jitter(AGE)) => EndReason::Time,
        () = relay.views_changed.notified() => {
            sleep(jitter(VIEWS_TIME)).await;
            EndReason::View
        }
        () = relay.draining.cancelled() => {
            sleep(jitter(relay.drain_time)).await;
            EndReason::Time
        }
    }
}

#[cfg(test)]
mod tests {
    use cproxy_relay_auth::{PeerAddress, Views};

    use super::*;
    use crate::cache::Cache;

    /// Each client that waits has this future and a `Connection`, besides what HTTP has in boxes.
    #[tokio::test]
    async fn a_client_that_waits_takes_little_memory() {
        let relay = Relay::new(Arc::new(Cache::new(1 << 20)), None, None, Views::everything(), 10, Duration::ZERO);
        let relay = Arc::new(relay);
        let peer = PeerAddress::Vsock { cid: 3 };
        let slot = relay.slots.enter(&peer).0.unwrap();
        let (stream, _client) = tokio::io::duplex(64);
        let respond = |_, _| async { Response::new(String::new()) };
        let serving = serve(relay, stream, Peer::new(peer, None), slot, respond);
        let (future_bytes, connection_bytes) = (size_of_val(&serving), size_of::<Connection>());
        assert!(future_bytes <= 520 && connection_bytes <= 288, "{future_bytes}, {connection_bytes}");
    }
}
