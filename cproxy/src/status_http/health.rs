//! Health checks. `/healthz` and `/livez` have kube-proxy's body (pkg/proxy/healthcheck/proxy_health.go).

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::SystemTime,
};

use cproxy_daemon::StatusResponse;
use serde::Serialize;

use crate::state::Status;

/// Body of a response if the agent's loop hangs.
pub(super) const NO_ANSWER: &str = "the agent's loop does not answer\n";

/// Time before the first write, as kube-proxy shows it.
const NEVER: &str = "0001-01-01T00:00:00Z";

/// Numbers of responses to a probe.
#[derive(Debug, Default)]
pub(super) struct Responses {
    healthy: AtomicU64,
    unhealthy: AtomicU64,
}

impl Responses {
    fn count(&self, is_healthy: bool) {
        let counter = if is_healthy { &self.healthy } else { &self.unhealthy };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Numbers by status code.
    pub(super) fn read(&self) -> [(&'static str, u64); 2] {
        [("200", self.healthy.load(Ordering::Relaxed)), ("503", self.unhealthy.load(Ordering::Relaxed))]
    }
}

/// Probes that are counted.
#[derive(Debug, Default)]
pub(super) struct Probes {
    pub(super) healthz: Responses,
    pub(super) livez: Responses,
}

/// Body of kube-proxy.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Body {
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Families>,
}

/// State by family. Both are written together, and so are the same.
#[derive(Serialize)]
struct Families {
    #[serde(rename = "IPv4")]
    v4: Family,
    #[serde(rename = "IPv6")]
    v6: Family,
}

#[derive(Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct Family {
    last_updated: String,
    healthy: bool,
}

impl Probes {
    /// Response to `/healthz`: no change waits too long to be written, and the Node, if it has a name, exists.
    pub(super) fn healthz(&self, status: Option<&Status>) -> StatusResponse {
        let is_synced = status.is_some_and(|status| status.measures.is_healthy());
        let node_eligible = status.and_then(|status| status.has_node);
        let is_healthy = is_synced && node_eligible != Some(false);
        self.healthz.count(is_healthy);
        respond(status, is_synced, is_healthy, node_eligible)
    }

    /// Response to `/livez`: the agent's loop answers, and no task has ended that only another start brings back.
    pub(super) fn livez(&self, status: Option<&Status>) -> StatusResponse {
        let is_alive = status.is_some_and(|status| !status.has_ended_task);
        self.livez.count(is_alive);
        respond(status, is_alive, is_alive, None)
    }
}

fn respond(status: Option<&Status>, is_synced: bool, is_healthy: bool, node_eligible: Option<bool>) -> StatusResponse {
    let now = text_of(SystemTime::now());
    let last_sync = status.and_then(|status| status.measures.last_sync).map(text_of);
    let families = last_sync.clone().map(|last_updated| {
        let family = Family { last_updated, healthy: is_synced };
        Families { v4: family.clone(), v6: family }
    });
    // As in kube-proxy, the time of a healthy response is recent, even if nothing had to be written.
    let last_updated = if is_healthy { now.clone() } else { last_sync.unwrap_or_else(|| NEVER.to_owned()) };
    let body = Body { last_updated, current_time: now, node_eligible, healthy: is_synced, status: families };
    let code = if is_healthy { 200 } else { 503 };
    StatusResponse { code, content_type: "application/json", body: serde_json::to_string(&body).unwrap_or_default() }
}

fn text_of(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time).map(|time| time.to_string()).unwrap_or_else(|_| NEVER.to_owned())
}

/// Response to `/readyz`: `ok`, or a line for each thing that the agent waits for.
pub(super) fn readyz(status: Option<&Status>) -> StatusResponse {
    match status {
        Some(Status { pending, .. }) if pending.is_empty() => StatusResponse::text(200, "ok"),
        Some(Status { pending, .. }) => StatusResponse::text(503, pending.join("\n") + "\n"),
        None => StatusResponse::text(503, NO_ANSWER),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn status(has_node: Option<bool>, pending: &[&str]) -> Status {
        let pending = pending.iter().map(|&text| text.to_owned()).collect();
        Status { has_node, pending, ..Status::default() }
    }

    fn body(response: &StatusResponse) -> Value {
        serde_json::from_str(&response.body).unwrap()
    }

    #[test]
    fn livez_fails_once_a_task_has_ended() {
        let probes = Probes::default();
        let mut status = status(None, &[]);
        assert_eq!(probes.livez(Some(&status)).code, 200);
        status.has_ended_task = true;
        assert_eq!((probes.livez(Some(&status)).code, probes.livez(None).code), (503, 503));
        assert_eq!(probes.livez.read(), [("200", 1), ("503", 2)]);
    }

    #[test]
    fn healthz_has_the_body_of_kube_proxy() {
        let probes = Probes::default();
        let mut healthy = status(Some(true), &["the table"]);
        healthy.measures.last_sync = Some(SystemTime::UNIX_EPOCH);
        let response = probes.healthz(Some(&healthy));
        assert_eq!((response.code, response.content_type), (200, "application/json"));
        let json = body(&response);
        assert_eq!(json["lastUpdated"], json["currentTime"]);
        assert_eq!((&json["nodeEligible"], &json["healthy"]), (&true.into(), &true.into()));
        for family in ["IPv4", "IPv6"] {
            let expected = serde_json::json!({"lastUpdated": "1970-01-01T00:00:00Z", "healthy": true});
            assert_eq!(json["status"][family], expected);
        }
        assert_eq!(probes.healthz.read(), [("200", 1), ("503", 0)]);
    }

    #[test]
    fn a_node_that_is_gone_is_not_eligible_and_one_without_a_name_is_not_asked_for() {
        let probes = Probes::default();
        let gone = probes.healthz(Some(&status(Some(false), &[])));
        assert_eq!((gone.code, &body(&gone)["nodeEligible"]), (503, &false.into()));
        assert_eq!(body(&gone)["lastUpdated"], NEVER);
        let nameless = probes.healthz(Some(&status(None, &[])));
        assert_eq!((nameless.code, body(&nameless).get("nodeEligible")), (200, None));
        assert_eq!(probes.livez(Some(&status(Some(false), &[]))).code, 200);
        assert_eq!(probes.healthz.read(), [("200", 1), ("503", 1)]);
    }

    #[test]
    fn a_loop_that_hangs_is_neither_healthy_nor_live_nor_ready() {
        let probes = Probes::default();
        for response in [probes.healthz(None), probes.livez(None)] {
            assert_eq!((response.code, &body(&response)["healthy"]), (503, &false.into()));
        }
        assert_eq!(readyz(None), StatusResponse::text(503, NO_ANSWER));
        assert_eq!(probes.livez.read(), [("200", 0), ("503", 1)]);
    }

    #[test]
    fn readyz_has_a_line_for_each_pending_thing() {
        assert_eq!(readyz(Some(&status(None, &[]))), StatusResponse::text(200, "ok"));
        assert_eq!(readyz(Some(&status(None, &["a", "b"]))), StatusResponse::text(503, "a\nb\n"));
    }
}
