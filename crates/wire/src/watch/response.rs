//! GET request to the API server, and its response as it arrives.

use std::{error::Error, future::poll_fn, io, pin::Pin, time::Duration};

use bytes::Bytes;
use http::{
    HeaderMap, Request, StatusCode,
    header::{ACCEPT, ACCEPT_ENCODING, LOCATION, RETRY_AFTER},
};
use http_body::{Body as _, Frame};
use tokio::time::{Instant, timeout_at};

use crate::{
    codec::{
        content_type::{ContentType, ContentTypeError},
        decompressor::{self, Decompressor},
        status::{Status, StatusDetails},
    },
    transport::link::{Body, BoxError, HasAlternative, Link, Received, Transport},
    watch::{
        failure::{ApiError, Operation},
        view_token::ViewToken,
    },
};

/// Bytes that are read of an error response.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// Time for the body of an error response.
const ERROR_TIME_MAX: Duration = Duration::from_secs(10);

/// Longest silence before the connection is checked: two intervals of bookmarks, and a little more.
const UNCHECKED_SILENCE_MAX: Duration = Duration::from_secs(130);

/// Forms that a response may have besides JSON and gzip.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AcceptedEncodings {
    pub(crate) protobuf: bool,
    pub(crate) zstd: bool,
}

/// Response whose body is still arriving.
pub(crate) struct Response {
    body: Body,
    decompressor: Decompressor,
    link: Link,
    /// Encoding of the body.
    content_type: Result<ContentType, ContentTypeError>,
    view: ViewToken,
    silence_max: Duration,
    silent_until: Instant,
}

impl Response {
    /// Sends a request for protobuf if that is accepted and the server has it, and for JSON otherwise. It fails if it
    /// lacks an object for too long ([`Operation::silence_max`]).
    pub(crate) async fn get(
        transport: &impl Transport,
        request: &crate::watch::io::Request,
        accepted: AcceptedEncodings,
    ) -> Result<Self, ApiError> {
        let silence_max = request.operation.silence_max();
        let mut builder = Request::get(&request.target).header(ACCEPT, ContentType::accepted(accepted.protobuf));
        // The objects of a watch come one by one, and API servers never compress them.
        if request.operation == Operation::List {
            builder = builder.header(ACCEPT_ENCODING, decompressor::accepted(accepted.zstd));
        }
        let request = builder.body(()).map_err(|error| ApiError::Connection(error.into()))?;
        let silent_until = Instant::now() + silence_max;
        let received = timeout_at(silent_until, transport.send(request)).await;
        let Received { response, link } =
            received.map_err(|_| ApiError::Silent(silence_max))?.map_err(ApiError::Connection)?;
        let (code, headers) = (response.status(), response.headers());
        let (retry_after, reason) = (retry_after(headers), reason(code, headers));
        let has_alternative = response.extensions().get::<HasAlternative>().is_some();
        let content_type = ContentType::of(response.headers());
        let (decompressor, view) = (Decompressor::new(response.headers()), ViewToken::of(response.headers()));
        let response =
            Self { body: response.into_body(), decompressor, link, content_type, view, silence_max, silent_until };
        if code == StatusCode::OK {
            return Ok(response);
        }
        let mut status = response.error(code, &reason, retry_after).await;
        status.details.take_if(|_| has_alternative);
        Err(ApiError::Refused(Box::new(status)))
    }

    /// Encoding of the body.
    pub(crate) fn content_type(&self) -> Result<ContentType, ContentTypeError> {
        self.content_type.clone()
    }

    /// View that it shows.
    pub(crate) fn view(&self) -> &ViewToken {
        &self.view
    }

    /// Its connection.
    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// Restarts the timeout for silence with `silence_max`.
    pub(crate) fn allow_silence(&mut self, silence_max: Duration) {
        (self.silence_max, self.silent_until) = (silence_max, Instant::now() + silence_max);
    }

    /// The next frame; `None` at the end. In the middle of a long silence the connection is checked.
    async fn frame(&mut self) -> Result<Option<Result<Frame<Bytes>, BoxError>>, ApiError> {
        let check_at = (self.silent_until - self.silence_max).checked_add(UNCHECKED_SILENCE_MAX);
        if let Some(check_at) = check_at.filter(|check_at| *check_at < self.silent_until) {
            match timeout_at(check_at, next_frame(&mut self.body)).await {
                Ok(frame) => return Ok(frame),
                Err(_) => self.link.probe(),
            }
        }
        let frame = timeout_at(self.silent_until, next_frame(&mut self.body)).await;
        frame.map_err(|_| ApiError::Silent(self.silence_max))
    }

    /// The next chunk of the content; `None` at the end.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, ApiError> {
        loop {
            if let Some(chunk) = self.decompressor.next().map_err(|error| interruption(error.into()))? {
                return Ok(Some(chunk));
            }
            let Some(frame) = self.frame().await?.transpose().map_err(interruption)? else {
                self.decompressor.finish().map_err(|error| interruption(error.into()))?;
                return Ok(None);
            };
            // Trailers are ignored.
            if let Ok(chunk) = frame.into_data() {
                self.decompressor.add(chunk);
            }
        }
    }

    /// Status in an error response. `reason` is the message if the body has none.
    async fn error(mut self, code: StatusCode, reason: &str, retry_after: Option<i32>) -> Status {
        let mut text = Vec::new();
        self.allow_silence(ERROR_TIME_MAX);
        while text.len() < ERROR_BYTES_MAX
            && let Ok(Some(chunk)) = self.chunk().await
        {
            text.extend_from_slice(&chunk);
        }
        let mut status = Status::read(&text, self.content_type.ok());
        if let Some(retry_after_seconds) = retry_after {
            status.details = Some(StatusDetails { retry_after_seconds });
        }
        if status.message.trim().is_empty() {
            reason.clone_into(&mut status.message);
        }
        status.code = code.as_u16().into();
        status
    }
}

fn next_frame(body: &mut Body) -> impl Future<Output = Option<Result<Frame<Bytes>, BoxError>>> {
    poll_fn(|context| Pin::new(&mut *body).poll_frame(context))
}

/// Seconds of the Retry-After header. The API server never sends a date.
fn retry_after(headers: &HeaderMap) -> Option<i32> {
    headers.get(RETRY_AFTER)?.to_str().ok()?.parse().ok()
}

/// Reason for an error response, as its head has it.
fn reason(code: StatusCode, headers: &HeaderMap) -> String {
    match headers.get(LOCATION).filter(|_| code.is_redirection()) {
        Some(location) => format!("it redirects to {}", String::from_utf8_lossy(location.as_bytes())),
        None => code.canonical_reason().unwrap_or("unknown status").to_owned(),
    }
}

/// Error of a broken response: [`ApiError::Cut`] for a closed connection, with which servers and proxies often end a
/// watch.
fn interruption(error: BoxError) -> ApiError {
    let is_eof = |error: &(dyn Error + 'static)| {
        error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::UnexpectedEof)
    };
    let first: &(dyn Error + 'static) = &*error;
    let is_cut = std::iter::successors(Some(first), |&error| error.source()).any(is_eof);
    if is_cut { ApiError::Cut } else { ApiError::Interrupted(error) }
}
