//! Requests for lists and watches, in an encoding that the server and the proxies in front of it can send.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{
    transport::link::Transport,
    watch::{
        failure::ApiError,
        io::Request,
        response::{AcceptedEncodings, Response},
    },
};

/// Way to the API servers, shared by the watches of several resources.
pub(crate) struct Requester<'a, T> {
    pub(crate) transport: &'a T,
    /// The server has not yet refused protobuf.
    accepts_protobuf: AtomicBool,
    /// All zstd so far could be read.
    accepts_zstd: AtomicBool,
}

impl<'a, T: Transport> Requester<'a, T> {
    pub(crate) fn new(transport: &'a T) -> Self {
        Self { transport, accepts_protobuf: AtomicBool::new(true), accepts_zstd: AtomicBool::new(true) }
    }

    /// Asks for gzip alone from now on, if a response was in zstd that cannot be read. A proxy in front of the server
    /// may choose a larger window.
    pub(crate) fn disable_zstd_on_error<R>(&self, result: &Result<R, ApiError>) {
        if let Err(error) = result
            && error.is_of_zstd()
            && self.accepts_zstd.swap(false, Ordering::Relaxed)
        {
            let server = self.transport.server();
            tracing::info!("the zstd of the API server at {server} cannot be read: asking for gzip");
        }
    }

    /// Reports a server that accepts requests or connections, but sends nothing.
    pub(crate) async fn report_silence<R>(&self, result: Result<R, ApiError>) -> Result<R, ApiError> {
        if matches!(result, Err(ApiError::Silent(_))) {
            self.transport.report_failure().await;
        }
        result
    }

    /// Sends a request. If the server, or a proxy in front of it, refuses protobuf, JSON alone is asked for from then
    /// on.
    pub(crate) async fn send(&self, request: &Request) -> Result<Response, ApiError> {
        let zstd = self.accepts_zstd.load(Ordering::Relaxed);
        let get = |protobuf| Response::get(self.transport, request, AcceptedEncodings { protobuf, zstd });
        let accepts_protobuf = self.accepts_protobuf.load(Ordering::Relaxed);
        match get(accepts_protobuf).await {
            Err(ApiError::Refused(status)) if accepts_protobuf && matches!(status.code, 406 | 415) => {
                if self.accepts_protobuf.swap(false, Ordering::Relaxed) {
                    let server = self.transport.server();
                    tracing::info!("the API server at {server} does not send protobuf: asking for JSON");
                }
                get(false).await
            }
            response => response,
        }
    }
}
