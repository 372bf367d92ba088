//! Plain HTTP for `/metrics` and health checks.

use std::{collections::VecDeque, convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use http::{HeaderValue, Request, Response, StatusCode, header::CONTENT_TYPE};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    task::AbortHandle,
    time::timeout,
};

use crate::{body::ResponseBody, relay::Relay};

/// Connections at once: probes and a few scrapers. More take the place of the oldest.
const CONNECTIONS_MAX: usize = 32;
/// Time of a connection.
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(10);

/// Opens the listener.
pub(crate) fn open(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = std::net::TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Serves for ever.
pub(crate) async fn run(listener: TcpListener, relay: Arc<Relay>) {
    let mut open: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let relay = relay.clone();
        open.retain(|connection| !connection.is_finished());
        if open.len() >= CONNECTIONS_MAX
            && let Some(oldest) = open.pop_front()
        {
            oldest.abort();
        }
        let serving = tokio::spawn(async move { timeout(CONNECTION_TIME_MAX, serve(stream, &relay)).await });
        open.push_back(serving.abort_handle());
    }
}

async fn serve(stream: TcpStream, relay: &Arc<Relay>) {
    let service = service_fn(|request: Request<Incoming>| {
        let response = respond(relay, request.uri().path());
        async { Ok::<_, Infallible>(response) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).keep_alive(false);
    if let Err(error) = builder.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!("metrics: {error}");
    }
}

fn respond(relay: &Relay, path: &str) -> Response<ResponseBody> {
    let (code, text, content_type) = match path {
        "/healthz" | "/livez" | "/readyz" => return relay.health(path),
        "/metrics" => (StatusCode::OK, relay.metrics_text(), "text/plain; version=0.0.4; charset=utf-8"),
        _ => (StatusCode::NOT_FOUND, "see /metrics, /healthz, /livez and /readyz\n".to_owned(), "text/plain"),
    };
    let mut response = Response::new(ResponseBody::Short(text.into()));
    *response.status_mut() = code;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
