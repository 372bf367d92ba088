//! cproxy's own verdicts about the traffic of a cluster.

use std::{collections::BTreeMap, net::IpAddr};

use cproxy_core::{Address, ObjectName};
use cproxy_policy::{
    Compiled, Direction, Event, Namespace, Pod, PodPolicy, Policy, Protocol, Resolver, Verdict, api, compile,
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::cluster::{Cluster, Traffic};

/// Whether the policies of the source and of the destination allow traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sides {
    pub(crate) egress: bool,
    pub(crate) ingress: bool,
}

impl Sides {
    pub(crate) fn both(self) -> bool {
        self.egress && self.ingress
    }
}

/// Whether pods may always talk to themselves and their node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exempt {
    OwnAndNode,
    Nothing,
}

/// Policies of the pods that have an address.
pub(crate) struct Policies(BTreeMap<Address, Own>);

#[derive(Clone)]
struct Own {
    compiled: Compiled,
    /// Addresses of the pod and of its node.
    exempt: Vec<Address>,
}

impl Policies {
    pub(crate) fn new(cluster: &Cluster, exempt: Exempt) -> Self {
        let namespaces = objects(&cluster.namespaces).map(|object| Event::Namespace(Namespace::read(&object).unwrap()));
        let policies = objects(&cluster.policies).map(|object: api::NetworkPolicy| {
            let read = Policy::read(&object).unwrap();
            assert!(read.problems.is_empty(), "{:?}", read.problems);
            Event::Policy(Box::new(read.value))
        });
        let pods: Vec<Pod> = objects(&cluster.pods).map(|object| Pod::read(&object).unwrap().value).collect();
        let resolver: Resolver =
            namespaces.chain(policies).chain(pods.iter().map(|pod| Event::Pod(Box::new(pod.clone())))).collect();
        let mut compiled = BTreeMap::new();
        for pod in pods.iter().filter(|pod| pod.is_peer()) {
            let own = Own {
                compiled: compiled_policy(&resolver, &pod.name, exempt),
                exempt: pod.addresses.iter().chain(&pod.node.addresses).copied().collect(),
            };
            compiled.extend(pod.addresses.iter().map(|&address| (address, own.clone())));
        }
        Self(compiled)
    }

    pub(crate) fn sides(&self, traffic: &Traffic) -> Sides {
        self.ask(traffic, |own, direction, peer| {
            let protocol = *Protocol::ALL.iter().find(|protocol| protocol.to_string() == traffic.protocol).unwrap();
            own.compiled.verdict(direction, peer, protocol, traffic.port).verdict == Verdict::Allow
        })
    }

    /// Whether the traffic is that of a pod with itself or its node.
    pub(crate) fn exempt(&self, traffic: &Traffic) -> Sides {
        self.ask(traffic, |own, _, peer| own.exempt.contains(&peer))
    }

    /// Asks both sides; one that is no pod allows everything.
    fn ask(&self, traffic: &Traffic, allows: impl Fn(&Own, Direction, Address) -> bool) -> Sides {
        let [from, to] = [&traffic.from, &traffic.to].map(|text| Address::from(text.parse::<IpAddr>().unwrap()));
        Sides {
            egress: self.0.get(&from).is_none_or(|own| allows(own, Direction::Egress, to)),
            ingress: self.0.get(&to).is_none_or(|own| allows(own, Direction::Ingress, from)),
        }
    }
}

fn compiled_policy(resolver: &Resolver, name: &ObjectName, exempt: Exempt) -> Compiled {
    let mut policy: PodPolicy = resolver.pod_policy(name).unwrap();
    if exempt == Exempt::Nothing {
        policy.own_addresses = Box::default();
        policy.node_addresses = Box::default();
    }
    let sets: BTreeMap<_, Vec<Address>> = policy
        .sets
        .iter()
        .map(|set| (set.name, set.slice_names().flat_map(|slice| resolver.slice(slice).unwrap().addresses).collect()))
        .collect();
    let compiled = compile(&policy, |set| sets[&set].iter().copied());
    assert!(compiled.problems.is_empty(), "{:?}", compiled.problems);
    compiled
}

fn objects<T: DeserializeOwned>(values: &[Value]) -> impl Iterator<Item = T> {
    values.iter().map(|value| serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}: {value}")))
}
