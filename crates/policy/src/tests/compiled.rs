//! Compiled policies against the rules read one by one, with all tiers and actions.

use std::collections::BTreeMap;

use cproxy_core::{Address, AddressRange, ObjectName, parse_address};
use proptest::prelude::*;

use crate::{
    Action, Compiled, Decision, Direction, Directions, IpBlock, PodPeers, PodPolicy, PodPorts, PodRule, PortRange,
    Protocol, RUN_INTERVALS_MAX, Reason, SetName, SetReference, Tier, Verdict, compile,
};

pub(crate) const ADDRESSES: [&str; 11] = [
    "10.0.0.1",
    "10.0.0.2",
    "10.0.1.1",
    "10.1.0.1",
    "192.0.2.1",
    "192.0.2.2",
    "127.0.0.1",
    "fd00::1",
    "fd00:1::1",
    "2001:db8::1",
    "::1",
];
const RANGES: [&str; 12] = [
    "0.0.0.0/0",
    "10.0.0.0/8",
    "10.0.0.0/16",
    "10.0.0.0/24",
    "10.0.0.2/32",
    "192.0.2.0/24",
    "::/0",
    "fc00::/7",
    "fd00::/32",
    "fd00::1/128",
    "::/80",
    "10.1.0.1/32",
];
pub(crate) const PORTS: [u16; 7] = [0, 1, 80, 81, 443, 8080, 65_535];

pub(crate) fn address(index: usize) -> Address {
    parse_address(ADDRESSES[index]).unwrap()
}

pub(crate) fn set_name(index: usize) -> SetName {
    SetName::parse(&format!("{index:032x}")).unwrap()
}

fn block() -> impl Strategy<Value = IpBlock> {
    (0..RANGES.len(), prop::collection::vec(0..RANGES.len(), 0..3)).prop_map(|(cidr, except)| {
        let range = |index: usize| AddressRange::parse(RANGES[index]).unwrap();
        let cidr = range(cidr);
        let parts = except.into_iter().map(range).filter(|part| cidr.covers(part) && *part != cidr);
        IpBlock { cidr, except: parts.collect() }
    })
}

fn ports() -> impl Strategy<Value = PodPorts> {
    let range = (0..3_usize, 0..PORTS.len(), 0..PORTS.len()).prop_map(|(protocol, a, b)| PortRange {
        protocol: Protocol::ALL[protocol],
        first: PORTS[a.min(b)],
        last: PORTS[a.max(b)],
    });
    prop_oneof![
        1 => Just(PodPorts::All),
        3 => prop::collection::vec(range, 1..4).prop_map(|ranges| PodPorts::Some(ranges.into())),
    ]
}

pub(crate) fn rule() -> impl Strategy<Value = PodRule> {
    let peers = prop_oneof![
        1 => Just(PodPeers::All),
        6 => (prop::collection::btree_set(0..3_usize, 0..3), prop::collection::vec(block(), 0..3), 0..3).prop_map(
            |(sets, blocks, form)| {
                let (sets, blocks) = (sets.into_iter().map(set_name).collect(), blocks.into());
                if form == 0 { PodPeers::InBlocks { sets, blocks } } else { PodPeers::Some { sets, blocks } }
            },
        ),
    ];
    let tier =
        prop_oneof![(0..2_u16).prop_map(Tier::Admin), Just(Tier::NetworkPolicy), (0..2_u16).prop_map(Tier::Baseline)];
    (any::<bool>(), tier, 0..3_usize, ports(), peers).prop_map(|(is_ingress, tier, action, ports, peers)| PodRule {
        direction: if is_ingress { Direction::Ingress } else { Direction::Egress },
        tier,
        action: match tier {
            Tier::NetworkPolicy => Action::Accept,
            _ => [Action::Accept, Action::Deny, Action::Pass][action],
        },
        source: "".into(),
        ports,
        peers,
    })
}

/// Policy without NetworkPolicies in directions that none isolates, as the resolver makes it.
pub(crate) fn policy(isolated: Directions, mut rules: Vec<PodRule>) -> PodPolicy {
    rules.retain(|rule| rule.tier != Tier::NetworkPolicy || isolated.has(rule.direction));
    rules.sort_by_key(|rule| rule.tier);
    PodPolicy {
        node_name: Box::default(),
        name: ObjectName::new("shop", "web"),
        uid: "".into(),
        isolated,
        policies: Vec::new(),
        node_addresses: [address(4)].into(),
        own_addresses: [address(0)].into(),
        rules,
        sets: (0..3).map(|index| SetReference { name: set_name(index), slices: 1 }).collect(),
    }
}

