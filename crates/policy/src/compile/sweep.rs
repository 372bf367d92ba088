//! Rules to disjoint intervals of ports, in the order of the tiers.

use std::collections::{BTreeMap, BTreeSet};

use cproxy_core::sorted_map;

use super::{Decision, Interval, Reason, Verdict};
use crate::{
    model::{Action, Direction, PortRange, Protocol, Tier},
    pod_policy::PodRule,
};

/// Rules that begin and end to match at a port.
#[derive(Default)]
struct Edge {
    begins: Vec<u32>,
    ends: Vec<u32>,
}

/// Decision where no rule matches.
pub(super) fn default(is_isolated: bool) -> Decision {
    let verdict = if is_isolated { Verdict::Deny } else { Verdict::Allow };
    Decision { verdict, reason: Reason::NoRule }
}

/// One decision about all ports.
pub(super) fn all(decision: Decision) -> Vec<Interval> {
    Protocol::ALL.map(|protocol| Interval { protocol, first: 0, last: u16::MAX, decision }).into()
}

/// Intervals in which these rules decide otherwise than without rules.
pub(super) fn intervals(rules: &[PodRule], ids: &[u32], direction: Direction, is_isolated: bool) -> Vec<Interval> {
    let rule = |id: u32| rules.get(id as usize).filter(|rule| rule.direction == direction).map(|rule| (id, rule));
    let rules = sorted_map(ids.iter().filter_map(|&id| rule(id)));
    let ranges: Vec<_> =
        rules.iter().flat_map(|(&id, rule)| rule.ranges().into_iter().map(move |range| (range, id))).collect();
    let mut intervals = Vec::new();
    for protocol in Protocol::ALL {
        let ranges = ranges.iter().filter(|(range, _)| range.protocol == protocol);
        sweep(protocol, ranges, |active| decide(&rules, active, is_isolated), &mut intervals);
    }
    intervals
}

/// Adds the intervals of one protocol.
fn sweep<'a>(
    protocol: Protocol,
    ranges: impl Iterator<Item = &'a (PortRange, u32)>,
    decide: impl Fn(&BTreeSet<u32>) -> Decision,
    intervals: &mut Vec<Interval>,
) {
    let mut edges: BTreeMap<u32, Edge> = BTreeMap::new();
    for &(PortRange { first, last, .. }, id) in ranges {
        edges.entry(first.into()).or_default().begins.push(id);
        edges.entry(u32::from(last) + 1).or_default().ends.push(id);
    }
    // A rule may have a port several times.
    let mut depths: BTreeMap<u32, usize> = BTreeMap::new();
    let mut active = BTreeSet::new();
    let nexts: Vec<u32> = edges.keys().skip(1).copied().collect();
    for ((first, edge), next) in edges.into_iter().zip(nexts) {
        for id in edge.begins {
            *depths.entry(id).or_default() += 1;
            active.insert(id);
        }
        for id in edge.ends {
            let depth = depths.entry(id).or_default();
            *depth = depth.saturating_sub(1);
            if *depth == 0 {
                active.remove(&id);
            }
        }
        let (Ok(first), Ok(last)) = (u16::try_from(first), u16::try_from(next - 1)) else { continue };
        push(Interval { protocol, first, last, decision: decide(&active) }, intervals);
    }
}

/// Adds an interval, as a part of the one before if that has the same decision.
fn push(interval: Interval, intervals: &mut Vec<Interval>) {
    if interval.decision.reason == Reason::NoRule {
        return;
    }
    if let Some(before) = intervals.last_mut()
        && before.protocol == interval.protocol
        && before.decision == interval.decision
        && u32::from(before.last) + 1 == u32::from(interval.first)
    {
        before.last = interval.last;
        return;
    }
    intervals.push(interval);
}

/// Decision of the rules that match, in the order of their ids, which is that of the tiers.
fn decide(rules: &BTreeMap<u32, &PodRule>, matching: &BTreeSet<u32>, is_isolated: bool) -> Decision {
    let mut is_passed = false;
    for (&id, rule) in matching.iter().filter_map(|id| rules.get_key_value(id)) {
        let is_in_force = match rule.tier {
            Tier::Admin(_) => !is_passed,
            Tier::NetworkPolicy => true,
            Tier::Baseline(_) => !is_isolated,
        };
        let decided = |verdict| Decision { verdict, reason: Reason::Rule(id) };
        match rule.action {
            _ if !is_in_force => {}
            Action::Accept => return decided(Verdict::Allow),
            Action::Deny => return decided(Verdict::Deny),
            // There is no tier after the last.
            Action::Pass if matches!(rule.tier, Tier::Baseline(_)) => break,
            Action::Pass => is_passed = true,
        }
    }
    default(is_isolated)
}
