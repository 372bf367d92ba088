//! Changes of the API server's objects, and the policies and slices that follow from each part of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    slice,
};

use cproxy_core::ObjectName;
use cproxy_policy::{Event, Namespace, Pod, PodPolicy, Policy, Resolver, SetReference, api, served};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{
    fixture::Cluster,
    policies::{ADDRESSES, POLICIES},
};

/// Node whose pods' policies a host gets.
pub(super) const NODE: &str = "node-1";

/// Objects by namespace and name, as text without their versions.
pub(super) type Contents = BTreeMap<String, String>;

/// Objects of the relay that a client follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Policies,
    Slices,
}

/// Pods whose policies a client gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// `team/web-0`.
    Pod,
    /// All pods of [`NODE`].
    Node,
}

/// The objects at the start, and their changes in order. A relay gets the changes of each kind in this order, but those
/// of different kinds independently of each other.
pub(super) struct Journal {
    start: Vec<Event>,
    pods: Vec<Event>,
    namespaces: Vec<Event>,
    policies: Vec<Event>,
}

/// Numbers of changes of two kinds.
type Position = (usize, usize);

/// Positions at which objects have a content; without a content, an object is not there.
pub(super) struct States(BTreeMap<(String, Option<String>), Vec<Position>>);

impl Kind {
    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Policies => POLICIES,
            Self::Slices => ADDRESSES,
        }
    }

    /// Content of an object as a relay serves it.
    pub(super) fn content(self, object: &Value) -> String {
        match self {
            Self::Policies => policy_text(read(object)),
            Self::Slices => slice_text(read(object)),
        }
    }

    /// Contents of a list.
    pub(super) fn contents(self, list: &Value) -> Contents {
        list["items"].as_array().unwrap().iter().map(|item| (key(item), self.content(item))).collect()
    }
}

/// Namespace and name of an object of the relay.
pub(super) fn key(object: &Value) -> String {
    let text = |field| object["metadata"][field].as_str().unwrap_or_default();
    format!("{}/{}", text("namespace"), text("name"))
}

fn read<T: DeserializeOwned>(object: &Value) -> T {
    serde_json::from_value(object.clone()).unwrap_or_else(|error| panic!("{error}: {object:#}"))
}

fn policy_text(mut policy: served::PodPolicy) -> String {
    policy.metadata.resource_version.clear();
    serde_json::to_string(&policy).unwrap()
}

fn slice_text(mut slice: served::AddressSlice) -> String {
    slice.metadata.resource_version.clear();
    serde_json::to_string(&slice).unwrap()
}

fn pod(object: &Value) -> Event {
    Event::Pod(Box::new(Pod::read(&read::<api::Pod>(object)).unwrap().value))
}

fn namespace(object: &Value) -> Event {
    Event::Namespace(Namespace::read(&read::<api::Namespace>(object)).unwrap())
}

fn policy(object: &Value) -> Event {
    Event::Policy(Box::new(Policy::read(&read::<api::NetworkPolicy>(object)).unwrap().value))
}

fn apply_all(resolver: &mut Resolver, events: &[Event]) {
    events.iter().for_each(|event| drop(resolver.apply(event.clone())));
}

impl Journal {
    /// With the objects that are there now.
    pub(super) fn new(cluster: &Cluster<'_>) -> Self {
        let api = cluster.admin();
        let objects = |path: &str, event: fn(&Value) -> Event| {
            let list = api.json(path);
            list["items"].as_array().unwrap().iter().map(event).collect::<Vec<_>>()
        };
        let start = [
            objects("/api/v1/namespaces", namespace),
            objects("/api/v1/pods", pod),
            objects("/apis/networking.k8s.io/v1/networkpolicies", policy),
        ];
        Self { start: start.concat(), pods: Vec::new(), namespaces: Vec::new(), policies: Vec::new() }
    }

    pub(super) fn put_pod(&mut self, object: &Value) {
        self.pods.push(pod(object));
    }

    pub(super) fn remove_pod(&mut self, namespace: &str, name: &str) {
        self.pods.push(Event::PodDeleted(ObjectName::new(namespace, name)));
    }

    pub(super) fn put_namespace(&mut self, object: &Value) {
        self.namespaces.push(namespace(object));
    }

    pub(super) fn put_policy(&mut self, object: &Value) {
        self.policies.push(policy(object));
    }

    pub(super) fn remove_policy(&mut self, namespace: &str, name: &str) {
        self.policies.push(Event::PolicyDeleted(ObjectName::new(namespace, name)));
    }

    fn resolver(&self) -> Resolver {
        let mut resolver = Resolver::default();
        apply_all(&mut resolver, &self.start);
        resolver
    }

    /// Objects of a client that has seen all changes.
    pub(super) fn expected(&self, scope: Scope, kind: Kind) -> Contents {
        let mut resolver = self.resolver();
        for events in [&self.namespaces, &self.pods, &self.policies] {
            apply_all(&mut resolver, events);
        }
        let pods: Vec<_> = match scope {
            Scope::Pod => vec![ObjectName::new("team", "web-0")],
            Scope::Node => resolver.pods_of_node(NODE).cloned().collect(),
        };
        let policies: Vec<PodPolicy> = pods.iter().filter_map(|name| resolver.pod_policy(name)).collect();
        if kind == Kind::Policies {
            let text = |policy: &PodPolicy| policy_text(served::PodPolicy::new(policy));
            return policies.iter().map(|policy| (policy.name.to_string(), text(policy))).collect();
        }
        policies.iter().flat_map(|policy| &policy.sets).flat_map(|set| slices(&resolver, *set)).collect()
    }

