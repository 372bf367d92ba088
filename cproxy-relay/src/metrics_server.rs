//! Responses to requests for `/metrics` and health checks.

use cproxy_daemon::{MetricsFormat, StatusRequest, StatusResponse};

use crate::relay::Relay;

/// Response to a request.
pub(crate) fn respond(relay: &Relay, request: &StatusRequest) -> StatusResponse {
    match &*request.path {
        path @ ("/healthz" | "/livez" | "/readyz") => {
            let (code, text) = relay.health_text(path);
            StatusResponse::text(code.as_u16(), text)
        }
        "/metrics" => {
            let format = MetricsFormat::of_accept(request.accept.as_deref());
            StatusResponse { code: 200, content_type: format.content_type(), body: relay.metrics_text(format) }
        }
        _ => StatusResponse::text(404, "see /metrics, /healthz, /livez and /readyz\n"),
    }
}
