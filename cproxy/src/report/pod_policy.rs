//! The policy of the pod that an agent enforces.

use std::collections::BTreeMap;

use cproxy_core::{Address, counted, sort_unique};
use cproxy_datapath::bpf::PolicyDecision;
use cproxy_policy::{
    Action, Direction, Directions, IpBlock, PodPeers, PodPolicy, PodPorts, PodRule, PortRange, SetName,
};
use serde::Serialize;
use serde_json::Value;

use super::{
    fields::{bool_of, list_of, number_of, text_of, texts_of},
    policy::{ALLOWED, DENIED, PolicyVerdict, some_of},
    table::{Cell, Column, TableRow},
};

/// Policy of the pod in the output of `cproxy get policy`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PodPolicyReport {
    /// namespace/name of the pod; empty until its policy has come.
    pub pod: String,
    /// enforce or audit.
    pub mode: String,
    /// Why the pod is closed, or a later policy not in force; `None`: the policy that the source has is in force.
    pub missing: Option<String>,
    /// Ingress, Egress: directions in which all is denied that no rule allows.
    pub isolated: Vec<String>,
    /// Seconds since the policy, or its last change, is in force; `None`: none is.
    pub since_seconds: Option<u64>,
    /// Addresses of the sets that the rules name, each once.
    pub addresses: u64,
    /// Addresses of the pod's node, which are always allowed.
    pub node_addresses: Vec<String>,
    /// Policies that isolate the pod and have no rule for a direction, and all rules.
    pub rules: Vec<PodPolicyRow>,
}

/// Rule of the policy, or a policy that isolates without one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PodPolicyRow {
    /// Ingress or Egress.
    pub direction: String,
    /// Policy, and the position of the rule among those of this direction: the first is 0.
    pub rule: String,
    /// Accept, Deny or Pass; Isolate for a policy that has no rule in the direction.
    pub action: String,
    /// Ports, such as 80/TCP or 8000-8100/UDP; none: all ports of all protocols.
    pub ports: Vec<String>,
    /// Ranges of addresses, each with its exceptions.
    pub blocks: Vec<String>,
    /// Addresses of the rule's sets. `None`: all addresses match.
    pub addresses: Option<u64>,
    /// Only those addresses of the sets count that are in one of the ranges.
    pub in_blocks: bool,
    /// Number of the rule in the kernel; `None` for a policy without a rule.
    pub id: Option<u32>,
}

/// Policy that an agent enforces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Enforced<'a> {
    pub(crate) policy: &'a PodPolicy,
    /// Number of the addresses of each set.
    pub(crate) set_sizes: &'a BTreeMap<SetName, u64>,
    pub(crate) since_seconds: u64,
    pub(crate) addresses: u64,
}

impl PodPolicyReport {
    /// Report of an agent that has put a policy in force, or none yet: then the kernel isolates in these directions.
    pub(crate) fn new(
        enforced: Option<Enforced<'_>>,
        in_kernel: Directions,
        is_audited: bool,
        missing: Option<String>,
    ) -> Self {
        let mode = if is_audited { "audit" } else { "enforce" }.to_owned();
        let Some(Enforced { policy, set_sizes, since_seconds, addresses }) = enforced else {
            return Self {
                pod: String::new(),
                mode,
                missing,
                isolated: names(in_kernel),
                since_seconds: None,
                addresses: 0,
                node_addresses: Vec::new(),
                rules: Vec::new(),
            };
        };
        let isolating = policy.policies.iter().flat_map(|isolation| {
            let prefix = format!("{} rule ", isolation.policy);
            let without_rules = Direction::BOTH.into_iter().filter(move |&of| {
                let is_of = |rule: &&PodRule| rule.direction == of && rule.source.starts_with(&prefix);
                isolation.isolates.has(of) && !policy.rules.iter().any(|rule| is_of(&rule))
            });
            without_rules.map(|direction| PodPolicyRow::isolating(direction, &isolation.policy))
        });
        let rules = policy.rules.iter().zip(0..).map(|(rule, id)| PodPolicyRow::new(rule, id, set_sizes));
        Self {
            pod: policy.name.to_string(),
            mode,
            missing,
            isolated: names(policy.isolated),
            since_seconds: Some(since_seconds),
            addresses,
            node_addresses: policy.node_addresses.iter().map(ToString::to_string).collect(),
            rules: isolating.chain(rules).collect(),
        }
    }