    /// All states that objects of a kind have had.
    pub(super) fn states(&self, kind: Kind) -> States {
        match kind {
            Kind::Policies => self.states_of_policies(),
            Kind::Slices => self.states_of_slices(),
        }
    }

    /// The policy of a pod follows from Pods and NetworkPolicies.
    fn states_of_policies(&self) -> States {
        let names: BTreeSet<ObjectName> = self.start.iter().chain(&self.pods).filter_map(pod_name).collect();
        let mut states = States(BTreeMap::new());
        for policies in 0..=self.policies.len() {
            let mut resolver = self.resolver();
            apply_all(&mut resolver, &self.policies[..policies]);
            for pods in 0..=self.pods.len() {
                apply_all(&mut resolver, last(&self.pods, pods));
                for name in &names {
                    let policy = resolver.pod_policy(name).filter(|policy| *policy.node_name == *NODE);
                    let text = policy.map(|policy| policy_text(served::PodPolicy::new(&policy)));
                    states.add(name.to_string(), text, (pods, policies));
                }
            }
        }
        states
    }

    /// The addresses of a set follow from Pods and Namespaces. NetworkPolicies only say which sets there are.
    fn states_of_slices(&self) -> States {
        let mut states = States(BTreeMap::new());
        for namespaces in 0..=self.namespaces.len() {
            let mut resolver = self.resolver();
            apply_all(&mut resolver, &self.namespaces[..namespaces]);
            apply_all(&mut resolver, &self.all_policies());
            for pods in 0..=self.pods.len() {
                apply_all(&mut resolver, last(&self.pods, pods));
                let sets: Vec<_> = resolver.slices().map(|name| name.set).collect();
                for (name, text) in sets.into_iter().flat_map(|set| slices(&resolver, set)) {
                    states.add(name, Some(text), (pods, namespaces));
                }
            }
        }
        states
    }

    /// All states of NetworkPolicies, each under a name of its own.
    fn all_policies(&self) -> Vec<Event> {
        let mut policies = Vec::new();
        for event in &self.policies {
            if let Event::Policy(policy) = event {
                let mut policy = policy.clone();
                policy.name = ObjectName::new(&policy.name.namespace, format!("policy-{}", policies.len()));
                policies.push(Event::Policy(policy));
            }
        }
        policies
    }
}

/// The last one of the first events.
fn last(events: &[Event], count: usize) -> &[Event] {
    count.checked_sub(1).map_or(&[], |index| slice::from_ref(&events[index]))
}

fn pod_name(event: &Event) -> Option<ObjectName> {
    if let Event::Pod(pod) = event { Some(pod.name.clone()) } else { None }
}

fn slices(resolver: &Resolver, set: SetReference) -> Contents {
    let slices = set.slice_names().filter_map(|name| resolver.slice(name));
    slices.map(|slice| (format!("/{}", slice.name), slice_text(served::AddressSlice::new(&slice)))).collect()
}

impl States {
    fn add(&mut self, name: String, content: Option<String>, position: Position) {
        self.0.entry((name, content)).or_default().push(position);
    }

    /// Checks states as a client has seen them, one after the other: some positions explain them that only grow.
    ///
    /// # Panics
    /// When a state has never been, or is older than one before.
    pub(super) fn check(&self, shown: &[(String, Option<String>)]) {
        let mut least = vec![(0, 0)];
        for (index, state) in shown.iter().enumerate() {
            let positions = self.0.get(state).unwrap_or_else(|| panic!("{state:?} has never been, shown as {index}"));
            let is_later = |position: &Position| least.iter().any(|(a, b)| *a <= position.0 && *b <= position.1);
            let later = minima(positions.iter().copied().filter(is_later).collect());
            assert!(
                !later.is_empty(),
                "{state:?} of {positions:?} is older than one of {least:?}: shown as {index} of {shown:#?}"
            );
            least = later;
        }
    }
}

/// Positions of which no other one is earlier in both kinds.
fn minima(mut positions: Vec<Position>) -> Vec<Position> {
    positions.sort_unstable();
    let mut minima: Vec<Position> = Vec::new();
    for position in positions {
        if minima.last().is_none_or(|last| position.1 < last.1) {
            minima.push(position);
        }
    }
    minima
}

#[test]
fn a_state_that_is_older_is_found() {
    let state = |content: &str| ("a".to_owned(), Some(content.to_owned()));
    let mut states = States(BTreeMap::new());
    for (content, position) in [("x", (0, 0)), ("y", (1, 0)), ("x", (1, 1)), ("z", (2, 1))] {
        let (name, content) = state(content);
        states.add(name, content, position);
    }
    states.check(&["x", "y", "x", "z"].map(state));
    for older in [["x", "z", "x"], ["y", "z", "y"]] {
        assert!(std::panic::catch_unwind(|| states.check(&older.map(state))).is_err(), "{older:?}");
    }
}
