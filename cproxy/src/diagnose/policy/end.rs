//! One end of traffic: a pod with its policies, or an address.

use cproxy_core::{Address, ObjectName, Problem};
use cproxy_policy::{
    Compiled, Direction, Pod, PodPolicy, Policy, Protocol, Reason, Resolver, SetName, Verdict, compile,
};

use super::question::{Port, Side};
use crate::{
    manifests::PolicyObjects,
    report::{ALLOWED, DENIED, PolicyVerdict, some_of},
};

/// One end of the traffic.
pub(super) enum End<'a> {
    Pod(Box<PodEnd<'a>>),
    /// An address that no pod has.
    Address(Address),
}

/// A pod with all that its policies say.
pub(super) struct PodEnd<'a> {
    pod: &'a Pod,
    /// Addresses that the question is about.
    addresses: Vec<Address>,
    policy: PodPolicy,
    compiled: Compiled,
    /// NetworkPolicies that select the pod.
    selecting: Vec<&'a Policy>,
    notes: Vec<String>,
}

impl<'a> End<'a> {
    /// The end that a side names.
    ///
    /// # Errors
    /// It is no pod that has traffic: why.
    pub(super) fn new(objects: &PolicyObjects<'a>, resolver: &Resolver, side: &Side) -> Result<Self, String> {
        let (name, address) = match side {
            Side::Pod(name) => (name, None),
            Side::Address(address) => match resolver.owner(*address) {
                Some(name) => (name, Some(*address)),
                None => return Ok(Self::Address(*address)),
            },
        };
        PodEnd::new(objects, resolver, name, address).map(|end| Self::Pod(Box::new(end)))
    }

    pub(super) fn is_pod(&self) -> bool {
        matches!(self, Self::Pod(_))
    }

    pub(super) fn name(&self) -> String {
        match self {
            Self::Pod(end) => end.pod.name.to_string(),
            Self::Address(address) => address.to_string(),
        }
    }

    pub(super) fn namespace(&self) -> Option<&str> {
        match self {
            Self::Pod(end) => Some(&end.pod.name.namespace),
            Self::Address(_) => None,
        }
    }

    pub(super) fn addresses(&self) -> &[Address] {
        match self {
            Self::Pod(end) => &end.addresses,
            Self::Address(address) => std::slice::from_ref(address),
        }
    }

    pub(super) fn notes(&self) -> Vec<String> {
        match self {
            Self::Pod(end) => end.notes.clone(),
            Self::Address(_) => Vec::new(),
        }
    }

    pub(super) fn problems(&self) -> Vec<Problem> {
        match self {
            Self::Pod(end) => end.compiled.problems.clone(),
            Self::Address(_) => Vec::new(),
        }
    }

    /// Number of a port of this end.
    ///
    /// # Errors
    /// It has no port of that name.
    pub(super) fn port(&self, port: &Port, protocol: Protocol) -> Result<u16, String> {
        match (port, self) {
            (Port::Number(number), _) => Ok(*number),
            (Port::Name(_), Self::Address(_)) => {
                Err("no pod of the manifests has this address: give the number of the port".to_owned())
            }
            (Port::Name(name), Self::Pod(end)) => end.named_port(name, protocol),
        }
    }

    /// Verdict of this end's policies, if it is a pod.
    pub(super) fn verdict(
        &self,
        direction: Direction,
        peer: Address,
        protocol: Protocol,
        port: u16,
    ) -> Option<PolicyVerdict> {
        match self {
            Self::Pod(end) => Some(end.verdict(direction, peer, protocol, port)),
            Self::Address(_) => None,
        }
    }
}

impl<'a> PodEnd<'a> {
    fn new(
        objects: &PolicyObjects<'a>,
        resolver: &Resolver,
        name: &ObjectName,
        address: Option<Address>,
    ) -> Result<Self, String> {
        let (Some(pod), Some(policy)) = (objects.pod(name), resolver.pod_policy(name)) else {
            return Err(if objects.has_pod(name) {
                "the Pod cannot be read".to_owned()
            } else {
                "the manifests have no such Pod".to_owned()
            });
        };
        if pod.has_ended {
            return Err("the Pod has ended (Succeeded or Failed), and its addresses may be another's by now".to_owned());
        }
        let addresses = address.map_or_else(|| addresses_of(pod), |address| vec![address]);
        if addresses.is_empty() {
            return Err("the Pod has no address (status.podIPs), so no traffic of it can be judged".to_owned());
        }
        let compiled = compile(&policy, |set| addresses_of_set(resolver, &policy, set));
        let selects = |policy: &&Policy| {
            let subject = policy.subject.as_ref();
            subject.is_some_and(|subject| subject.matches(&pod.name.namespace, None, &pod.labels))
        };
        let selecting = match pod.is_host_network {
            true => Vec::new(),
            false => objects.network_policies().filter(selects).collect(),
        };
        let notes = notes(resolver, pod, &addresses, address);
        Ok(Self { pod, addresses, policy, compiled, selecting, notes })
    }