    /// Report as an agent has sent it; `None` if it has another form.
    #[must_use]
    pub fn read(report: &Value) -> Option<Self> {
        Some(Self {
            pod: text_of(report, "pod")?,
            mode: text_of(report, "mode")?,
            missing: text_of(report, "missing"),
            isolated: texts_of(report, "isolated")?,
            since_seconds: number_of(report, "since_seconds"),
            addresses: number_of(report, "addresses")?,
            node_addresses: texts_of(report, "node_addresses")?,
            rules: list_of(report, "rules", PodPolicyRow::read)?,
        })
    }

    /// The policy on one line.
    pub(crate) fn line(&self) -> String {
        if let Some(reason) = &self.missing {
            return format!("the pod's present policy is not in force: {reason}");
        }
        let mode = if self.mode == "audit" { ", only audited" } else { "" };
        if self.isolated.is_empty() {
            return format!("{}: not isolated{mode}", self.pod);
        }
        let isolated = self.isolated.join(" and ").to_lowercase();
        let rules = self.rules.iter().filter(|row| row.id.is_some()).count() as u64;
        format!("{}: isolated for {isolated}{mode}; {}", self.pod, counted(rules, "rule", "rules"))
    }

    /// Policies that isolate the pod in a direction.
    fn isolating(&self, direction: Direction) -> Vec<String> {
        let direction = direction.to_string();
        let of_direction = self.rules.iter().filter(|row| row.direction == direction);
        let mut names: Vec<_> = of_direction.map(|row| row.policy().to_owned()).collect();
        sort_unique(&mut names);
        names
    }

    /// Verdict of the kernel about traffic with a peer. Without a running agent the policies have no names.
    pub(crate) fn verdict(
        report: Option<&Self>,
        direction: Direction,
        peer: Address,
        decision: PolicyDecision,
    ) -> PolicyVerdict {
        let side = direction.to_string();
        let is_isolated = report.is_none_or(|report| report.isolated.contains(&side));
        let isolated_by = report.map(|report| report.isolating(direction)).unwrap_or_default();
        let row = report.and_then(|report| report.rules.iter().find(|row| row.id.is_some() && row.id == decision.rule));
        let is_of_node = report.is_some_and(|report| report.node_addresses.contains(&peer.to_string()));
        let (code, reason) = match (decision.rule, row, decision.is_allowed) {
            (Some(_), Some(row), _) => ("rule", row.rule.clone()),
            (Some(id), None, _) => ("rule", format!("rule {id}, whose name only a running agent knows")),
            (None, _, true) if is_of_node => ("own-node", format!("{peer} is an address of the pod's node")),
            (None, _, true) if is_isolated && report.is_some() => ("itself", format!("{peer} is the pod itself")),
            (None, _, true) => ("not-isolated", format!("no policy isolates the pod for {}", side.to_lowercase())),
            (None, _, false) if isolated_by.is_empty() => match report.and_then(|report| report.missing.as_ref()) {
                Some(missing) => ("closed", format!("the pod's policy is not in force: {missing}")),
                None => ("no-rule", "no rule allows it".to_owned()),
            },
            (None, _, false) => ("no-rule", format!("no rule of {} allows it", some_of(&isolated_by))),
        };
        let source = row.and_then(|row| row.rule.rsplit_once(" rule "));
        PolicyVerdict {
            verdict: if decision.is_allowed { ALLOWED } else { DENIED }.to_owned(),
            code: code.to_owned(),
            policy: source.map(|(policy, _)| policy.to_owned()),
            rule: source.and_then(|(_, index)| index.parse().ok()),
            isolated_by,
            reason,
        }
    }

    /// Heading of the rules.
    #[must_use]
    pub fn heading(&self) -> String {
        let Self { pod, mode, missing, isolated, since_seconds, addresses, .. } = self;
        let pod = if pod.is_empty() { "the pod".to_owned() } else { format!("pod {pod}") };
        let isolated = if isolated.is_empty() {
            "isolated by no policy".to_owned()
        } else {
            format!("isolated for {}", isolated.join(" and ").to_lowercase())
        };
        let mut text = match since_seconds {
            None => format!(
                "{pod} ({mode}): closed but for traffic within the VM, or under the policy of an earlier agent\n"
            ),
            Some(since) => {
                let peers = counted(*addresses, "address of peers", "addresses of peers");
                format!("{pod} ({mode}): {isolated}; {peers}; unchanged for {}\n", super::time(*since))
            }
        };
        text.extend(missing.iter().map(|missing| format!("missing: {missing}\n")));
        text
    }
}

