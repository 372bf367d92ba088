//! Verdicts from objects, straight from the text of the rules: without selectors in canonical form, sets, classes or
//! anything else of the program but the objects themselves.

use std::{collections::BTreeMap, net::IpAddr};

use crate::api::{
    ContainerPort, IntOrString, Ip, IpBlock, LabelSelector, Namespace, NetworkPolicy, Peer, Pod, PolicyPort,
};

/// Objects of a cluster, by namespace and name.
#[derive(Clone, Debug, Default)]
pub(super) struct Cluster {
    pub(super) namespaces: BTreeMap<String, Namespace>,
    pub(super) pods: BTreeMap<(String, String), Pod>,
    pub(super) policies: BTreeMap<(String, String), NetworkPolicy>,
}

/// A call or datagram of a peer to the pod, or of the pod to a peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traffic {
    pub(super) is_ingress: bool,
    pub(super) peer: IpAddr,
    pub(super) protocol: &'static str,
    pub(super) port: u16,
}

impl Cluster {
    /// Whether the policies of a pod allow the traffic.
    pub(super) fn allows(&self, pod: &Pod, traffic: Traffic) -> bool {
        let own = addresses(pod).chain(node_addresses(pod));
        if traffic.peer.is_loopback() || own.into_iter().any(|address| address == traffic.peer) || pod.spec.host_network
        {
            return true;
        }
        let selecting: Vec<_> = self
            .policies
            .values()
            .filter(|policy| policy.metadata.namespace == pod.metadata.namespace)
            .filter(|policy| selects(&policy.spec.pod_selector, &pod.metadata.labels))
            .filter(|policy| isolates(policy, traffic.is_ingress))
            .collect();
        selecting.is_empty() || selecting.iter().any(|policy| self.has_rule(policy, pod, traffic))
    }

    fn has_rule(&self, policy: &NetworkPolicy, pod: &Pod, traffic: Traffic) -> bool {
        let rules: Vec<(&[PolicyPort], &[Peer])> = if traffic.is_ingress {
            policy.spec.ingress.iter().map(|rule| (&*rule.ports, &*rule.from)).collect()
        } else {
            policy.spec.egress.iter().map(|rule| (&*rule.ports, &*rule.to)).collect()
        };
        let peer_pod = self.owner(traffic.peer);
        // Named ports of addresses are those of pods in namespaces that are known.
        let in_known = peer_pod.filter(|other| self.namespaces.contains_key(&other.metadata.namespace));
        let has_ports = |ports: &[PolicyPort], target: Option<&Pod>| {
            let named_of = if traffic.is_ingress { Some(pod) } else { target };
            ports.is_empty() || ports.iter().any(|port| has_port(port, named_of, traffic))
        };
        rules.into_iter().any(|(ports, peers)| {
            if peers.is_empty() {
                return has_ports(ports, in_known);
            }
            peers.iter().any(|peer| match (&peer.ip_block, peer_pod) {
                _ if !is_valid(peer) => false,
                (Some(block), _) => in_block(block, traffic.peer) && has_ports(ports, in_known),
                (None, Some(other)) => self.is_peer(peer, policy, other) && has_ports(ports, Some(other)),
                (None, None) => false,
            })
        })
    }

    fn is_peer(&self, peer: &Peer, policy: &NetworkPolicy, pod: &Pod) -> bool {
        let in_namespace = match &peer.namespace_selector {
            None => pod.metadata.namespace == policy.metadata.namespace,
            Some(selector) => self.namespaces.get(&pod.metadata.namespace).is_some_and(|namespace| {
                let mut labels = namespace.metadata.labels.clone();
                labels.insert("kubernetes.io/metadata.name".to_owned(), namespace.metadata.name.clone());
                selects(selector, &labels)
            }),
        };
        in_namespace && peer.pod_selector.as_ref().is_none_or(|selector| selects(selector, &pod.metadata.labels))
    }

    /// The pod whose packets have an address: the youngest that is on the pod network and has not ended.
    fn owner(&self, address: IpAddr) -> Option<&Pod> {
        let is_peer =
            |pod: &&Pod| !pod.spec.host_network && pod.status.phase != "Succeeded" && pod.status.phase != "Failed";
        let pods = self.pods.values().filter(is_peer).filter(|pod| addresses(pod).any(|other| other == address));
        pods.max_by_key(|pod| {
            let metadata = &pod.metadata;
            let is_staying = metadata.deleted.is_none();
            (metadata.created.seconds, is_staying, &metadata.uid, &metadata.namespace, &metadata.name)
        })
    }
}

