//! The maps of the table in memory, written as the agent writes them, and damaged as no agent would.

use std::collections::BTreeMap;

use cproxy_core::{Address, Capacity, Family, Filter, Frontend, Op, Protocol, Row, affinity_id};
use cproxy_datapath::bpf::{TableError, TableMaps};
use cproxy_ebpf::{
    Affinity, Backend as BackendSlot, EXCLUDED_CGROUPS_MAX, EXCLUSIONS_MAX, ExcludedCgroup, FrontendKey, PROTOCOL_ANY,
    PROTOCOL_TCP, PROTOCOL_UDP, Set, SetId, SetWord, Settings, digest, filter_bit,
};

const EMPTY_SET: Set = Set { word: 0, affinity: 0 };
const EMPTY_SLOT: BackendSlot = BackendSlot { address: [0; 4], port: 0, counter: 0, digest: 0 };

/// The maps, as a pin directory has them.
#[derive(Debug)]
pub struct SimulatedMaps {
    /// By the bytes of the key.
    frontends: BTreeMap<[u8; 20], SetId>,
    sets: Vec<Set>,
    backends: Vec<BackendSlot>,
    filter: Filter,
    frontends_capacity: u32,
}

impl SimulatedMaps {
    /// Empty maps of this size.
    pub fn new(capacity: Capacity) -> Self {
        Self {
            frontends: BTreeMap::new(),
            sets: vec![EMPTY_SET; capacity.sets as usize],
            backends: vec![EMPTY_SLOT; capacity.slots as usize],
            filter: Filter::default(),
            frontends_capacity: capacity.frontends,
        }
    }

    /// Carries out operations as the agent does, and fails where the kernel would.
    pub fn apply(&mut self, ops: &[Op]) {
        ops.iter().for_each(|op| self.apply_one(op));
    }

    fn apply_one(&mut self, op: &Op) {
        match op {
            Op::WriteBackends { first_slot, members, .. } => {
                let (eligible, kept) = (run(members.eligible()), run(members.kept()));
                let slots = &mut self.backends[*first_slot as usize..][..eligible.len() + kept.len()];
                slots.copy_from_slice(&[eligible, kept].concat());
            }
            Op::PublishSet { set, first_slot, eligible, serving, drops } => {
                self.sets[*set as usize].word = SetWord::new(*first_slot, *eligible, *serving, *drops).0;
            }
            Op::SetAffinity { set, affinity } => {
                self.sets[*set as usize].affinity = Affinity::new(affinity.id, affinity.seconds).0;
            }
            Op::PutFrontend { frontend, set } => self.put(key(*frontend), *set),
            Op::PutAddress(address) => self.put(address_key(*address), 0),
            Op::DeleteFrontend { frontend } => drop(self.frontends.remove(&bytes(key(*frontend)))),
            Op::DeleteAddress(address) => drop(self.frontends.remove(&bytes(address_key(*address)))),
            Op::SetFilter(filter) => self.filter = *filter,
            Op::ReplaceFrontends { capacity, frontends, addresses } => {
                self.frontends_capacity = *capacity;
                self.frontends.clear();
                frontends.iter().for_each(|&(frontend, set)| self.put(key(frontend), set));
                addresses.iter().for_each(|&address| self.put(address_key(address), 0));
            }
            Op::ResizeSets(capacity) => self.sets.resize(*capacity as usize, EMPTY_SET),
            Op::ResizeBackends(capacity) => self.backends.resize(*capacity as usize, EMPTY_SLOT),
            Op::RaiseEpoch | Op::Drain => {}
            Op::SetSeed(_)
            | Op::SetBalance(_)
            | Op::SetExclusions(_)
            | Op::SetOwnAddresses(_)
            | Op::FreeTcpPlaces(_)
            | Op::GrowTcpPlaces
            | Op::ShrinkTcpPlaces => {
                panic!("{op:?} is not planned")
            }
        }
    }

