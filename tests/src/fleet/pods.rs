//! Pods of the fleet, as the API server has them.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Fleet, PATIENCE};
use crate::process::eventually;

/// Labels of pods in a namespace, for kubectl.
#[derive(Clone, Copy, Debug)]
pub struct Selector {
    /// The namespace.
    pub namespace: &'static str,
    /// The labels.
    pub labels: &'static str,
}

impl Selector {
    /// Pods of the Deployment `web`.
    pub const WEB: Self = Self { namespace: "default", labels: "app=web" };
    /// The clients.
    pub const CLIENTS: Self = Self { namespace: "default", labels: "app=client" };
    /// The nameserver.
    pub const NAMESERVER: Self = Self { namespace: "kube-system", labels: "k8s-app=kube-dns" };
}

/// A pod's identity and state.
#[derive(Clone, Debug)]
pub struct Pod {
    /// Its name.
    pub name: String,
    /// Its unique id, which names its VM's directory.
    pub uid: String,
    /// Its address, once its VM is on.
    pub ip: String,
    /// Its phase.
    pub phase: String,
    /// Whether clients are sent to it.
    pub is_ready: bool,
    /// Whether it is to end.
    pub is_terminating: bool,
    /// Why its container waits, or has ended.
    pub reason: String,
    /// Details on that.
    pub message: String,
}

impl Pod {
    fn of(object: &Value) -> Self {
        let text = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
        let state = |name: &str| {
            let of = |kind: &str| text(&format!("/status/containerStatuses/0/state/{kind}/{name}"));
            Some(of("waiting")).filter(|text| !text.is_empty()).unwrap_or_else(|| of("terminated"))
        };
        let conditions = object.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
        let mut ready = conditions.filter(|condition| condition.get("type").is_some_and(|kind| kind == "Ready"));
        Self {
            name: text("/metadata/name"),
            uid: text("/metadata/uid"),
            ip: text("/status/podIP"),
            phase: text("/status/phase"),
            is_ready: ready.any(|condition| condition.get("status").is_some_and(|status| status == "True")),
            is_terminating: object.pointer("/metadata/deletionTimestamp").is_some(),
            reason: state("reason"),
            message: state("message"),
        }
    }

    /// Whether it has neither ended nor is to end.
    pub fn is_alive(&self) -> bool {
        !self.is_terminating && self.phase != "Failed" && self.phase != "Succeeded"
    }
}

impl Fleet<'_> {
    /// The pods with these labels.
    ///
    /// # Panics
    /// With kubectl's message, if it fails.
    pub fn pods(&self, of: Selector) -> Vec<Pod> {
        let namespace = format!("--namespace={}", of.namespace);
        let list = self.kubectl(&["get", "pods", &namespace, "--selector", of.labels, "--output=json"]);
        let list: Value = serde_json::from_str(&list).expect("kubectl writes JSON");
        list.get("items").and_then(Value::as_array).into_iter().flatten().map(Pod::of).collect()
    }

    /// Waits until exactly so many pods are alive and all of them are ready. Returns them with the time since this
    /// call.
    ///
    /// # Panics
    /// After [`PATIENCE`], with the end of the provider's log.
    pub fn wait_ready(&self, of: Selector, count: usize) -> (Vec<Pod>, Duration) {
        let start = Instant::now();
        let pods = eventually(PATIENCE, format!("{count} pods {} are ready", of.labels), || {
            let mut pods = self.pods(of);
            pods.retain(Pod::is_alive);
            if pods.len() == count && pods.iter().all(|pod| pod.is_ready) { Ok(pods) } else { Err(self.report(&pods)) }
        });
        (pods, start.elapsed())
    }

    /// Waits until no pod is left.
    pub fn wait_gone(&self, of: Selector) {
        eventually(PATIENCE, format!("no pod {} is left", of.labels), || {
            let pods = self.pods(of);
            let is_left = pods.iter().any(|pod| pod.is_alive() || pod.is_terminating);
            if is_left { Err(self.report(&pods)) } else { Ok(()) }
        });
    }

    /// Waits until the only pod with this name has a state that `is_wanted`.
    pub fn wait_pod(&self, of: Selector, name: &str, is_wanted: impl Fn(&Pod) -> bool) -> Pod {
        eventually(PATIENCE, format!("the pod {name} changes"), || {
            let pods = self.pods(of);
            let found = pods.iter().find(|pod| pod.name == name && is_wanted(pod));
            found.cloned().ok_or_else(|| self.report(&pods))
        })
    }

    /// Changes the number of pods of the Deployment `web`, and waits until it has them. Returns them with the time.
    pub fn scale(&self, count: usize) -> (Vec<Pod>, Duration) {
        let start = Instant::now();
        self.kubectl(&["scale", "deployment/web", &format!("--replicas={count}")]);
        // A watch costs the API server less than polls, which would spoil its CPU time.
        self.kubectl(&["rollout", "status", "deployment/web", "--timeout=300s"]);
        let (pods, _) = self.wait_ready(Selector::WEB, count);
        (pods, start.elapsed())
    }

    fn report(&self, pods: &[Pod]) -> String {
        format!("{pods:#?}\n{}", self.provider.tail())
    }
}
