//! Policies, and the groups of pods that their rules name.

use std::collections::BTreeMap;

use cproxy_core::ObjectName;

use super::{scope_index::ScopeIndex, slab::Slab};
use crate::{
    address_set::GroupKey,
    labels::Labels,
    model::{Direction, Peers, PodSelection, Policy, PortName, Ports, Rule},
};

/// Policy with the groups of its rules.
pub(super) struct PolicyRow {
    pub(super) policy: Policy,
    /// Groups of each rule.
    pub(super) groups: Box<[RuleGroups]>,
}

/// Groups of pods that a rule names.
#[derive(Clone, Default)]
pub(super) struct RuleGroups {
    /// For all ports, or ports by number, or the selected pod's own named ports.
    pub(super) plain: Box<[u32]>,
    /// For each named port of peers.
    pub(super) named: Box<[NamedGroups]>,
}

/// Groups of pods with a named port, by the number that each pod has for it.
#[derive(Clone)]
pub(super) struct NamedGroups {
    pub(super) port: PortName,
    /// Pods that the rule selects, or all pods for a rule without peers.
    pub(super) pods: Box<[u32]>,
    /// All pods, for a rule with ranges: those in a range are peers.
    pub(super) in_blocks: Box<[u32]>,
}

/// All policies.
#[derive(Default)]
pub(super) struct Policies {
    rows: Slab<PolicyRow>,
    by_name: BTreeMap<ObjectName, u32>,
    by_scope: ScopeIndex,
}

impl RuleGroups {
    /// Groups of a rule, for which `acquire` returns the ids.
    pub(super) fn new(rule: &Rule, mut acquire: impl FnMut(GroupKey) -> u32) -> Self {
        let all = [PodSelection::all()];
        let (pods, with_name, in_blocks) = match &rule.peers {
            Peers::All => (&[][..], &all[..], &[][..]),
            Peers::Some { pods, blocks } => (&**pods, &**pods, if blocks.is_empty() { &[][..] } else { &all }),
        };
        let mut ids = |pods: &[PodSelection], port: Option<&PortName>| -> Box<[u32]> {
            let key = |selection: &PodSelection| GroupKey { selection: selection.clone(), port: port.cloned() };
            pods.iter().map(|selection| acquire(key(selection))).collect()
        };
        match (&rule.ports, rule.direction) {
            (Ports::All, _) | (Ports::Some { .. }, Direction::Ingress) => {
                Self { plain: ids(pods, None), named: Box::default() }
            }
            (Ports::Some { ranges, names }, Direction::Egress) => {
                let plain = if ranges.is_empty() { Box::default() } else { ids(pods, None) };
                let named = names.iter().map(|port| NamedGroups {
                    port: port.clone(),
                    pods: ids(with_name, Some(port)),
                    in_blocks: ids(in_blocks, Some(port)),
                });
                Self { plain, named: named.collect() }
            }
        }
    }

    /// All groups.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        let named = self.named.iter().flat_map(|named| named.pods.iter().chain(&named.in_blocks));
        self.plain.iter().chain(named).copied()
    }
}

impl Policies {
    pub(super) fn id(&self, name: &ObjectName) -> Option<u32> {
        self.by_name.get(name).copied()
    }

    /// Names, sorted.
    pub(super) fn names(&self) -> impl Iterator<Item = &ObjectName> {
        self.by_name.keys()
    }

    pub(super) fn get(&self, id: u32) -> Option<&PolicyRow> {
        self.rows.get(id)
    }

    /// Adds a policy, which is the one of its name from now on.
    pub(super) fn insert(&mut self, row: PolicyRow) -> u32 {
        let (name, subject) = (row.policy.name.clone(), row.policy.subject.clone());
        let id = self.rows.insert(row);
        if let Some(subject) = subject {
            self.by_scope.insert(&subject.scope, id);
        }
        self.by_name.insert(name, id);
        id
    }

    /// Removes a policy, whose name may have another by now.
    pub(super) fn remove(&mut self, id: u32) -> Option<PolicyRow> {
        let row = self.rows.remove(id)?;
        if let Some(subject) = &row.policy.subject {
            self.by_scope.remove(&subject.scope, id);
        }
        if self.id(&row.policy.name) == Some(id) {
            self.by_name.remove(&row.policy.name);
        }
        Some(row)
    }

    /// Sorted policies that select pods with these labels in a namespace.
    pub(super) fn selecting(&self, namespace: &str, namespace_labels: Option<&Labels>, labels: &Labels) -> Vec<u32> {
        let selects = |id: &u32| {
            let subject = self.rows.get(*id).and_then(|row| row.policy.subject.as_ref());
            subject.is_some_and(|subject| subject.pods.matches(|key| labels.get(key)))
        };
        let mut ids: Vec<_> = self.by_scope.of(namespace, namespace_labels).filter(selects).collect();
        ids.sort_unstable();
        ids
    }
}