    fn put(&mut self, key: FrontendKey, set: SetId) {
        self.frontends.insert(bytes(key), set);
        assert!(self.frontends.len() <= self.frontends_capacity as usize, "the map of frontends is full");
    }

    /// Writes something that no agent writes: the first byte selects what, the others where and what.
    pub fn damage(&mut self, [what, first, second, third]: [u8; 4]) {
        let (sets, slots) = (self.sets.len(), self.backends.len());
        let place = usize::from(u16::from_le_bytes([first, second]));
        let nth = self.frontends.keys().nth(usize::from(first) % self.frontends.len().max(1)).copied();
        match what % 8 {
            0 => {
                let (set, shift) = (&mut self.sets[place / 16 % sets], place % 8 * 8);
                let word = if place / 8 % 2 == 0 { &mut set.word } else { &mut set.affinity };
                *word ^= u64::from(third) << shift;
            }
            1 => {
                let (slot, field) = (&mut self.backends[place / 24 % slots], place % 24);
                match field {
                    0..16 => slot.address[field / 4] ^= u32::from(third) << (field % 4 * 8),
                    16..18 => slot.port ^= u16::from(third) << (field % 2 * 8),
                    18..20 => slot.counter ^= u16::from(third) << (field % 2 * 8),
                    _ => slot.digest ^= u32::from(third) << (field % 4 * 8),
                }
            }
            2 => {
                let filter = if second & 8 == 0 { &mut self.filter.v4 } else { &mut self.filter.v6 };
                *filter ^= u64::from(third) << (second % 8 * 8);
            }
            3 => {
                if let Some(set) = nth.and_then(|key| self.frontends.get_mut(&key)) {
                    *set ^= u32::from(third) << (second % 4 * 8);
                }
            }
            // Another key, with a set of its own choice, as long as there is room.
            4 if self.frontends.len() < self.frontends_capacity as usize => {
                let mut key = nth.unwrap_or_default();
                key[usize::from(second) % key.len()] ^= third;
                self.frontends.insert(key, u32::from(first) % 8);
            }
            5 => drop(nth.and_then(|key| self.frontends.remove(&key))),
            6 => self.sets[usize::from(first) % sets] = self.sets[usize::from(second) % sets],
            7 => {
                self.sets[usize::from(first) % sets].word =
                    SetWord::new(second.into(), u16::from(third & 15), u16::from(third >> 4), false).0;
            }
            _ => {}
        }
    }

    /// Checks that a program finds just what these rows say, whatever it looks up.
    pub fn check(&self, rows: &[Row], cluster_ips: &[Address]) {
        let keys = rows.iter().map(|row| key(row.frontend)).chain(cluster_ips.iter().map(|ip| address_key(*ip)));
        let expected: std::collections::BTreeSet<_> = keys.map(bytes).collect();
        assert!(self.frontends.keys().eq(&expected), "there are the keys {:?}, not {expected:?}", self.frontends);
        assert_eq!(self.sets[0], EMPTY_SET, "other ports of a ClusterIP are refused");
        for address in cluster_ips {
            assert_eq!(self.frontends[&bytes(address_key(*address))], 0, "{address}");
        }
        for row in rows {
            let set = self.sets[self.frontends[&bytes(key(row.frontend))] as usize];
            let word = SetWord(set.word);
            let slots = &self.backends[word.first_slot() as usize..];
            let found =
                [&slots[..word.eligible() as usize], &slots[word.eligible() as usize..][..word.serving() as usize]];
            assert_eq!(found, [run(row.backends()), run(row.kept())], "{row:#?}");
            assert_eq!(word.drops(), row.members.drops, "{row:#?}");
            assert_eq!(Affinity(set.affinity), affinity(row), "{row:#?}");
        }
        let bits = |family: Family| {
            let addresses = rows.iter().map(|row| row.frontend.address).chain(cluster_ips.iter().copied());
            let of_family = addresses.filter(|address| address.family() == family);
            of_family.fold(0, |bits, address| bits | filter_bit(&address.words()))
        };
        assert_eq!(self.filter, Filter { v4: bits(Family::V4), v6: bits(Family::V6) });
    }
}

