//! NetworkPolicies.

use cproxy_core::{AddressRange, ObjectName, Text, parse_address, sort_unique};

use super::{Problems, port_number, protocol};
use crate::{
    api::{self, IntOrString, NetworkPolicy},
    model::{
        Action, Direction, Directions, IpBlock, Peers, PodSelection, Policy, PortName, PortRange, Ports, Rule, Scope,
        Tier,
    },
    selector::LabelSelector,
};

/// Longest name of a port (apimachinery `IsValidPortName`).
const PORT_NAME_BYTES_MAX: usize = 15;

pub(super) fn read(name: ObjectName, object: &NetworkPolicy, problems: &mut Problems) -> Policy {
    let NetworkPolicy { metadata, spec } = object;
    let isolates = directions(spec, problems);
    let mut reader = Reader { namespace: name.namespace.clone(), problems };
    let pods = reader.selector(&spec.pod_selector, "spec.podSelector", "the policy selects no pod");
    let subject = pods.map(|pods| PodSelection { scope: Scope::Namespace(name.namespace.clone()), pods });
    let ingress = spec.ingress.iter().map(|rule| (Direction::Ingress, &rule.ports, &rule.from));
    let egress = spec.egress.iter().map(|rule| (Direction::Egress, &rule.ports, &rule.to));
    let mut rules = Vec::new();
    for (index, (direction, ports, peers)) in ingress.enumerate().chain(egress.enumerate()) {
        // A direction that the policy does not isolate has no rules, whatever the object has.
        if isolates.has(direction) {
            rules.push(reader.rule(direction, index, ports, peers));
        }
    }
    Policy { name, uid: (*metadata.uid).into(), tier: Tier::NetworkPolicy, subject, isolates, rules: rules.into() }
}

/// Directions of `policyTypes`, by default as `SetDefaults_NetworkPolicy` has it.
fn directions(spec: &api::NetworkPolicySpec, problems: &mut Problems) -> Directions {
    if spec.policy_types.is_empty() {
        return Directions { ingress: true, egress: !spec.egress.is_empty() };
    }
    let mut directions = Directions::default();
    for (index, text) in spec.policy_types.iter().enumerate() {
        match &**text {
            "Ingress" => directions.ingress = true,
            "Egress" => directions.egress = true,
            _ => problems
                .add(format!("spec.policyTypes[{index}]"), format!("{text:?} is not Ingress or Egress; ignored")),
        }
    }
    directions
}

/// Reads the parts of a policy.
struct Reader<'a> {
    namespace: Text,
    problems: &'a mut Problems,
}

