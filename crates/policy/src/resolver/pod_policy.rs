//! The policy of a pod, made when it is asked for.

use std::{collections::BTreeMap, sync::atomic::Ordering};

use cproxy_core::{ObjectName, sorted_set};

use super::{
    POD_NAMES_MAX, POD_PARTS_MAX, Resolver,
    policies::{NamedGroups, PolicyRow, RuleGroups},
    selections::Selection,
};
use crate::{
    address_set::SetName,
    model::{Action, ContainerPort, Direction, Directions, Peers, Policy, PortName, PortRange, Ports, Rule, Tier},
    pod_policy::{PodIsolation, PodPeers, PodPolicy, PodPorts, PodRule},
};

impl Resolver {
    /// The policy of a pod, if the pod is there.
    #[must_use]
    pub fn pod_policy(&self, name: &ObjectName) -> Option<PodPolicy> {
        let pod = self.pods.find(name)?;
        let mut policy = PodPolicy {
            name: pod.name.clone(),
            uid: pod.uid.text(),
            node_name: pod.node.name.clone(),
            isolated: Directions::default(),
            policies: Vec::new(),
            node_addresses: pod.node.addresses.clone(),
            own_addresses: (*pod.addresses).into(),
            rules: Vec::new(),
            sets: Vec::new(),
        };
        let profile = self.profiles.get(pod.profile)?;
        let selection = profile.selection.and_then(|id| self.selections.get(id));
        if let Some(selection) = selection.filter(|_| !pod.is_host_network) {
            self.add_rules(&mut policy, selection, &profile.key.ports);
        }
        Some(policy)
    }

    fn add_rules(&self, pod: &mut PodPolicy, selection: &Selection, ports: &[ContainerPort]) {
        let mut rules = Rules::default();
        let mut rows: Vec<_> = selection.policies.iter().filter_map(|&id| self.policies.get(id)).collect();
        rows.sort_unstable_by_key(|row| (row.policy.tier, &row.policy.name));
        for PolicyRow { policy, groups } in rows {
            if policy.tier == Tier::NetworkPolicy {
                pod.isolated = pod.isolated.union(policy.isolates);
                if pod.policies.len() < POD_NAMES_MAX {
                    let name = format!("{} {}", policy.tier.kind(), policy.name).into();
                    pod.policies.push(PodIsolation { policy: name, isolates: policy.isolates });
                }
            }
            for (rule, groups) in policy.rules.iter().zip(groups) {
                RuleWriter { resolver: self, selection, policy, rule, groups }.write(ports, &mut rules);
            }
        }
        selection.is_cut.store(rules.is_cut, Ordering::Relaxed);
        pod.rules = rules.rules;
        let names = sorted_set(pod.rules.iter().flat_map(|rule| rule.peers.sets()));
        pod.sets = names.into_iter().filter_map(|&name| self.sets.find(name)).map(|set| set.reference()).collect();
    }
}

/// Rules of a pod, with a bound on all of their parts.
#[derive(Default)]
struct Rules {
    rules: Vec<PodRule>,
    parts: usize,
    is_cut: bool,
}

impl Rules {
    /// Adds a rule, if there is room for its parts. One that denies takes less when it denies all.
    fn push(&mut self, mut rule: PodRule) {
        if self.parts + parts(&rule) > POD_PARTS_MAX {
            self.is_cut = true;
            if rule.action == Action::Accept {
                return;
            }
            (rule.action, rule.ports, rule.peers) = (Action::Deny, PodPorts::All, PodPeers::All);
        }
        self.parts += parts(&rule);
        self.rules.push(rule);
    }
}

/// Number of a rule's parts.
fn parts(PodRule { ports, peers, .. }: &PodRule) -> usize {
    let ports = match ports {
        PodPorts::All => 0,
        PodPorts::Some(ranges) => ranges.len(),
    };
    let blocks = peers.blocks().iter().map(|block| 1 + block.except.len());
    1 + ports + peers.sets().len() + blocks.sum::<usize>()
}