/// Addresses of a pod.
pub(super) fn addresses(pod: &Pod) -> impl Iterator<Item = IpAddr> {
    list(&pod.status.pod_ips, &pod.status.pod_ip)
}

fn node_addresses(pod: &Pod) -> impl Iterator<Item = IpAddr> {
    list(&pod.status.host_ips, &pod.status.host_ip)
}

/// Addresses of a list, or the single one where there is no list.
fn list<'a>(ips: &'a [Ip], single: &'a str) -> impl Iterator<Item = IpAddr> + 'a {
    let single = Some(single).filter(|single| ips.is_empty() && !single.is_empty());
    ips.iter().map(|ip| &*ip.ip).chain(single).map(|text| text.parse().unwrap())
}

fn isolates(policy: &NetworkPolicy, is_ingress: bool) -> bool {
    let types = &policy.spec.policy_types;
    if types.is_empty() {
        return is_ingress || !policy.spec.egress.is_empty();
    }
    types.iter().any(|text| text == if is_ingress { "Ingress" } else { "Egress" })
}

fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let has_all = selector.match_labels.iter().all(|(key, value)| labels.get(key) == Some(value));
    has_all
        && selector.match_expressions.iter().all(|expression| {
            let value = labels.get(&expression.key);
            match (&*expression.operator, expression.values.is_empty()) {
                ("In", false) => value.is_some_and(|value| expression.values.contains(value)),
                ("NotIn", false) => value.is_none_or(|value| !expression.values.contains(value)),
                ("Exists", true) => value.is_some(),
                ("DoesNotExist", true) => value.is_none(),
                _ => false,
            }
        })
}

fn is_valid(peer: &Peer) -> bool {
    peer.ip_block.is_some() != (peer.pod_selector.is_some() || peer.namespace_selector.is_some())
}

fn in_block(block: &IpBlock, address: IpAddr) -> bool {
    let Some(cidr) = range(&block.cidr) else { return false };
    let except: Option<Vec<_>> = block.except.iter().map(|text| range(text)).collect();
    let Some(except) = except else { return false };
    let is_part = |part: &(IpAddr, u32)| part.1 > cidr.1 && contains(cidr, part.0);
    except.iter().all(is_part) && contains(cidr, address) && !except.iter().any(|&part| contains(part, address))
}

fn range(text: &str) -> Option<(IpAddr, u32)> {
    let (address, length) = text.split_once('/')?;
    Some((address.parse().ok()?, length.parse().ok()?))
}

fn contains((first, length): (IpAddr, u32), address: IpAddr) -> bool {
    let bits = |address: IpAddr| match address {
        IpAddr::V4(address) => u128::from(address.to_bits()) << 96,
        IpAddr::V6(address) => address.to_bits(),
    };
    first.is_ipv4() == address.is_ipv4() && (length == 0 || (bits(first) ^ bits(address)) >> (128 - length) == 0)
}

/// Whether a port of a rule is the traffic's; a named one is that of the pod.
fn has_port(port: &PolicyPort, named_of: Option<&Pod>, traffic: Traffic) -> bool {
    if port.protocol.as_deref().unwrap_or("TCP") != traffic.protocol {
        return false;
    }
    match (&port.port, port.end_port) {
        (None, end) => end.is_none(),
        (Some(IntOrString { kind: 0, number, .. }), end) => {
            (1..=65_535).contains(number) && (*number..=end.unwrap_or(*number)).contains(&i32::from(traffic.port))
        }
        (Some(_), Some(_)) => false,
        (Some(IntOrString { text, .. }), None) => {
            named_of.is_some_and(|pod| number(pod, text, traffic.protocol) == Some(traffic.port))
        }
    }
}

/// Number of a named port of a pod: the first of its containers that stay.
fn number(pod: &Pod, name: &str, protocol: &str) -> Option<u16> {
    let stays =
        pod.spec.init_containers.iter().filter(|container| container.restart_policy.as_deref() == Some("Always"));
    let has = |port: &&ContainerPort| {
        let own = if port.protocol.is_empty() { "TCP" } else { &port.protocol };
        port.name == name && own == protocol
    };
    let mut ports = pod.spec.containers.iter().chain(stays).flat_map(|container| &container.ports);
    ports.find(has).map(|port| u16::try_from(port.container_port).unwrap())
}