impl PodPolicyRow {
    fn new(rule: &PodRule, id: u32, set_sizes: &BTreeMap<SetName, u64>) -> Self {
        let PodRule { direction, action, source, ports, peers, .. } = rule;
        let action = match action {
            Action::Accept => "Accept",
            Action::Deny => "Deny",
            Action::Pass => "Pass",
        };
        let ports = match ports {
            PodPorts::All => Vec::new(),
            PodPorts::Some(ranges) => ranges.iter().map(ports_text).collect(),
        };
        let sizes = peers.sets().iter().filter_map(|set| set_sizes.get(set));
        Self {
            direction: direction.to_string(),
            rule: (**source).to_owned(),
            action: action.to_owned(),
            ports,
            blocks: peers.blocks().iter().map(block_text).collect(),
            addresses: (!matches!(peers, PodPeers::All)).then(|| sizes.sum()),
            in_blocks: matches!(peers, PodPeers::InBlocks { .. }),
            id: Some(id),
        }
    }

    fn read(row: &Value) -> Option<Self> {
        Some(Self {
            direction: text_of(row, "direction")?,
            rule: text_of(row, "rule")?,
            action: text_of(row, "action")?,
            ports: texts_of(row, "ports")?,
            blocks: texts_of(row, "blocks")?,
            addresses: number_of(row, "addresses"),
            in_blocks: bool_of(row, "in_blocks")?,
            id: number_of(row, "id"),
        })
    }

    fn isolating(direction: Direction, policy: &str) -> Self {
        Self {
            direction: direction.to_string(),
            rule: policy.to_owned(),
            action: "Isolate".to_owned(),
            ports: Vec::new(),
            blocks: Vec::new(),
            addresses: None,
            in_blocks: false,
            id: None,
        }
    }

    /// Policy that the row is of.
    fn policy(&self) -> &str {
        self.rule.rsplit_once(" rule ").map_or(&self.rule, |(policy, _)| policy)
    }

    /// Name for `-o name`.
    #[must_use]
    pub fn name(&self) -> String {
        self.rule.clone()
    }

    fn peers(&self) -> String {
        let Some(addresses) = self.addresses else {
            return if self.id.is_some() { "all".to_owned() } else { String::new() };
        };
        let of_sets = counted(addresses, "address", "addresses");
        match (self.blocks.is_empty(), self.in_blocks, addresses) {
            (true, ..) => of_sets,
            (false, true, _) => format!("{of_sets}, those in {}", some_of(&self.blocks)),
            (false, false, 0) => some_of(&self.blocks),
            (false, false, _) => format!("{of_sets}, {}", some_of(&self.blocks)),
        }
    }
}

impl TableRow for PodPolicyRow {
    const COLUMNS: &'static [Column] = &[
        Column::name("RULE"),
        Column::fixed("DIRECTION"),
        Column::fixed("ACTION"),
        Column::fixed("PORTS"),
        Column::fixed("PEERS"),
    ];

    type Key = (String, Option<u32>);

    fn key(&self) -> Self::Key {
        (self.direction.clone(), self.id)
    }

    fn cells(&self) -> Vec<Cell> {
        let ports = match (self.id, self.ports.is_empty()) {
            (None, _) => String::new(),
            (Some(_), true) => "all".to_owned(),
            (Some(_), false) => some_of(&self.ports),
        };
        let peers = self.peers();
        [&self.rule, &self.direction, &self.action, &ports, &peers].map(|cell| Cell::or_dash(Some(cell))).into()
    }
}

/// Names of directions.
fn names(directions: Directions) -> Vec<String> {
    Direction::BOTH.into_iter().filter(|&of| directions.has(of)).map(|of| of.to_string()).collect()
}

/// Ports as text.
fn ports_text(PortRange { protocol, first, last }: &PortRange) -> String {
    if first == last { format!("{first}/{protocol}") } else { format!("{first}-{last}/{protocol}") }
}

/// Range of addresses as text.
fn block_text(IpBlock { cidr, except }: &IpBlock) -> String {
    let except: Vec<_> = except.iter().map(ToString::to_string).collect();
    if except.is_empty() { cidr.to_string() } else { format!("{cidr} except {}", some_of(&except)) }
}