    fn named_port(&self, name: &str, protocol: Protocol) -> Result<u16, String> {
        let ports = &self.pod.ports;
        let port = ports.iter().find(|port| &*port.name.name == name && port.name.protocol == protocol);
        port.map(|port| port.number).ok_or_else(|| {
            let names: Vec<_> = ports.iter().map(|port| format!("{}/{}", port.name.name, port.name.protocol)).collect();
            let names = if names.is_empty() { "no named ports".to_owned() } else { names.join(", ") };
            format!("the Pod has no port {name}/{protocol}: it has {names}")
        })
    }

    fn verdict(&self, direction: Direction, peer: Address, protocol: Protocol, port: u16) -> PolicyVerdict {
        let decision = self.compiled.verdict(direction, peer, protocol, port);
        let isolating = self.selecting.iter().filter(|policy| policy.isolates.has(direction));
        let isolated_by: Vec<_> = isolating.map(|policy| policy.name.to_string()).collect();
        let rule = match decision.reason {
            Reason::Rule(id) => self.policy.rules.get(id as usize).and_then(|rule| rule.source.rsplit_once(" rule ")),
            Reason::Always | Reason::NoRule => None,
        };
        let side = direction.to_string().to_lowercase();
        let (code, reason) = match (decision.reason, decision.verdict) {
            _ if self.pod.is_host_network => {
                ("host-network", "hostNetwork: the pod's traffic is its node's, and no policy selects it".to_owned())
            }
            (Reason::Always, _) if self.policy.node_addresses.contains(&peer) => {
                ("own-node", format!("{peer} is an address of the pod's node, which is always allowed"))
            }
            (Reason::Always, _) => ("itself", "a pod is always allowed to call itself".to_owned()),
            (Reason::Rule(_), _) => {
                let (policy, index) = rule.unwrap_or_default();
                ("rule", format!("{policy}, {side} rule {index}"))
            }
            (Reason::NoRule, Verdict::Allow) => {
                ("not-isolated", format!("no NetworkPolicy isolates the pod for {side}"))
            }
            (Reason::NoRule, Verdict::Deny) => {
                ("no-rule", format!("no rule of NetworkPolicy {} allows it", some_of(&isolated_by)))
            }
        };
        PolicyVerdict {
            verdict: if decision.verdict == Verdict::Allow { ALLOWED } else { DENIED }.to_owned(),
            code: code.to_owned(),
            policy: rule.map(|(policy, _)| policy.to_owned()),
            rule: rule.and_then(|(_, index)| index.parse().ok()),
            isolated_by,
            reason,
        }
    }
}

/// Addresses of a pod. Its node's are those of a pod in the node's network, also where its status has none.
fn addresses_of(pod: &Pod) -> Vec<Address> {
    let addresses = if pod.is_host_network && pod.addresses.is_empty() { &pod.node.addresses } else { &pod.addresses };
    addresses.to_vec()
}

fn addresses_of_set(resolver: &Resolver, policy: &PodPolicy, name: SetName) -> Vec<Address> {
    let sets = policy.sets.iter().filter(|set| set.name == name);
    let slices = sets.flat_map(|set| set.slice_names()).filter_map(|slice| resolver.slice(slice));
    slices.flat_map(|slice| slice.addresses).collect()
}

/// Facts about a pod's addresses, of which one may have been asked for.
fn notes(resolver: &Resolver, pod: &Pod, addresses: &[Address], asked: Option<Address>) -> Vec<String> {
    let found = asked.map(|address| format!("{address} is the address of Pod {}", pod.name));
    let others = addresses.iter().filter_map(|address| {
        let owner = resolver.owner(*address).filter(|owner| **owner != pod.name && !pod.is_host_network)?;
        Some(format!("{address} is an address of Pod {owner}, too, and rules take it for that pod's"))
    });
    found.into_iter().chain(others).collect()
}
