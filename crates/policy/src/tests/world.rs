//! A cluster, a resolver that follows it, and a client that follows the resolver.

use std::collections::{BTreeMap, BTreeSet};

use cproxy_core::{Address, ObjectName, Problem};

use super::oracle::{Cluster, Traffic};
use crate::{
    AddressSlice, Changes, Compiled, Direction, Event, Namespace, Pod, PodPolicy, Policy, Protocol, Resolver, SetName,
    SliceName, Verdict, api, compile,
};

/// Object of a cluster.
#[derive(Clone, Debug)]
pub(super) enum Object {
    Namespace(api::Namespace),
    Pod(api::Pod),
    Policy(api::NetworkPolicy),
}

/// Name of an object that is gone.
#[derive(Clone, Debug)]
pub(super) enum Gone {
    Namespace(String),
    Pod(String, String),
    Policy(String, String),
}

/// Policies and slices as a client of the resolver knows them.
#[derive(Default)]
struct Client {
    policies: BTreeMap<ObjectName, PodPolicy>,
    slices: BTreeMap<SliceName, AddressSlice>,
}

#[derive(Default)]
pub(super) struct World {
    pub(super) cluster: Cluster,
    pub(super) resolver: Resolver,
    client: Client,
    /// Cluster-wide policies, which have no objects yet.
    cluster_policies: BTreeMap<ObjectName, Policy>,
    problems: BTreeMap<String, Vec<Problem>>,
}

impl Object {
    fn key(&self) -> (String, String) {
        let metadata = match self {
            Self::Namespace(object) => &object.metadata,
            Self::Pod(object) => &object.metadata,
            Self::Policy(object) => &object.metadata,
        };
        (metadata.namespace.clone(), metadata.name.clone())
    }

    pub(super) fn event(&self) -> (Event, Vec<Problem>) {
        match self {
            Self::Namespace(object) => (Event::Namespace(Namespace::read(object).unwrap()), Vec::new()),
            Self::Pod(object) => {
                let read = Pod::read(object).unwrap();
                (Event::Pod(Box::new(read.value)), read.problems)
            }
            Self::Policy(object) => {
                let read = Policy::read(object).unwrap();
                (Event::Policy(Box::new(read.value)), read.problems)
            }
        }
    }
}

impl World {
    pub(super) fn put(&mut self, object: &Object) -> Changes {
        let key = object.key();
        let (event, problems) = object.event();
        self.problems.insert(format!("{:?} {key:?}", std::mem::discriminant(object)), problems);
        match object.clone() {
            Object::Namespace(object) => drop(self.cluster.namespaces.insert(key.1, object)),
            Object::Pod(object) => drop(self.cluster.pods.insert(key, object)),
            Object::Policy(object) => drop(self.cluster.policies.insert(key, object)),
        }
        self.apply(event)
    }

    pub(super) fn remove(&mut self, gone: &Gone) -> Changes {
        let event = match gone.clone() {
            Gone::Namespace(name) => {
                self.cluster.namespaces.remove(&name);
                Event::NamespaceDeleted((*name).into())
            }
            Gone::Pod(namespace, name) => {
                let event = Event::PodDeleted(ObjectName::new(&namespace, &*name));
                self.cluster.pods.remove(&(namespace, name));
                event
            }
            Gone::Policy(namespace, name) => {
                let event = Event::PolicyDeleted(ObjectName::new(&namespace, &*name));
                self.cluster.policies.remove(&(namespace, name));
                event
            }
        };
        self.apply(event)
    }

    pub(super) fn put_cluster_policy(&mut self, policy: Policy) {
        self.cluster_policies.insert(policy.name.clone(), policy.clone());
        self.apply(Event::Policy(Box::new(policy)));
    }

    pub(super) fn remove_cluster_policy(&mut self, name: &ObjectName) {
        self.cluster_policies.remove(name);
        self.apply(Event::PolicyDeleted(name.clone()));
    }

    pub(super) fn apply(&mut self, event: Event) -> Changes {
        let changes = self.resolver.apply(event);
        self.client.follow(&self.resolver, &changes);
        changes
    }

    /// All problems, those of gone objects left out by their tests.
    pub(super) fn problems(&self) -> BTreeSet<String> {
        let of_objects = self.problems.values().flatten().map(ToString::to_string);
        of_objects.chain(self.resolver.problems().iter().map(ToString::to_string)).collect()
    }

