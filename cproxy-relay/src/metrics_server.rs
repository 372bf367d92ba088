//! Plain HTTP for `/metrics` and health checks.

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use http::{HeaderValue, Request, Response, StatusCode, header::CONTENT_TYPE};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::timeout,
};

use crate::{body::ResponseBody, relay::Relay};

/// Connections at once: probes and a few scrapers.
const CONNECTIONS_MAX: usize = 32;
/// Time of a connection.
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(30);

/// Opens the listener.
pub(crate) fn open(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = std::net::TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Serves for ever.
pub(crate) async fn run(listener: TcpListener, relay: Arc<Relay>) {
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(permit) = permits.clone().acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let relay = relay.clone();
        drop(tokio::spawn(async move {
            timeout(CONNECTION_TIME_MAX, serve(stream, &relay)).await.ok();
            drop(permit);
        }));
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
