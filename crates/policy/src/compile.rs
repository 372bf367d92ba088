//! Policies of pods in the form that the kernel looks up: an address has a class, a class has a run of port intervals
//! for each direction, and an interval has a final verdict.

mod prefixes;
mod sweep;

use std::collections::BTreeMap;

use cproxy_core::{Address, Problem, sorted_map};

pub use self::prefixes::Prefixes;
use crate::{
    address_set::SetName,
    model::{Direction, Directions, Protocol},
    pod_policy::{PodPeers, PodPolicy},
};

/// Intervals of a run, at most: its length has 12 bits in the kernel.
pub const RUN_INTERVALS_MAX: usize = 4_095;

/// Whether traffic is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// It is.
    Allow,
    /// It is not.
    Deny,
}

/// Reason of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The peer is the pod itself or its node.
    Always,
    /// Rule of the pod's policy with this id.
    Rule(u32),
    /// No rule matches: isolation denies, and without isolation it is allowed.
    NoRule,
}

/// Verdict with its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Decision {
    /// Whether the traffic is allowed.
    pub verdict: Verdict,
    /// Reason of the verdict.
    pub reason: Reason,
}

/// Ports of a protocol with the same decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Interval {
    /// Protocol of the ports.
    pub protocol: Protocol,
    /// First port.
    pub first: u16,
    /// Last port.
    pub last: u16,
    /// Decision about all of them.
    pub decision: Decision,
}

/// Runs of the addresses that the same rules match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Class {
    /// Index of the run for traffic to the pod.
    pub ingress: u32,
    /// Index of the run for traffic from the pod.
    pub egress: u32,
}

/// Policy of a pod as the kernel looks it up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// Directions in which all is denied that no interval allows. In the others all is allowed that none denies.
    pub isolated: Directions,
    /// Classes of single addresses.
    pub singles: BTreeMap<Address, u32>,
    /// Classes of ranges of addresses.
    pub prefixes: Prefixes<u32>,
    /// Class of all other addresses.
    pub default_class: u32,
    /// Classes by number.
    pub classes: Vec<Class>,
    /// Runs of sorted intervals that do not overlap, each run once.
    pub runs: Vec<Box<[Interval]>>,
    /// Runs that would be too long.
    pub problems: Vec<Problem>,
}

/// Rules that match an address, or that it is always allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Matches {
    is_always: bool,
    /// Sorted ids.
    rules: Vec<u32>,
}

/// Compiles a pod's policy. `addresses` returns those of a set, and must know all sets that the policy names.
pub fn compile<I: IntoIterator<Item = Address>>(policy: &PodPolicy, addresses: impl Fn(SetName) -> I) -> Compiled {
    let mut compiler = Compiler::new(policy);
    let everywhere = compiler.rules_of(|peers| matches!(peers, PodPeers::All));
    compiler.compiled.default_class = compiler.class(&Matches { is_always: false, rules: everywhere.clone() });
    let prefixes = prefixes::matches(policy, &everywhere);
    let classes = prefixes.iter().map(|(range, matches)| (*range, compiler.class(&compiler.outside_sets(matches))));
    let classes: Vec<_> = classes.collect();
    compiler.compiled.prefixes = Prefixes::new(sorted_map(classes));
    compiler.add_singles(&prefixes, &everywhere, addresses);
    compiler.compiled
}

struct Compiler<'a> {
    policy: &'a PodPolicy,
    compiled: Compiled,
    /// Classes that there are.
    classes: BTreeMap<Matches, u32>,
    /// Runs that there are.
    runs: BTreeMap<Box<[Interval]>, u32>,
}

impl<'a> Compiler<'a> {
    fn new(policy: &'a PodPolicy) -> Self {
        let compiled = Compiled {
            isolated: policy.isolated,
            singles: BTreeMap::new(),
            prefixes: Prefixes::new(BTreeMap::new()),
            default_class: 0,
            classes: Vec::new(),
            runs: Vec::new(),
            problems: Vec::new(),
        };
        Self { policy, compiled, classes: BTreeMap::new(), runs: BTreeMap::new() }
    }

    /// Ids of the rules with such peers.
    fn rules_of(&self, has: impl Fn(&PodPeers) -> bool) -> Vec<u32> {
        self.policy.rules.iter().zip(0..).filter(|(rule, _)| has(&rule.peers)).map(|(_, id)| id).collect()
    }