    /// Checks that the client knows all that the resolver has, and that the resolver has what another has that is
    /// given all objects at once.
    pub(super) fn check(&self) -> Result<(), String> {
        self.client.check(&self.resolver)?;
        let Cluster { namespaces, pods, policies } = &self.cluster;
        let objects = policies.values().cloned().map(Object::Policy);
        let objects = objects.chain(namespaces.values().cloned().map(Object::Namespace));
        let cluster = self.cluster_policies.values().map(|policy| Event::Policy(Box::new(policy.clone())));
        let full: Resolver = objects
            .chain(pods.values().cloned().map(Object::Pod))
            .map(|object| object.event().0)
            .chain(cluster)
            .collect();
        let mut other = Client::default();
        other.list(&full);
        if other.contents() != self.client.contents() {
            return Err(format!("anew: {:#?}\nfollowed: {:#?}", other.contents(), self.client.contents()));
        }
        Ok(())
    }

    /// Checks that nothing has changed that was not reported.
    pub(super) fn check_client(&self) {
        self.client.check(&self.resolver).unwrap_or_else(|error| panic!("{error}"));
    }

    /// The compiled policy of a pod.
    pub(super) fn compiled(&self, name: &ObjectName) -> Compiled {
        let policy = &self.client.policies[name];
        compile(policy, |set| self.client.addresses(set))
    }

    /// Whether policies allow traffic, which oracle and compiled policy agree on.
    pub(super) fn allows(&self, pod: &api::Pod, compiled: &Compiled, traffic: Traffic) -> Result<bool, String> {
        let direction = if traffic.is_ingress { Direction::Ingress } else { Direction::Egress };
        let protocol = *Protocol::ALL.iter().find(|protocol| protocol.to_string() == traffic.protocol).unwrap();
        let found = compiled.verdict(direction, traffic.peer.into(), protocol, traffic.port);
        let expected = self.cluster.allows(pod, traffic);
        if (found.verdict == Verdict::Allow) == expected {
            return Ok(expected);
        }
        let metadata = &pod.metadata;
        let policy = &self.client.policies[&ObjectName::new(&metadata.namespace, &*metadata.name)];
        Err(format!("{traffic:?} of {}: oracle {expected}, found {found:?}, {policy:#?}, {compiled:#?}", metadata.name))
    }
}

impl Client {
    /// Looks up what the resolver says has changed.
    fn follow(&mut self, resolver: &Resolver, changes: &Changes) {
        for name in &changes.pods {
            match resolver.pod_policy(name) {
                Some(policy) => drop(self.policies.insert(name.clone(), policy)),
                None => drop(self.policies.remove(name)),
            }
        }
        for name in &changes.slices {
            match resolver.slice(*name) {
                Some(slice) => drop(self.slices.insert(*name, slice)),
                None => drop(self.slices.remove(name)),
            }
        }
    }

    fn list(&mut self, resolver: &Resolver) {
        let changes = Changes { pods: resolver.pods().cloned().collect(), slices: resolver.slices().collect() };
        self.follow(resolver, &changes);
    }

    /// Checks that nothing has changed that was not reported, and the form of slices.
    fn check(&self, resolver: &Resolver) -> Result<(), String> {
        let mut other = Self::default();
        other.list(resolver);
        if other.policies != self.policies {
            return Err(format!("unreported: {:#?}\nnot {:#?}", other.policies, self.policies));
        }
        if other.slices != self.slices {
            return Err(format!("unreported: {:#?}\nnot {:#?}", other.slices, self.slices));
        }
        let mut sizes: BTreeMap<_, usize> = BTreeMap::new();
        for (name, slice) in &self.slices {
            *sizes.entry(name.set).or_default() += slice.addresses.len();
            assert!(slice.addresses.is_sorted() && slice.addresses.len() <= crate::SLICE_ADDRESSES_MAX, "{slice:?}");
        }
        for (set, size) in sizes {
            let slices = set.slices as usize;
            assert!(slices.is_power_of_two() && size <= 96 * slices, "{set:?} {size}");
            assert!(slices == 1 || size >= 32 * slices, "{set:?} {size}");
        }
        Ok(())
    }

    /// Addresses of a set, whose slices are of one generation.
    fn addresses(&self, name: SetName) -> Vec<Address> {
        let slices: Vec<_> = self.slices.values().filter(|slice| slice.name.set.name == name).collect();
        assert!(slices.iter().all(|slice| slice.name.set.slices as usize == slices.len()), "{slices:?}");
        slices.iter().flat_map(|slice| slice.addresses.clone()).collect()
    }

    /// Policies with the addresses of their sets, however these are divided.
    fn contents(&self) -> BTreeMap<ObjectName, (PodPolicy, BTreeMap<SetName, BTreeSet<Address>>)> {
        let content = |policy: &PodPolicy| {
            let sets = policy.sets.iter().map(|set| (set.name, self.addresses(set.name).into_iter().collect()));
            (PodPolicy { sets: Vec::new(), ..policy.clone() }, sets.collect())
        };
        self.policies.iter().map(|(name, policy)| (name.clone(), content(policy))).collect()
    }
}
