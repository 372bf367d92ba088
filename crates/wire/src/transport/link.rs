//! Requests and responses, whatever carries them.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use tokio::sync::{Notify, watch};

/// Error of any kind.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Body of a response that is still arriving.
pub struct Body(Pin<Box<dyn http_body::Body<Data = Bytes, Error = BoxError> + Send>>);

impl Body {
    /// Wraps a body.
    pub fn new(body: impl http_body::Body<Data = Bytes, Error = BoxError> + Send + 'static) -> Self {
        Self(Box::pin(body))
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.0.as_mut().poll_frame(context)
    }
}

/// Response, and the connection on which it arrives.
pub struct Received {
    /// The response.
    pub response: Response<Body>,
    /// Its connection.
    pub link: Link,
}

/// Extension of a refusal after which the next request goes to another server, so that its Retry-After does not count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HasAlternative;

/// Connection of a response.
#[derive(Clone, Debug)]
pub struct Link {
    /// Server, with the address that was reached.
    server: Arc<str>,
    /// True once there is a better connection.
    superseded: watch::Receiver<bool>,
    /// Asks for a check that the peer is alive.
    probe: Option<Arc<Notify>>,
}

impl Link {
    /// A link that is superseded when `superseded` becomes true, and is checked on `probe`.
    pub(crate) fn new(server: Arc<str>, superseded: watch::Receiver<bool>, probe: Option<Arc<Notify>>) -> Self {
        Self { server, superseded, probe }
    }

    /// Server, with the address that was reached.
    pub(crate) fn server(&self) -> &Arc<str> {
        &self.server
    }

    /// A link that is never superseded and cannot be checked.
    #[must_use]
    pub fn plain() -> Self {
        Self::new("".into(), watch::Sender::new(false).subscribe(), None)
    }

    /// Waits until there is a better connection.
    pub(crate) async fn superseded(&mut self) {
        if self.superseded.wait_for(|is_superseded| *is_superseded).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Has the peer checked. If it does not answer, the connection ends, and the response with it.
    pub(crate) fn probe(&self) {
        if let Some(probe) = &self.probe {
            probe.notify_one();
        }
    }
}

/// Way to the API servers.
pub trait Transport: Sync {
    /// Sends a request, a GET for a path with a query, and waits for the head of the response.
    fn send(&self, request: Request<()>) -> impl Future<Output = Result<Received, BoxError>> + Send;

    /// Address of the server that was used last, for messages.
    fn server(&self) -> Arc<str>;

    /// Reports a server that cannot serve requests now. The next request goes to another one, if there is one.
    fn report_failure(&self) -> impl Future<Output = ()> + Send;

    /// Waits until a request may succeed at once, although the last one has failed: other servers or credentials are
    /// configured, or another request has shown that the server can be reached again.
    fn usable(&self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }
}