/// Decision by the text of the rules.
fn expected(
    policy: &PodPolicy,
    sets: &BTreeMap<SetName, Vec<Address>>,
    (direction, peer, protocol, port): (Direction, Address, Protocol, u16),
) -> Decision {
    let always = [address(0), address(4), address(6), address(10)];
    if always.contains(&peer) {
        return Decision { verdict: Verdict::Allow, reason: Reason::Always };
    }
    let in_sets = |names: &[SetName]| names.iter().any(|name| sets[name].contains(&peer));
    let in_block =
        |block: &IpBlock| block.cidr.contains(peer) && !block.except.iter().any(|except| except.contains(peer));
    let has_peer = |rule: &PodRule| match &rule.peers {
        PodPeers::All => true,
        PodPeers::Some { sets, blocks } => in_sets(sets) || blocks.iter().any(in_block),
        PodPeers::InBlocks { sets, blocks } => in_sets(sets) && blocks.iter().any(in_block),
    };
    let has_port = |rule: &PodRule| match &rule.ports {
        PodPorts::All => true,
        PodPorts::Some(ranges) => ranges.iter().any(|range| range.contains(protocol, port)),
    };
    let rules = policy.rules.iter().zip(0..).filter(|(rule, _)| rule.direction == direction);
    let matching: Vec<_> = rules.filter(|(rule, _)| has_peer(rule) && has_port(rule)).collect();
    let first = |is_of_tier: fn(Tier) -> bool| matching.iter().find(|(rule, _)| is_of_tier(rule.tier));
    let decided = |verdict, id| Decision { verdict, reason: Reason::Rule(id) };
    let is_isolated = policy.isolated.has(direction);
    match first(|tier| matches!(tier, Tier::Admin(_))) {
        Some((rule, id)) if rule.action == Action::Accept => return decided(Verdict::Allow, *id),
        Some((rule, id)) if rule.action == Action::Deny => return decided(Verdict::Deny, *id),
        _ => {}
    }
    if is_isolated {
        return match first(|tier| tier == Tier::NetworkPolicy) {
            Some((_, id)) => decided(Verdict::Allow, *id),
            None => Decision { verdict: Verdict::Deny, reason: Reason::NoRule },
        };
    }
    match first(|tier| matches!(tier, Tier::Baseline(_))) {
        Some((rule, id)) if rule.action == Action::Accept => decided(Verdict::Allow, *id),
        Some((rule, id)) if rule.action == Action::Deny => decided(Verdict::Deny, *id),
        _ => Decision { verdict: Verdict::Allow, reason: Reason::NoRule },
    }
}

/// Checks that intervals are sorted, do not overlap, and could not be fewer.
fn check_runs(compiled: &Compiled) {
    for run in &compiled.runs {
        for pair in run.windows(2) {
            let key = |index: usize| (pair[index].protocol, pair[index].first);
            assert!(key(0) < key(1), "{run:?}");
            if pair[0].protocol == pair[1].protocol {
                assert!(pair[0].last < pair[1].first, "{run:?}");
                assert!(pair[0].last + 1 < pair[1].first || pair[0].decision != pair[1].decision, "{run:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 512 }))]

    #[test]
    fn each_verdict_is_that_of_the_rules_one_by_one(
        (ingress, egress) in any::<(bool, bool)>(),
        rules in prop::collection::vec(rule(), 0..8),
        sets in prop::collection::vec(prop::collection::btree_set(0..ADDRESSES.len(), 0..6), 3),
    ) {
        let policy = policy(Directions { ingress, egress }, rules);
        let members = |set: &std::collections::BTreeSet<usize>| set.iter().map(|&index| address(index)).collect();
        let sets: BTreeMap<SetName, Vec<Address>> =
            sets.iter().enumerate().map(|(index, set)| (set_name(index), members(set))).collect();
        let compiled = compile(&policy, |set| sets[&set].clone());
        check_runs(&compiled);
        prop_assert!(compiled.problems.is_empty());
        for direction in Direction::BOTH {
            for peer in (0..ADDRESSES.len()).map(address) {
                for protocol in Protocol::ALL {
                    for port in PORTS {
                        let found = compiled.verdict(direction, peer, protocol, port);
                        let expected = expected(&policy, &sets, (direction, peer, protocol, port));
                        prop_assert_eq!(found, expected, "{} {} {} {}", direction, peer, protocol, port);
                    }
                }
            }
        }
    }
}

#[test]
fn a_run_that_is_too_long_denies_all_and_is_reported() {
    let ranges = (0..=RUN_INTERVALS_MAX as u16).map(|index| PortRange::single(Protocol::Tcp, 1 + 2 * index));
    let rule = |ports, range: &str| PodRule {
        direction: Direction::Ingress,
        tier: Tier::NetworkPolicy,
        action: Action::Accept,
        source: "".into(),
        ports: PodPorts::Some(ports),
        peers: PodPeers::Some {
            sets: [].into(),
            blocks: [IpBlock { cidr: AddressRange::parse(range).unwrap(), except: [].into() }].into(),
        },
    };
    let rules = vec![
        rule(ranges.clone().collect(), "10.0.0.0/24"),
        rule(ranges.skip(1).collect(), "10.0.1.0/24"),
        rule([PortRange::single(Protocol::Tcp, 80)].into(), "10.1.0.0/16"),
    ];
    let compiled = compile(&policy(Directions { ingress: true, egress: false }, rules), |_| []);
    let verdict =
        |peer, port| compiled.verdict(Direction::Ingress, parse_address(peer).unwrap(), Protocol::Tcp, port).verdict;
    assert_eq!([verdict("10.0.0.2", 1), verdict("10.0.0.2", 3)], [Verdict::Deny; 2]);
    assert_eq!([verdict("10.0.1.2", 1), verdict("10.0.1.2", 3)], [Verdict::Deny, Verdict::Allow]);
    assert_eq!(verdict("10.1.0.2", 80), Verdict::Allow);
    assert_eq!(
        compiled.problems.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["PodPolicy shop/web: spec.rules: Ingress: the rules for some peers have more than 4095 ranges of ports; all \
             ports are denied to these peers"]
    );
    check_runs(&compiled);
}
