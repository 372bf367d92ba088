//! Objects that network policies are resolved from: Namespaces, NetworkPolicies and Pods.

use std::{collections::BTreeMap, fmt};

use cproxy_core::{ObjectName, Problem, sorted_map};
use cproxy_policy::{
    Event, Namespace, Pod, Policy, Read,
    api::{self, Metadata},
};
use serde_json::Value;

use super::policy_json;

/// Kind of an object of network policies. Resolving them in this order is the least work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PolicyKind {
    /// v1 Namespace.
    Namespaces,
    /// networking.k8s.io/v1 NetworkPolicy.
    NetworkPolicies,
    /// v1 Pod.
    Pods,
}

/// Object of network policies.
#[derive(Clone, Debug)]
pub enum PolicyObject {
    /// A Namespace.
    Namespace(Namespace),
    /// A NetworkPolicy.
    NetworkPolicy(Box<Policy>),
    /// A Pod.
    Pod(Box<Pod>),
    /// An object that cannot be used. A Namespace has no namespace; names that are not known are empty.
    Unreadable(PolicyKind, ObjectName),
}

/// Identity of an object: kind, namespace, which a Namespace has not, and name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PolicyId<'a> {
    kind: PolicyKind,
    namespace: &'a str,
    name: &'a str,
}

/// Objects of network policies, each once: of several definitions the last counts, readable or not.
#[derive(Debug, Default)]
pub struct PolicyObjects<'a>(BTreeMap<PolicyId<'a>, &'a PolicyObject>);

impl PolicyKind {
    /// The kind as objects name it.
    #[must_use]
    pub fn singular(self) -> &'static str {
        match self {
            Self::Namespaces => "Namespace",
            Self::NetworkPolicies => "NetworkPolicy",
            Self::Pods => "Pod",
        }
    }
}

impl PolicyObject {
    /// Reads an object; `None` if it has no name.
    ///
    /// # Errors
    /// It cannot be decoded: the path of the field, and why.
    pub(super) fn read(kind: PolicyKind, object: &Value) -> Result<Option<Read<Self>>, String> {
        Ok(match kind {
            PolicyKind::Namespaces => {
                let namespace = Namespace::read(&policy_json::namespace(object)?);
                namespace.map(|value| Read { value: Self::Namespace(value), problems: Vec::new() })
            }
            PolicyKind::NetworkPolicies => {
                let policy = Policy::read(&policy_json::network_policy(object)?);
                if let Some(problem) =
                    policy.iter().flat_map(|policy| &policy.problems).find(|of| decides_isolation(of))
                {
                    return Err(format!("{}: {}", problem.field, problem.message));
                }
                policy.map(|Read { value, problems }| Read { value: Self::NetworkPolicy(Box::new(value)), problems })
            }
            PolicyKind::Pods => {
                let pod = Pod::read(&policy_json::pod(object)?);
                pod.map(|Read { value, problems }| Read { value: Self::Pod(Box::new(value)), problems })
            }
        })
    }

    pub(super) fn id(&self) -> PolicyId<'_> {
        match self {
            Self::Namespace(object) => PolicyId::of_namespace(&object.name),
            Self::NetworkPolicy(object) => PolicyId::new(PolicyKind::NetworkPolicies, &object.name),
            Self::Pod(object) => PolicyId::new(PolicyKind::Pods, &object.name),
            Self::Unreadable(kind, name) => PolicyId::new(*kind, name),
        }
    }

    fn event(&self) -> Option<Event> {
        match self {
            Self::Namespace(object) => Some(Event::Namespace(object.clone())),
            Self::NetworkPolicy(object) => Some(Event::Policy(object.clone())),
            Self::Pod(object) => Some(Event::Pod(object.clone())),
            Self::Unreadable(..) => None,
        }
    }
}

/// Whether a mistake leaves open which pods a NetworkPolicy isolates.
fn decides_isolation(problem: &Problem) -> bool {
    ["spec.podSelector", "spec.policyTypes"].iter().any(|field| problem.field.starts_with(field))
}

