//! Single short requests, whose whole response is read.

#[cfg(test)]
mod tests;

use std::{future::poll_fn, pin::Pin, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use http::{Request, Response, header::CONTENT_LENGTH};
use http_body::Body as _;
use tokio::time::timeout;

use crate::{
    client::api_client::ApiClient,
    transport::link::{Body, BoxError, Transport},
};

/// Longest response of [`ApiClient::call`], and the time for it.
const CALL_BYTES_MAX: usize = 1 << 20;
const CALL_TIME_MAX: Duration = Duration::from_secs(30);

/// Reason why a call has no response.
#[derive(Debug, thiserror::Error)]
enum CallError {
    #[error("the response is longer than {} bytes", CALL_BYTES_MAX)]
    TooLong,
    #[error("{0} has not responded within {limit:?}", limit = CALL_TIME_MAX)]
    Silent(Arc<str>),
}

impl ApiClient {
    /// Sends a request of any method, with a body if it is not empty, and reads the whole response: for single short
    /// requests, such as reviews. It counts for no rate limit, and must be harmless if the server gets it twice.
    ///
    /// # Errors
    /// No server can be reached, the response is longer than a MiB, or it takes longer than 30 s.
    pub async fn call(&self, mut request: Request<Bytes>) -> Result<Response<Bytes>, BoxError> {
        if !request.body().is_empty() {
            let length = request.body().len().into();
            request.headers_mut().insert(CONTENT_LENGTH, length);
        }
        let called = timeout(CALL_TIME_MAX, async {
            let (parts, body) = self.send_with_failover(request).await?.response.into_parts();
            Ok(Response::from_parts(parts, read_all(body).await?))
        });
        match called.await {
            Ok(response) => response,
            Err(_) => {
                self.report_failure().await;
                Err(CallError::Silent(self.server()).into())
            }
        }
    }
}

/// Reads a body to its end.
///
/// # Errors
/// It breaks off, or is longer than a MiB.
pub(crate) async fn read_all(mut body: Body) -> Result<Bytes, BoxError> {
    let mut bytes = BytesMut::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        // Trailers are ignored.
        let Ok(chunk) = frame?.into_data() else { continue };
        if bytes.len() + chunk.len() > CALL_BYTES_MAX {
            return Err(CallError::TooLong.into());
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes.freeze())
}
