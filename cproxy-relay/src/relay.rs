//! State that all connections share.

use std::{
    error::Error,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use bytes::Bytes;
use cproxy_daemon::{MetricsFormat, Tasks};
use cproxy_relay_auth::{Leases, ReviewTransport, TokenReviewer, Views};
use cproxy_wire::ApiClient;
use http::{
    Request, StatusCode,
    header::{ACCEPT, CONTENT_TYPE},
};
use tokio::{runtime::Handle, sync::Notify};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{
    cache::Cache,
    clients::{refusal_log::RefusalLog, slots::ConnectionSlots},
    metrics::Metrics,
    policies::PolicyService,
    responses::lists::CompressedLists,
};

const TOKEN_REVIEWS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";

/// Version that is shown until the API server's is known: the one whose rules the relay has.
const OWN_VERSION: &str = r#"{"major":"1","minor":"36","gitVersion":"v1.36.0-cproxy-relay"}"#;

/// State that all connections share.
pub(crate) struct Relay {
    pub(crate) cache: Arc<Cache>,
    pub(crate) lists: CompressedLists,
    /// Network policies, if they are served.
    pub(crate) policies: Option<Arc<PolicyService>>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) refusal_log: RefusalLog,
    /// Reviewer of tokens, if clients need credentials.
    pub(crate) reviewer: Option<Arc<TokenReviewer<ReviewClient>>>,
    /// Tokens of clients that are connected.
    pub(crate) leases: Arc<Leases>,
    pub(crate) authenticates: bool,
    views: RwLock<Arc<Views>>,
    /// Notified when there are new views.
    pub(crate) views_changed: Notify,
    server_version: RwLock<Bytes>,
    /// Slots of connections.
    pub(crate) slots: Arc<ConnectionSlots>,
    /// Cancelled when the relay is about to stop.
    pub(crate) draining: CancellationToken,
    /// Background tasks, each of which runs for ever.
    pub(crate) tasks: Tasks,
    /// Time over which clients are moved then.
    pub(crate) drain_time: Duration,
}

impl Relay {
    pub(crate) fn new(
        cache: Arc<Cache>,
        policies: Option<Arc<PolicyService>>,
        reviewer: Option<Arc<TokenReviewer<ReviewClient>>>,
        views: Views,
        connections_max: usize,
        drain_time: Duration,
    ) -> Self {
        Self {
            cache,
            lists: CompressedLists::default(),
            policies,
            metrics: Arc::default(),
            refusal_log: RefusalLog::default(),
            authenticates: reviewer.is_some(),
            reviewer,
            leases: Arc::default(),
            views: RwLock::new(Arc::new(views)),
            views_changed: Notify::new(),
            server_version: RwLock::new(Bytes::from_static(OWN_VERSION.as_bytes())),
            slots: ConnectionSlots::new(connections_max),
            draining: CancellationToken::new(),
            tasks: Tasks::default(),
            drain_time,
        }
    }

    /// Views of clients.
    pub(crate) fn views(&self) -> Arc<Views> {
        self.views.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the views. Clients are moved, spread over a minute, so that their watches get them.
    pub(crate) fn set_views(&self, views: Views) {
        *self.views.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(views);
        self.views_changed.notify_waiters();
    }

    /// Version of the API server.
    pub(crate) fn server_version(&self) -> Bytes {
        self.server_version.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks the API server for its version.
    pub(crate) async fn read_server_version(&self, client: &ApiClient) {
        let request = Request::get("/version").header(ACCEPT, "application/json").body(Bytes::new());
        let Ok(request) = request else { return };
        match client.call(request).await {
            Ok(response) if response.status() == StatusCode::OK => {
                *self.server_version.write().unwrap_or_else(PoisonError::into_inner) = response.into_body();
            }
            Ok(response) => tracing::debug!("the API server's version: {}", response.status()),
            Err(error) => tracing::debug!("the API server's version: {error}"),
        }
    }

    /// Reasons why the relay cannot serve clients.
    pub(crate) fn unready(&self) -> Option<String> {
        if self.draining.is_cancelled() {
            return Some("it is about to stop".to_owned());
        }
        let mut pending = self.cache.pending();
        pending.extend(self.policies.as_ref().and_then(|policies| policies.pending()));
        (!pending.is_empty()).then(|| format!("not listed yet: {}", pending.join(", ")))
    }

    /// Outcome of a health check. A relay that has lost the API server still serves what it knows, so it stays ready.
    pub(crate) fn health_text(&self, path: &str) -> (StatusCode, String) {
        let unavailable = |text| (StatusCode::SERVICE_UNAVAILABLE, text);
        match self.tasks.ended().as_slice() {
            [] => {}
            names => return unavailable(format!("tasks have ended, start the relay again: {}\n", names.join(", "))),
        }
        match if path == "/readyz" { self.unready() } else { None } {
            None => (StatusCode::OK, "ok".to_owned()),
            Some(reason) => unavailable(format!("not ready: {reason}\n")),
        }
    }

    /// All numbers for Prometheus.
    pub(crate) fn metrics_text(&self, format: MetricsFormat) -> String {
        let reviews = self.reviewer.as_ref().map(|reviewer| reviewer.counts());
        self.metrics.text(
            format,
            &self.cache,
            &self.lists,
            self.slots.unsent_counts(),
            reviews,
            self.policies.as_deref(),
        )
    }
}

/// Client of the API server for token reviews.
pub(crate) struct ReviewClient {
    pub(crate) client: Arc<ApiClient>,
    /// Runtime of the client's connection.
    pub(crate) runtime: Handle,
}

impl ReviewTransport for ReviewClient {
    type Error = Box<dyn Error + Send + Sync>;

    async fn review(&self, body: Bytes) -> Result<(u16, Bytes), Self::Error> {
        let request = Request::post(TOKEN_REVIEWS)
            .header(CONTENT_TYPE, "application/json")
            .header(ACCEPT, "application/json")
            .body(body)?;
        let client = self.client.clone();
        let call = AbortOnDropHandle::new(self.runtime.spawn(async move { client.call(request).await }));
        let response = call.await??;
        Ok((response.status().as_u16(), response.into_body()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_that_has_ended_fails_each_health_check() {
        let relay = Relay::new(Arc::new(Cache::new(1 << 20)), None, None, Views::everything(), 10, Duration::ZERO);
        assert_eq!(relay.health_text("/livez"), (StatusCode::OK, "ok".to_owned()));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async { relay.tasks.keep("listener", async {}).await.unwrap() });
        for path in ["/livez", "/healthz", "/readyz"] {
            let (code, text) = relay.health_text(path);
            assert_eq!(code, StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(text, "tasks have ended, start the relay again: listener\n");
        }
    }
}
