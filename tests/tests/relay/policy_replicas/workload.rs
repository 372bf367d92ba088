//! Random changes of Pods, Namespaces and NetworkPolicies.

use std::collections::BTreeSet;

use cproxy_tests::random::Random;
use serde_json::{Value, json};

use super::journal::{Journal, NODE};
use crate::{
    fixture::Cluster,
    policies::{apps, pod},
};

/// Pods that come and go, with their nodes.
const PODS: [(&str, &str, &str); 6] = [
    ("team", "pod-0", NODE),
    ("team", "pod-1", NODE),
    ("team", "pod-2", "node-2"),
    ("team", "pod-3", "node-2"),
    ("team-a", "pod-0", NODE),
    ("team-a", "pod-1", "node-2"),
];

/// Pods that stay, and get other labels.
const STAYING: [(&str, &str); 3] = [("team", "web-0"), ("team", "client-0"), ("team-a", "other-0")];

const POLICIES: [(&str, &str); 4] = [("team", "a"), ("team", "b"), ("team", "c"), ("team-a", "a")];

const APPS: [&str; 2] = ["web", "client"];

#[derive(Clone, Copy, Debug)]
enum Change {
    Label,
    ComeOrGo,
    Policy,
    PolicyGone,
    Namespace,
}

const CHANGES: [(usize, Change); 5] =
    [(4, Change::Label), (5, Change::ComeOrGo), (5, Change::Policy), (2, Change::PolicyGone), (1, Change::Namespace)];

/// The only writer of objects, one change after the other.
pub(super) struct Workload<'c, 's> {
    cluster: &'c Cluster<'s>,
    journal: Journal,
    /// Number of changes, which is part of ports and addresses: no object has a content that it had before.
    number: u16,
    pods: BTreeSet<(&'static str, &'static str)>,
    policies: BTreeSet<(&'static str, &'static str)>,
}

impl<'c, 's> Workload<'c, 's> {
    pub(super) fn new(cluster: &'c Cluster<'s>) -> Self {
        let journal = Journal::new(cluster);
        Self { cluster, journal, number: 0, pods: BTreeSet::new(), policies: BTreeSet::new() }
    }

    pub(super) fn into_journal(self) -> Journal {
        self.journal
    }

    /// Makes a random change.
    pub(super) fn change(&mut self, random: &mut Random) {
        self.number += 1;
        match random.weighted(&CHANGES) {
            Change::Label => self.label(random),
            Change::ComeOrGo => self.come_or_go(random),
            Change::Policy => self.put_policy(random),
            Change::PolicyGone => self.remove_policy(random),
            Change::Namespace => {
                let path = format!("/api/v1/namespaces/{}", random.pick(&["team", "team-a"]));
                let labels = json!({"team": random.pick(&["0", "1"])});
                self.journal.put_namespace(&self.cluster.patch(&path, &json!({"metadata": {"labels": labels}})));
            }
        }
    }

    fn label(&mut self, random: &mut Random) {
        let pods: Vec<_> = STAYING.iter().copied().chain(self.pods.iter().copied()).collect();
        let (namespace, name) = random.pick(&pods);
        let labels = json!({"app": random.pick(&APPS)});
        let pod = self.cluster.patch(&pod_path(namespace, name), &json!({"metadata": {"labels": labels}}));
        self.journal.put_pod(&pod);
    }

    fn come_or_go(&mut self, random: &mut Random) {
        let (namespace, name, node) = random.pick(&PODS);
        if self.pods.remove(&(namespace, name)) {
            self.cluster.admin().write("DELETE", &pod_path(namespace, name), &json!({"gracePeriodSeconds": 0}));
            return self.journal.remove_pod(namespace, name);
        }
        self.pods.insert((namespace, name));
        let mut object = pod(namespace, name, random.pick(&APPS), "note");
        object["spec"]["nodeName"] = node.into();
        self.journal.put_pod(&self.cluster.create(&object));
        let [high, low] = self.number.to_be_bytes();
        let address = format!("10.245.{high}.{low}");
        let status = json!({"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]});
        let path = format!("{}/status", pod_path(namespace, name));
        self.journal.put_pod(&self.cluster.patch(&path, &json!({"status": status})));
    }

    /// Creates or replaces a policy.
    fn put_policy(&mut self, random: &mut Random) {
        let (namespace, name) = random.pick(&POLICIES);
        let mut object = json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": {"namespace": namespace, "name": name},
            "spec": {
                "podSelector": random.pick(&[None, Some("web"), Some("client")]).map_or(json!({}), selector),
                "ingress": [self.rule("from", random)],
            },
        });
        if random.percent(40) {
            object["spec"]["egress"] = json!([self.rule("to", random)]);
        }
        let is_new = self.policies.insert((namespace, name));
        let replace = || self.cluster.admin().write("PUT", &policy_path(namespace, name), &object);
        let policy = if is_new { self.cluster.create(&object) } else { replace() };
        self.journal.put_policy(&policy);
    }

    /// A rule whose port tells the change.
    fn rule(&self, peers: &str, random: &mut Random) -> Value {
        let of_teams = json!({"matchLabels": {"team": "1"}});
        let allowed = match random.below(4) {
            0 => json!([]),
            1 => apps(random.pick(&APPS)),
            2 => json!([{"namespaceSelector": of_teams}]),
            _ => json!([{"namespaceSelector": {}, "podSelector": selector("web")}, {"podSelector": {}}]),
        };
        json!({"ports": [{"port": self.number}], peers: allowed})
    }

    fn remove_policy(&mut self, random: &mut Random) {
        let policies: Vec<_> = self.policies.iter().copied().collect();
        if policies.is_empty() {
            return self.put_policy(random);
        }
        let (namespace, name) = random.pick(&policies);
        self.policies.remove(&(namespace, name));
        self.cluster.delete(&policy_path(namespace, name));
        self.journal.remove_policy(namespace, name);
    }
}

fn selector(app: &str) -> Value {
    json!({"matchLabels": {"app": app}})
}

fn pod_path(namespace: &str, name: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/pods/{name}")
}

fn policy_path(namespace: &str, name: &str) -> String {
    format!("/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies/{name}")
}
