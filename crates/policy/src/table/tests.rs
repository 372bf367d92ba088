//! Histories of policies: after each single change, every verdict is the old or the new one.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::{
    Interval, Protocol, SetName, Verdict, compile,
    tests::compiled::{ADDRESSES, PORTS, address, policy, rule, set_name},
};

/// Maps as the kernel has them.
#[derive(Default)]
struct Maps {
    peers: BTreeMap<Address, Runs>,
    ranges: BTreeMap<AddressRange, Runs>,
    intervals: BTreeMap<u32, Interval>,
    peers_room: usize,
    intervals_room: u32,
}

/// The kernel: maps in force, those that are being filled, and the directions.
#[derive(Default)]
struct Kernel {
    maps: Maps,
    next: Option<Maps>,
    enforced: Directions,
}

impl Kernel {
    fn apply(&mut self, operation: Operation) {
        let maps = self.next.as_mut().unwrap_or(&mut self.maps);
        match operation {
            Operation::NewMaps { peers, intervals } => {
                let room = (peers as usize, intervals);
                self.next = Some(Maps { peers_room: room.0, intervals_room: room.1, ..Maps::default() });
            }
            Operation::Interval(slot, interval) => {
                assert!(slot < maps.intervals_room);
                assert!(maps.intervals.insert(slot, interval).is_none(), "slot {slot} had an interval");
            }
            Operation::SetPeer(address, runs) => drop(maps.peers.insert(address, runs)),
            Operation::RemovePeer(address) => assert!(maps.peers.remove(&address).is_some()),
            Operation::SetRange(range, runs) => drop(maps.ranges.insert(range, runs)),
            Operation::RemoveRange(range) => assert!(maps.ranges.remove(&range).is_some()),
            Operation::Enforce(directions) => {
                if let Some(next) = self.next.take() {
                    self.maps = next;
                }
                self.enforced = directions;
            }
        }
        assert!(self.maps.peers.len() <= self.maps.peers_room);
    }

    /// The verdict as the programs find it.
    fn verdict(&self, direction: Direction, peer: Address, protocol: Protocol, port: u16) -> Verdict {
        if !self.enforced.has(direction) {
            return Verdict::Allow;
        }
        let bits = u128::from_be_bytes(peer.octets());
        let has = |range: &AddressRange| {
            let shift = 128 - u32::from(range.fixed_bits());
            let first = u128::from_be_bytes(range.first().octets());
            shift == 128 || bits >> shift == first >> shift
        };
        let ranges = self.maps.ranges.iter().filter(|(range, _)| has(range));
        let narrowest = || ranges.max_by_key(|(range, _)| range.fixed_bits()).map(|(_, runs)| *runs);
        let runs = self.maps.peers.get(&peer).copied().or_else(narrowest).unwrap_or_default();
        let run = if direction == Direction::Ingress { runs.ingress } else { runs.egress };
        let slots = run.first..run.first + u32::from(run.length);
        let mut intervals =
            slots.map(|slot| self.maps.intervals.get(&slot).expect("an interval at each slot of a run"));
        let found = intervals.find(|i| i.protocol == protocol && i.first <= port && port <= i.last);
        found.map_or(Verdict::Deny, |interval| interval.decision.verdict)
    }
}

type Tuple = (Direction, Address, Protocol, u16);

fn tuples() -> Vec<Tuple> {
    let peers = || (0..ADDRESSES.len()).map(address);
    let of_direction = |direction| {
        let with_port = move |peer, protocol| PORTS.into_iter().map(move |port| (direction, peer, protocol, port));
        peers().flat_map(move |peer| Protocol::ALL.into_iter().flat_map(move |protocol| with_port(peer, protocol)))
    };
    Direction::BOTH.into_iter().flat_map(of_direction).collect()
}

