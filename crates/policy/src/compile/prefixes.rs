//! Ranges of addresses that rules tell apart, each with the rules that match all of its addresses but those of narrower
//! ranges.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use cproxy_core::{Address, AddressRange, Family, sorted_set};

use super::Matches;
use crate::pod_policy::PodPolicy;

/// Values of ranges of addresses, of which the narrowest range that has an address counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefixes<T> {
    ranges: BTreeMap<AddressRange, T>,
    /// Lengths of the ranges in bits, the longest first.
    lengths: Vec<u8>,
}

/// Blocks of rules by the ranges at which they begin and end to match.
#[derive(Default)]
struct Edge {
    begins: Vec<u32>,
    ends: Vec<u32>,
    is_always: bool,
}

/// Range with the blocks that match its addresses.
struct Level {
    range: AddressRange,
    blocks: Vec<u32>,
    is_always: bool,
}

impl<T> Prefixes<T> {
    pub(super) fn new(ranges: BTreeMap<AddressRange, T>) -> Self {
        let lengths = sorted_set(ranges.keys().map(AddressRange::fixed_bits));
        Self { ranges, lengths: lengths.into_iter().rev().collect() }
    }

    /// All ranges, sorted.
    pub fn iter(&self) -> impl Iterator<Item = (&AddressRange, &T)> {
        self.ranges.iter()
    }

    /// Value of the narrowest range that has an address.
    #[must_use]
    pub fn find(&self, address: Address) -> Option<&T> {
        self.lengths.iter().find_map(|&bits| self.ranges.get(&AddressRange::new(address, bits)))
    }
}

/// Ranges with the rules that match their addresses, beside the rules that match `everywhere`.
pub(super) fn matches(policy: &PodPolicy, everywhere: &[u32]) -> Prefixes<Matches> {
    let (edges, rules_of_blocks) = edges(policy);
    let mut result = BTreeMap::new();
    for family in [Family::V4, Family::V6] {
        // Ranges nest or are disjoint, and a wider one comes before those in it.
        let mut levels: Vec<Level> = Vec::new();
        for (&range, edge) in edges.iter().filter(|(range, _)| range.family() == family) {
            while levels.pop_if(|level| !level.range.covers(&range)).is_some() {}
            let level = level(range, edge, levels.last());
            let rules = level.blocks.iter().filter_map(|&block| rules_of_blocks.get(block as usize));
            let rules = rules.chain(everywhere).copied().collect();
            result.insert(range, Matches { is_always: level.is_always, rules });
            levels.push(level);
        }
    }
    Prefixes::new(result)
}

/// Blocks of a range below another.
fn level(range: AddressRange, edge: &Edge, above: Option<&Level>) -> Level {
    let mut blocks = above.map_or(Vec::new(), |above| above.blocks.clone());
    blocks.extend(&edge.begins);
    if !edge.ends.is_empty() {
        blocks.retain(|block| edge.ends.binary_search(block).is_err());
    }
    Level { range, blocks, is_always: edge.is_always || above.is_some_and(|above| above.is_always) }
}

/// Ranges that the policy names, and the rule of each block.
fn edges(policy: &PodPolicy) -> (BTreeMap<AddressRange, Edge>, Vec<u32>) {
    let mut edges: BTreeMap<AddressRange, Edge> = BTreeMap::new();
    for range in always(policy) {
        edges.entry(range).or_default().is_always = true;
    }
    let mut rules_of_blocks = Vec::new();
    for (rule, id) in policy.rules.iter().zip(0..) {
        for block in rule.peers.blocks() {
            let number = rules_of_blocks.len() as u32;
            rules_of_blocks.push(id);
            edges.entry(block.cidr).or_default().begins.push(number);
            for except in &block.except {
                edges.entry(*except).or_default().ends.push(number);
            }
        }
    }
    // By its bits a range of IPv6 may have the addresses of IPv4: they get a range of their own.
    let v4 = AddressRange::new(Address::from(IpAddr::V4(Ipv4Addr::UNSPECIFIED)), 96);
    let has_v4 = |range: &AddressRange| {
        range.fixed_bits() < v4.fixed_bits() && AddressRange::new(v4.first(), range.fixed_bits()) == *range
    };
    if edges.keys().any(has_v4) {
        edges.entry(v4).or_default();
    }
    (edges, rules_of_blocks)
}

/// Ranges that are always allowed: those of the pod itself and of its node.
fn always(policy: &PodPolicy) -> impl Iterator<Item = AddressRange> {
    let loopback = [
        AddressRange::new(Address::from(IpAddr::V4(Ipv4Addr::LOCALHOST)), 96 + 8),
        AddressRange::new(Address::from(IpAddr::V6(Ipv6Addr::LOCALHOST)), 128),
    ];
    let addresses = policy.node_addresses.iter().chain(&policy.own_addresses);
    loopback.into_iter().chain(addresses.map(|&address| AddressRange::new(address, 128)))
}