    /// Gives each address of the sets its class.
    fn add_singles<I: IntoIterator<Item = Address>>(
        &mut self,
        prefixes: &Prefixes<Matches>,
        everywhere: &[u32],
        addresses: impl Fn(SetName) -> I,
    ) {
        let mut members: Vec<(Address, usize)> = Vec::new();
        let mut rules_of_sets = Vec::new();
        for (index, set) in self.policy.sets.iter().enumerate() {
            members.extend(addresses(set.name).into_iter().map(|address| (address, index)));
            rules_of_sets.push(self.rules_of(|peers| peers.sets().contains(&set.name)));
        }
        members.sort_unstable();
        members.dedup();
        // Many addresses are in the same sets and range.
        let mut known: BTreeMap<(Vec<usize>, Matches), u32> = BTreeMap::new();
        for same in members.chunk_by(|a, b| a.0 == b.0) {
            let Some(&(address, _)) = same.first() else { continue };
            let sets: Vec<_> = same.iter().map(|member| member.1).collect();
            let outside = || Matches { is_always: false, rules: everywhere.to_vec() };
            let key = (sets, prefixes.find(address).cloned().unwrap_or_else(outside));
            let class = known.get(&key).copied().unwrap_or_else(|| {
                let of_sets = key.0.iter().filter_map(|&set| rules_of_sets.get(set)).flatten();
                let mut matches = self.outside_sets(&key.1);
                matches.rules.extend(of_sets.filter(|id| !self.is_in_blocks(**id) || key.1.rules.contains(id)));
                let class = self.class(&matches);
                known.insert(key, class);
                class
            });
            self.compiled.singles.insert(address, class);
        }
    }

    /// Matches of the addresses of a range that are in no set.
    fn outside_sets(&self, of_range: &Matches) -> Matches {
        let rules = of_range.rules.iter().copied().filter(|&id| !self.is_in_blocks(id)).collect();
        Matches { is_always: of_range.is_always, rules }
    }

    /// Whether a rule is about the addresses of sets that are in its ranges.
    fn is_in_blocks(&self, id: u32) -> bool {
        let rule = self.policy.rules.get(id as usize);
        rule.is_some_and(|rule| matches!(rule.peers, PodPeers::InBlocks { .. }))
    }

    /// The class of addresses that these rules match.
    fn class(&mut self, matches: &Matches) -> u32 {
        let mut matches = matches.clone();
        if matches.is_always {
            matches.rules.clear();
        }
        matches.rules.sort_unstable();
        matches.rules.dedup();
        if let Some(&class) = self.classes.get(&matches) {
            return class;
        }
        let [ingress, egress] = Direction::BOTH.map(|direction| self.run(direction, &matches));
        let class = self.compiled.classes.len() as u32;
        self.compiled.classes.push(Class { ingress, egress });
        self.classes.insert(matches, class);
        class
    }

    fn run(&mut self, direction: Direction, matches: &Matches) -> u32 {
        let is_isolated = self.policy.isolated.has(direction);
        let mut intervals = if matches.is_always {
            sweep::all(Decision { verdict: Verdict::Allow, reason: Reason::Always })
        } else {
            sweep::intervals(&self.policy.rules, &matches.rules, direction, is_isolated)
        };
        if intervals.len() > RUN_INTERVALS_MAX {
            self.report(direction);
            intervals = sweep::all(Decision { verdict: Verdict::Deny, reason: Reason::NoRule });
        }
        let intervals: Box<[Interval]> = intervals.into();
        if let Some(&run) = self.runs.get(&intervals) {
            return run;
        }
        let run = self.compiled.runs.len() as u32;
        self.compiled.runs.push(intervals.clone());
        self.runs.insert(intervals, run);
        run
    }

    fn report(&mut self, direction: Direction) {
        let message = format!(
            "{direction}: the rules for some peers have more than {RUN_INTERVALS_MAX} ranges of ports; all ports are \
             denied to these peers"
        );
        let problem = Problem::new(format_args!("PodPolicy {}", self.policy.name), "spec.rules", message);
        if !self.compiled.problems.contains(&problem) {
            self.compiled.problems.push(problem);
        }
    }
}

impl Compiled {
    /// The decision about traffic of a peer, as the kernel makes it. The port is the pod's own for ingress, and the
    /// peer's for egress.
    #[must_use]
    pub fn verdict(&self, direction: Direction, peer: Address, protocol: Protocol, port: u16) -> Decision {
        let prefix = || self.prefixes.find(peer).copied();
        let class = self.singles.get(&peer).copied().or_else(prefix).unwrap_or(self.default_class);
        let class = self.classes.get(class as usize);
        let run = class.and_then(|class| {
            let run = match direction {
                Direction::Ingress => class.ingress,
                Direction::Egress => class.egress,
            };
            self.runs.get(run as usize)
        });
        let run = run.map_or(&[][..], |run| &**run);
        let after = run.partition_point(|interval| (interval.protocol, interval.first) <= (protocol, port));
        let interval = after.checked_sub(1).and_then(|at| run.get(at));
        let decision = interval.filter(|interval| interval.protocol == protocol && port <= interval.last);
        decision.map_or(sweep::default(self.isolated.has(direction)), |interval| interval.decision)
    }
}