fn policies() -> impl Strategy<Value = Compiled> {
    let sets = prop::collection::vec(prop::collection::btree_set(0..ADDRESSES.len(), 0..6), 3);
    let directions = any::<(bool, bool)>().prop_map(|(ingress, egress)| Directions { ingress, egress });
    (directions, prop::collection::vec(rule(), 0..6), sets).prop_map(|(directions, rules, sets)| {
        let members = |set: &BTreeSet<usize>| set.iter().map(|&index| address(index)).collect();
        let sets: BTreeMap<SetName, Vec<Address>> =
            sets.iter().enumerate().map(|(index, set)| (set_name(index), members(set))).collect();
        compile(&policy(directions, rules), |set| sets[&set].clone())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 256 }))]

    #[test]
    fn each_verdict_changes_once_and_to_the_new_one(history in prop::collection::vec((policies(), 0..8_u8), 1..6)) {
        let (mut table, mut kernel) = (PolicyTable::default(), Kernel::default());
        let tuples = tuples();
        let verdicts = |kernel: &Kernel| -> Vec<Verdict> {
            let verdict = |&(direction, peer, protocol, port): &Tuple| kernel.verdict(direction, peer, protocol, port);
            tuples.iter().map(verdict).collect()
        };
        let mut last = verdicts(&kernel);
        for (compiled, chance) in history {
            if chance == 0 {
                table.forget();
            }
            let new: Vec<Verdict> = tuples
                .iter()
                .map(|&(direction, peer, protocol, port)| compiled.verdict(direction, peer, protocol, port).verdict)
                .collect();
            let mut before = last.clone();
            for operation in table.plan(&compiled).unwrap() {
                kernel.apply(operation);
                let now = verdicts(&kernel);
                for (tuple, ((before, now), new)) in tuples.iter().zip(before.iter().zip(&now).zip(&new)) {
                    prop_assert!(now == before || now == new, "{tuple:?} {operation:?}: {before:?} {now:?} {new:?}");
                }
                before = now;
            }
            last = verdicts(&kernel);
            prop_assert_eq!(&last, &new);
            // The same policy again changes nothing.
            prop_assert_eq!(table.plan(&compiled).unwrap(), []);
        }
    }
}

/// A policy that allows a set of so many addresses.
fn open_to(addresses: u32) -> Compiled {
    let mut allowing = policy(Directions { ingress: true, egress: false }, Vec::new());
    allowing.rules.push(crate::PodRule {
        direction: Direction::Ingress,
        tier: crate::Tier::NetworkPolicy,
        action: crate::Action::Accept,
        source: "".into(),
        ports: crate::PodPorts::All,
        peers: crate::PodPeers::Some { sets: [set_name(0)].into(), blocks: [].into() },
    });
    let all = (0..addresses).map(|n| Address::from(std::net::IpAddr::from((0x0a00_0000 + n).to_be_bytes())));
    compile(&allowing, |set| if set == set_name(0) { all.clone().collect() } else { Vec::new() })
}

#[test]
fn a_label_change_is_one_element() {
    let mut table = PolicyTable::default();
    assert!(table.plan(&open_to(10_000)).unwrap().len() > 10_000);
    let more = table.plan(&open_to(10_001)).unwrap();
    assert!(matches!(more[..], [Operation::SetPeer(..)]), "{more:?}");
    let fewer = table.plan(&open_to(10_000)).unwrap();
    assert!(matches!(fewer[..], [Operation::RemovePeer(..)]), "{fewer:?}");
}

#[test]
fn maps_grow_by_new_ones() {
    let mut table = PolicyTable::default();
    table.plan(&open_to(10)).unwrap();
    let more = table.plan(&open_to(65)).unwrap();
    assert!(matches!(more[0], Operation::NewMaps { peers: 256, .. }), "{:?}", more[0]);
    assert_eq!(table.plan(&open_to(PEERS_MAX + 1)), Err(PolicyTooLarge::Peers(PEERS_MAX as usize + 1)));
    assert_eq!(table.plan(&open_to(65)).unwrap(), []);
}

/// A policy that does not fit leaves nothing behind that is taken as written.
#[test]
fn after_a_policy_that_does_not_fit_the_next_one_is_written_as_a_whole() {
    let mut table = PolicyTable::default();
    table.plan(&open_to(10)).unwrap();
    let mut large = open_to(10);
    let interval = |first: u16, rule: u32| Interval {
        protocol: Protocol::Tcp,
        first,
        last: first,
        decision: crate::Decision { verdict: Verdict::Allow, reason: crate::Reason::Rule(rule) },
    };
    // Runs of 4,000 intervals, each another one, for as many classes as fill the map.
    let runs = INTERVALS_MAX / 4_000 + 1;
    large.runs = (0..runs).map(|run| (0..4_000).map(|port| interval(port, run)).collect()).collect();
    large.classes = (0..runs).map(|run| crate::Class { ingress: run, egress: run }).collect();
    assert_eq!(table.plan(&large), Err(PolicyTooLarge::Intervals));
    assert!(matches!(table.plan(&open_to(10)).unwrap()[0], Operation::NewMaps { .. }));
}