/// Writes a rule for a pod.
struct RuleWriter<'a> {
    resolver: &'a Resolver,
    selection: &'a Selection,
    policy: &'a Policy,
    rule: &'a Rule,
    groups: &'a RuleGroups,
}

impl RuleWriter<'_> {
    /// Writes what the rule means for a pod with these ports.
    fn write(&self, own_ports: &[ContainerPort], rules: &mut Rules) {
        // Those that follow may only accept less.
        if rules.is_cut && self.rule.action == Action::Accept {
            return;
        }
        let ports = match (&self.rule.ports, self.rule.direction) {
            (Ports::All, _) => PodPorts::All,
            (Ports::Some { ranges, names }, Direction::Ingress) => {
                let own = own_ports.iter().filter(|port| names.contains(&port.name));
                let own = own.map(|port| PortRange::single(port.name.protocol, port.number));
                PodPorts::Some(ranges.iter().copied().chain(own).collect())
            }
            (Ports::Some { ranges, .. }, Direction::Egress) => PodPorts::Some(ranges.clone()),
        };
        let sets = self.groups.plain.iter().flat_map(|&group| self.resolver.sets.of_group(group)).map(|(_, set)| set);
        let peers = |sets| match &self.rule.peers {
            Peers::All => PodPeers::All,
            Peers::Some { blocks, .. } => PodPeers::Some { sets, blocks: blocks.clone() },
        };
        self.push(ports, sets.collect(), peers, rules);
        for NamedGroups { port, pods, in_blocks } in &self.groups.named {
            self.write_named(port, pods, |sets| PodPeers::Some { sets, blocks: Box::default() }, rules);
            if let Peers::Some { blocks, .. } = &self.rule.peers {
                self.write_named(port, in_blocks, |sets| PodPeers::InBlocks { sets, blocks: blocks.clone() }, rules);
            }
        }
    }

    /// Writes a rule for each number that pods of these groups have for a named port.
    fn write_named(
        &self,
        port: &PortName,
        groups: &[u32],
        peers: impl Fn(Box<[SetName]>) -> PodPeers,
        rules: &mut Rules,
    ) {
        let mut by_number: BTreeMap<u16, Vec<u32>> = BTreeMap::new();
        for (number, set) in groups.iter().flat_map(|&group| self.resolver.sets.of_group(group)) {
            by_number.entry(number).or_default().push(set);
        }
        for (number, sets) in by_number {
            if rules.is_cut && self.rule.action == Action::Accept {
                return;
            }
            let range = PortRange::single(port.protocol, number);
            self.push(PodPorts::Some([range].into()), sets, &peers, rules);
        }
    }

    /// Adds a rule for the peers that sets are of, unless it matches nothing.
    fn push(&self, ports: PodPorts, sets: Vec<u32>, peers: impl Fn(Box<[SetName]>) -> PodPeers, rules: &mut Rules) {
        let is_beyond = |set: &u32| self.selection.left_out.binary_search(set).is_ok();
        // An address that is not known must not escape a rule that denies.
        let is_closed = self.rule.action != Action::Accept && sets.iter().any(is_beyond);
        let within = sets.iter().filter(|set| !is_beyond(set)).filter_map(|&set| self.resolver.sets.get(set));
        let names = sorted_set(within.map(|set| set.name));
        let peers = if is_closed { PodPeers::All } else { peers(names.into_iter().collect()) };
        let has_ports = !matches!(&ports, PodPorts::Some(ranges) if ranges.is_empty());
        if !has_ports || peers.is_empty() {
            return;
        }
        let Policy { name, tier, .. } = self.policy;
        rules.push(PodRule {
            direction: self.rule.direction,
            tier: *tier,
            action: if is_closed { Action::Deny } else { self.rule.action },
            source: format!("{} {name} rule {}", tier.kind(), self.rule.index).into(),
            ports,
            peers,
        });
    }
}
