//! GET request to the API server, and its response as it arrives.

use std::{error::Error, future::poll_fn, io, pin::Pin, time::Duration};

use http::{
    HeaderMap, Request, StatusCode,
    header::{ACCEPT, RETRY_AFTER},
};
use http_body::Body as _;
use kube::{Client, client::Body};
use tokio::time::{Instant, timeout_at};

use super::{
    content_type::ContentType,
    failure::ApiError,
    status::{Status, StatusDetails},
};

/// Bytes that are read of an error response.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// Part of a response's body.
pub(super) type Chunk = <Body as http_body::Body>::Data;

/// Response whose body is still arriving.
pub(super) struct Response {
    body: Body,
    /// Encoding of the body. Another one than those asked for is the error.
    content_type: Result<ContentType, String>,
    silence_max: Duration,
    silent_until: Instant,
}

impl Response {
    /// Requests `target`, a path with a query, in protobuf if the server has it and in JSON otherwise, or in JSON only.
    /// It fails after `silence_max` without an object.
    pub(super) async fn get(
        client: &Client,
        target: &str,
        accepts_protobuf: bool,
        silence_max: Duration,
    ) -> Result<Self, ApiError> {
        let request = Request::get(target).header(ACCEPT, ContentType::accepted(accepts_protobuf));
        let request =
            request.body(Body::empty()).map_err(|error| ApiError::Connection(kube::Error::HttpError(error)))?;
        let silent_until = Instant::now() + silence_max;
        let received = timeout_at(silent_until, client.send(request)).await;
        let received = received.map_err(|_| ApiError::Silent(silence_max))?.map_err(ApiError::Connection)?;
        let (code, retry_after) = (received.status(), retry_after(received.headers()));
        let content_type = ContentType::of(received.headers());
        let response = Self { body: received.into_body(), content_type, silence_max, silent_until };
        if code == StatusCode::OK {
            return Ok(response);
        }
        Err(ApiError::Refused(Box::new(response.error(code, retry_after).await)))
    }

    /// Encoding of the body.
    pub(super) fn content_type(&self) -> Result<ContentType, ApiError> {
        self.content_type.clone().map_err(ApiError::ContentType)
    }

    /// Restarts the timeout for silence with `silence_max`.
    pub(super) fn allow_silence(&mut self, silence_max: Duration) {
        (self.silence_max, self.silent_until) = (silence_max, Instant::now() + silence_max);
    }

    /// The next chunk; `None` at the end.
    pub(super) async fn chunk(&mut self) -> Result<Option<Chunk>, ApiError> {
        loop {
            let frame = poll_fn(|context| Pin::new(&mut self.body).poll_frame(context));
            let frame = timeout_at(self.silent_until, frame).await.map_err(|_| ApiError::Silent(self.silence_max))?;
            let Some(frame) = frame.transpose().map_err(interruption)? else { return Ok(None) };
            // Trailers are ignored.
            if let Ok(chunk) = frame.into_data() {
                return Ok(Some(chunk));
            }
        }
    }

    /// Status in an error response.
    async fn error(mut self, code: StatusCode, retry_after: Option<i32>) -> Status {
        let mut text = Vec::new();
        while text.len() < ERROR_BYTES_MAX
            && let Ok(Some(chunk)) = self.chunk().await
        {
            text.extend_from_slice(&chunk);
        }
        let mut status = Status::read(&text, self.content_type.ok());
        if let Some(retry_after_seconds) = retry_after {
            status.details = Some(StatusDetails { retry_after_seconds });
        }
        status.code = code.as_u16().into();
        status
    }
}

/// Seconds of the Retry-After header. The API server never sends a date.
fn retry_after(headers: &HeaderMap) -> Option<i32> {
    headers.get(RETRY_AFTER)?.to_str().ok()?.parse().ok()
}

/// Error of a broken response: [`ApiError::Cut`] for a closed connection, with which servers and proxies often end a
/// watch.
fn interruption(error: kube::Error) -> ApiError {
    let is_eof = |error: &(dyn Error + 'static)| {
        error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::UnexpectedEof)
    };
    let first: &(dyn Error + 'static) = &error;
    let is_cut = std::iter::successors(Some(first), |&error| error.source()).any(is_eof);
    if is_cut { ApiError::Cut } else { ApiError::Interrupted(error) }
}