impl Reader<'_> {
    fn rule(&mut self, direction: Direction, index: usize, ports: &[api::PolicyPort], peers: &[api::Peer]) -> Rule {
        let (list, side) = match direction {
            Direction::Ingress => ("ingress", "from"),
            Direction::Egress => ("egress", "to"),
        };
        let ports = self.ports(ports, &format!("spec.{list}[{index}].ports"));
        let peers = self.peers(peers, &format!("spec.{list}[{index}].{side}"));
        Rule { direction, index, action: Action::Accept, ports, peers }
    }

    fn ports(&mut self, ports: &[api::PolicyPort], field: &str) -> Ports {
        if ports.is_empty() {
            return Ports::All;
        }
        let (mut ranges, mut names) = (Vec::new(), Vec::new());
        for (index, port) in ports.iter().enumerate() {
            match read_port(port) {
                Ok(Port::Range(range)) => ranges.push(range),
                Ok(Port::Name(name)) => names.push(name),
                Err((part, message)) => {
                    self.problems.add(format!("{field}[{index}]{part}"), format!("{message}; it matches no port"));
                }
            }
        }
        sort_unique(&mut ranges);
        sort_unique(&mut names);
        Ports::Some { ranges: ranges.into(), names: names.into() }
    }

    fn peers(&mut self, peers: &[api::Peer], field: &str) -> Peers {
        if peers.is_empty() {
            return Peers::All;
        }
        let (mut pods, mut blocks) = (Vec::new(), Vec::new());
        for (index, peer) in peers.iter().enumerate() {
            let field = format!("{field}[{index}]");
            match peer {
                api::Peer { pod_selector: None, namespace_selector: None, ip_block: Some(block) } => {
                    blocks.extend(self.block(block, &field));
                }
                api::Peer { pod_selector, namespace_selector, ip_block: None }
                    if pod_selector.is_some() || namespace_selector.is_some() =>
                {
                    pods.extend(self.pods(pod_selector.as_ref(), namespace_selector.as_ref(), &field));
                }
                api::Peer { ip_block: None, .. } => {
                    self.problems.add(field, "has no selector and no ipBlock; it matches no peer");
                }
                _ => self.problems.add(field, "has an ipBlock and a selector; it matches no peer"),
            }
        }
        sort_unique(&mut pods);
        sort_unique(&mut blocks);
        Peers::Some { pods: pods.into(), blocks: blocks.into() }
    }

    fn pods(
        &mut self,
        pods: Option<&api::LabelSelector>,
        namespaces: Option<&api::LabelSelector>,
        field: &str,
    ) -> Option<PodSelection> {
        const NOTHING: &str = "it matches no peer";
        let all = api::LabelSelector::default();
        let pods = self.selector(pods.unwrap_or(&all), &format!("{field}.podSelector"), NOTHING);
        let scope = match namespaces {
            Some(selector) => {
                self.selector(selector, &format!("{field}.namespaceSelector"), NOTHING).map(Scope::Namespaces)
            }
            None => Some(Scope::Namespace(self.namespace.clone())),
        };
        Some(PodSelection { scope: scope?, pods: pods? })
    }

    fn selector(&mut self, selector: &api::LabelSelector, field: &str, consequence: &str) -> Option<LabelSelector> {
        let selector = LabelSelector::of_object(selector);
        selector.map_err(|error| self.problems.add(field, format!("{error}; {consequence}"))).ok()
    }

    fn block(&mut self, block: &api::IpBlock, field: &str) -> Option<IpBlock> {
        let field = format!("{field}.ipBlock");
        let cidr = self.range(&block.cidr, &format!("{field}.cidr"))?;
        let mut except = Vec::new();
        for (index, text) in block.except.iter().enumerate() {
            let field = format!("{field}.except[{index}]");
            let range = self.range(text, &field)?;
            if !cidr.covers(&range) || cidr == range {
                self.problems.add(field, format!("{range} is no part of {cidr}; the peer matches nothing"));
                return None;
            }
            except.push(range);
        }
        sort_unique(&mut except);
        Some(IpBlock { cidr, except: except.into() })
    }

    /// Range of addresses. Old objects may have bits beyond the length and leading zeros, which are reported.
    fn range(&mut self, text: &str, field: &str) -> Option<AddressRange> {
        let Some(range) = AddressRange::parse(text) else {
            self.problems.add(field, format!("{text:?} is no range of addresses; the peer matches nothing"));
            return None;
        };
        let has_host_bits = text.split_once('/').and_then(|(address, _)| parse_address(address)) != Some(range.first());
        if has_host_bits || (!text.contains(':') && range.to_string() != text) {
            self.problems.add(field, format!("{text:?} is read as {range}"));
        }
        Some(range)
    }
}

/// Port of a rule.
enum Port {
    Range(PortRange),
    Name(PortName),
}

/// Path of a field from the port, and the mistake in it.
type PortError = (&'static str, String);

fn read_port(port: &api::PolicyPort) -> Result<Port, PortError> {
    let api::PolicyPort { protocol: text, port, end_port } = port;
    let text = text.as_deref().unwrap_or_default();
    let protocol = protocol(text).ok_or_else(|| (".protocol", format!("{text:?} is not TCP, UDP or SCTP")))?;
    match (port, end_port) {
        (None, None) => Ok(Port::Range(PortRange::all(protocol))),
        (None, Some(_)) => Err((".endPort", "there is no port".to_owned())),
        (Some(IntOrString { kind: 0, number, .. }), end) => {
            let first = number_of(".port", *number)?;
            let last = end.map_or(Ok(first), |end| number_of(".endPort", end))?;
            if last < first {
                return Err((".endPort", format!("{last} is lower than port {first}")));
            }
            Ok(Port::Range(PortRange { protocol, first, last }))
        }
        (Some(_), Some(_)) => Err((".endPort", "the port has a name".to_owned())),
        (Some(IntOrString { text, .. }), None) if is_port_name(text) => {
            Ok(Port::Name(PortName { name: (**text).into(), protocol }))
        }
        (Some(IntOrString { text, .. }), None) => Err((".port", format!("{text:?} is no name of a port"))),
    }
}

fn number_of(field: &'static str, number: i32) -> Result<u16, PortError> {
    port_number(number).ok_or_else(|| (field, format!("{number} is not in 1 to 65535")))
}

/// Whether a text may be a port's name (apimachinery `IsValidPortName`).
fn is_port_name(text: &str) -> bool {
    cproxy_core::is_label(text)
        && text.len() <= PORT_NAME_BYTES_MAX
        && !text.contains("--")
        && text.bytes().any(|byte| byte.is_ascii_lowercase())
}