impl<'a> PolicyId<'a> {
    fn new(kind: PolicyKind, ObjectName { namespace, name }: &'a ObjectName) -> Self {
        Self { kind, namespace, name }
    }

    /// Kind as objects name it, namespace and name.
    pub(super) fn parts(self) -> (&'static str, &'a str, &'a str) {
        (self.kind.singular(), self.namespace, self.name)
    }

    fn of_namespace(name: &'a str) -> Self {
        Self { kind: PolicyKind::Namespaces, namespace: "", name }
    }
}

impl<'a> PolicyObjects<'a> {
    /// The pod of a name, if it is there and can be read.
    #[must_use]
    pub fn pod(&self, name: &ObjectName) -> Option<&'a Pod> {
        match self.0.get(&PolicyId::new(PolicyKind::Pods, name))? {
            PolicyObject::Pod(pod) => Some(pod),
            _ => None,
        }
    }

    /// Whether a pod of this name is there, readable or not.
    #[must_use]
    pub fn has_pod(&self, name: &ObjectName) -> bool {
        self.0.contains_key(&PolicyId::new(PolicyKind::Pods, name))
    }

    /// All NetworkPolicies that can be read, sorted by name.
    pub fn network_policies(&self) -> impl Iterator<Item = &'a Policy> {
        self.0.values().filter_map(|object| match object {
            PolicyObject::NetworkPolicy(policy) => Some(&**policy),
            _ => None,
        })
    }

    /// Objects that cannot be used and might change a verdict about pods of a namespace: the Namespace, and
    /// NetworkPolicies that are or may be in it.
    pub fn unread_of(&self, namespace: &str) -> impl Iterator<Item = String> {
        self.0.iter().filter_map(move |(id, object)| {
            let PolicyObject::Unreadable(kind, name) = object else { return None };
            let concerns = match kind {
                PolicyKind::Namespaces => id.name == namespace,
                PolicyKind::NetworkPolicies => id.namespace.is_empty() || id.namespace == namespace,
                PolicyKind::Pods => false,
            };
            let kind = kind.singular();
            concerns.then(|| match (id.namespace, id.name) {
                (_, "") => format!("a {kind}"),
                _ => format!("{kind} {name}"),
            })
        })
    }

    /// All objects as events of a resolver. The namespace of a pod is there even if it has no object, as an API server
    /// would have it: with the label of its name.
    pub fn events(&self) -> impl Iterator<Item = Event> {
        let namespaces = self.namespaces_without_object().into_iter().map(Event::Namespace);
        namespaces.chain(self.0.values().filter_map(|object| object.event()))
    }

    /// Namespaces of pods that have no object. One that cannot be read has labels that are not known.
    fn namespaces_without_object(&self) -> Vec<Namespace> {
        let pods = self.0.keys().filter(|id| id.kind == PolicyKind::Pods);
        let mut names: Vec<_> = pods.map(|id| id.namespace).collect();
        names.dedup();
        let is_missing = |name: &&str| !self.0.contains_key(&PolicyId::of_namespace(name));
        let namespace = |name: &str| {
            let metadata = Metadata { name: name.to_owned(), ..Metadata::default() };
            Namespace::read(&api::Namespace { metadata })
        };
        names.into_iter().filter(is_missing).filter_map(namespace).collect()
    }
}

impl<'a> FromIterator<&'a PolicyObject> for PolicyObjects<'a> {
    fn from_iter<I: IntoIterator<Item = &'a PolicyObject>>(objects: I) -> Self {
        Self(sorted_map(objects.into_iter().map(|object| (object.id(), object))))
    }
}

/// A problem of an object, with its location.
pub(super) fn located(problem: Problem, location: impl fmt::Display) -> Problem {
    let Problem { object, field, message } = problem;
    Problem::new(object, field, format!("{message} ({location})"))
}