impl TableMaps for SimulatedMaps {
    fn capacity(&self) -> Capacity {
        let [sets, slots] = [self.sets.len(), self.backends.len()].map(|length| length as u32);
        Capacity { frontends: self.frontends_capacity, sets, slots }
    }

    fn settings(&self) -> Result<Settings, TableError> {
        let Filter { v4: filter_v4, v6: filter_v6 } = self.filter;
        Ok(Settings {
            seed: 0,
            filter_v4,
            filter_v6,
            balance: 0,
            excluded_cgroup_count: 0,
            excluded_uid_count: 0,
            excluded_port_count: 0,
            epoch: 0,
            excluded_cgroups: [ExcludedCgroup { id: 0, level: 0, kind: 0 }; EXCLUDED_CGROUPS_MAX],
            excluded_uids: [0; EXCLUSIONS_MAX],
            excluded_ports: [0; EXCLUSIONS_MAX],
        })
    }

    fn frontends(&self) -> Result<Vec<(FrontendKey, SetId)>, TableError> {
        Ok(self.frontends.iter().map(|(bytes, set)| (key_of(bytes), *set)).collect())
    }

    fn set(&self, set: SetId) -> Result<Option<Set>, TableError> {
        Ok(self.sets.get(set as usize).copied())
    }

    fn backends(&self, first_slot: u32, count: u32) -> Result<Vec<BackendSlot>, TableError> {
        let slots = self.backends.get(first_slot as usize..).and_then(|slots| slots.get(..count as usize));
        Ok(slots.expect("it reads inside the map").to_vec())
    }
}

fn key(frontend: Frontend) -> FrontendKey {
    let protocol = if frontend.protocol == Protocol::Tcp { PROTOCOL_TCP } else { PROTOCOL_UDP };
    FrontendKey { address: frontend.address.words(), port: frontend.port.to_be(), protocol, zero: 0 }
}

fn address_key(address: Address) -> FrontendKey {
    FrontendKey { address: address.words(), port: 0, protocol: PROTOCOL_ANY, zero: 0 }
}

fn bytes(key: FrontendKey) -> [u8; 20] {
    let mut bytes = [0; 20];
    let FrontendKey { address, port, protocol, zero } = key;
    bytes[..16].copy_from_slice(&address.map(u32::to_ne_bytes).concat());
    bytes[16..18].copy_from_slice(&port.to_ne_bytes());
    bytes[18..].copy_from_slice(&[protocol, zero]);
    bytes
}

fn key_of(bytes: &[u8; 20]) -> FrontendKey {
    let word = |index: usize| u32::from_ne_bytes(*bytes[index * 4..].first_chunk().unwrap());
    FrontendKey {
        address: [word(0), word(1), word(2), word(3)],
        port: u16::from_ne_bytes([bytes[16], bytes[17]]),
        protocol: bytes[18],
        zero: bytes[19],
    }
}

/// A run as programs search it: by digest.
fn run(backends: &[cproxy_core::Backend]) -> Vec<BackendSlot> {
    let slot = |backend: &cproxy_core::Backend| {
        let (address, port) = (backend.address.words(), backend.port.to_be());
        BackendSlot { address, port, counter: 0, digest: digest(&address, port) }
    };
    let mut slots: Vec<_> = backends.iter().map(slot).collect();
    slots.sort_by_key(|slot| slot.digest);
    slots
}

fn affinity(row: &Row) -> Affinity {
    row.session_affinity_seconds.map_or(Affinity::NONE, |seconds| {
        let Frontend { address, protocol, .. } = row.frontend;
        Affinity::new(affinity_id(&row.service, &row.port_name, protocol, address.family()), seconds)
    })
}
