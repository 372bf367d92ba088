//! Sets beyond the bounds of a pod's policy.

use std::{collections::BTreeSet, sync::atomic::Ordering};

use cproxy_core::{Problem, sorted_set};

use super::{POD_ADDRESSES_MAX, POD_PARTS_MAX, POD_SETS_MAX, Resolver, policies::PolicyRow, selections::Selection};
use crate::model::{Direction, Rule};

impl Resolver {
    /// Rules that name sets of which no address is allowed, since the sets of one pod would be too large.
    #[must_use]
    pub fn problems(&self) -> BTreeSet<Problem> {
        let beyond = self.selections.iter().filter(|selection| !selection.left_out.is_empty());
        let cut = self.selections.iter().filter(|selection| selection.is_cut.load(Ordering::Relaxed));
        let cut = cut.flat_map(|selection| self.policies_of(selection)).map(|row| {
            let message = format!(
                "the policies of one pod have more than {POD_PARTS_MAX} rules, ports, sets and ranges together, each \
                 named port once for each number that pods have for it: the last rules, by the policies' names, have \
                 no effect"
            );
            Problem::new(format_args!("{} {}", row.policy.tier.kind(), row.policy.name), "spec", message)
        });
        sorted_set(beyond.flat_map(|selection| self.problems_of(selection)).chain(cut))
    }

    fn policies_of(&self, selection: &Selection) -> impl Iterator<Item = &PolicyRow> {
        let ids: Vec<u32> = selection.policies.to_vec();
        ids.into_iter().filter_map(|id| self.policies.get(id))
    }

    fn problems_of(&self, selection: &Selection) -> Vec<Problem> {
        let left_out = selection.left_out.iter().filter_map(|&set| self.sets.get(set));
        // A set without an address loses none.
        let groups = sorted_set(left_out.filter(|set| set.count > 0).map(|set| set.group));
        let mut problems = Vec::new();
        for PolicyRow { policy, groups: of_rules } in selection.policies.iter().filter_map(|&id| self.policies.get(id))
        {
            let rules = policy.rules.iter().zip(of_rules);
            for (rule, _) in rules.filter(|(_, named)| named.iter().any(|group| groups.contains(&group))) {
                let object = format!("{} {}", policy.tier.kind(), policy.name);
                let message = format!(
                    "some of its peers have no effect: of the sets that one pod's policies name, the smallest with \
                     {POD_ADDRESSES_MAX} addresses and {POD_SETS_MAX} sets together are used"
                );
                problems.push(Problem::new(object, field(rule), message));
            }
        }
        problems
    }
}

fn field(rule: &Rule) -> String {
    match rule.direction {
        Direction::Ingress => format!("spec.ingress[{}].from", rule.index),
        Direction::Egress => format!("spec.egress[{}].to", rule.index),
    }
}
