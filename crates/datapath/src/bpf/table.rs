//! The table as the maps have it, whoever wrote it: raw elements in, the planner's model out. No I/O.

use std::collections::btree_map::Entry;

use cproxy_core::{Address, Affinity, Backend, Capacity, Filter, KernelSet, KernelTable, Members};
use cproxy_ebpf::{
    Affinity as AffinityWord, Backend as BackendSlot, FrontendKey, SET_UNKNOWN_PORT, Set, SetId, SetWord, Settings,
    UNCOUNTED,
};

use super::{
    encoding::{address_key, backend, backend_slot, frontend, key},
    error::{TRIES_MAX, TableError},
};

/// Content of the maps.
pub trait TableMaps {
    /// Sizes of the maps.
    fn capacity(&self) -> Capacity;

    /// The element of `SETTINGS`.
    ///
    /// # Errors
    /// The map could not be read.
    fn settings(&self) -> Result<Settings, TableError>;

    /// All elements of `FRONTENDS`.
    ///
    /// # Errors
    /// The map could not be read.
    fn frontends(&self) -> Result<Vec<(FrontendKey, SetId)>, TableError>;

    /// An element of `SETS`; `None` outside the map.
    ///
    /// # Errors
    /// The map could not be read.
    fn set(&self, set: SetId) -> Result<Option<Set>, TableError>;

    /// Successive elements of `BACKENDS`, which lie in the map.
    ///
    /// # Errors
    /// The map could not be read.
    fn backends(&self, first_slot: u32, count: u32) -> Result<Vec<BackendSlot>, TableError>;
}

/// Reads the whole table. A set that no agent writes, such as one whose backends lie outside the map, is left out, so
/// that the agent gives its frontends another one.
///
/// # Errors
/// A map could not be read.
pub fn decode_table(maps: &impl TableMaps) -> Result<KernelTable, TableError> {
    let settings = maps.settings()?;
    let filter = Filter { v4: settings.filter_v4, v6: settings.filter_v6 };
    let mut table = KernelTable { filter, capacity: maps.capacity(), ..KernelTable::default() };
    table.is_damaged = maps.set(SET_UNKNOWN_PORT)? != Some(Set { word: 0, affinity: 0 });
    for (found, set) in maps.frontends()? {
        match frontend(&found) {
            Some(frontend) if found == key(frontend) => {
                table.frontends.insert(frontend, set);
                if let Entry::Vacant(vacant) = table.sets.entry(set)
                    && let Some(kernel_set) = decode_set(maps, set)?
                {
                    vacant.insert(kernel_set);
                }
            }
            _ => {
                let address = Address::from_words(found.address);
                if found == address_key(address) {
                    table.addresses.insert(address);
                }
                table.is_damaged |= found != address_key(address) || set != SET_UNKNOWN_PORT;
            }
        }
    }
    Ok(table)
}

/// A set; `None` if no agent writes such a set.
fn decode_set(maps: &impl TableMaps, set: SetId) -> Result<Option<KernelSet>, TableError> {
    for _ in 0..TRIES_MAX {
        let Some(found) = maps.set(set)? else { break };
        let decoded = decode_content(maps, found)?;
        // Unless the agent has given the set other backends, and their slots to another set.
        if decoded.is_some() || maps.set(set)? == Some(found) {
            return Ok(decoded);
        }
    }
    Ok(None)
}

fn decode_content(maps: &impl TableMaps, Set { word, affinity }: Set) -> Result<Option<KernelSet>, TableError> {
    let (word, affinity) = (SetWord(word), AffinityWord(affinity));
    let first_slot = word.first_slot();
    if u64::from(first_slot) + u64::from(word.eligible() + word.serving()) > maps.capacity().slots.into() {
        return Ok(None);
    }
    let eligible = decode_run(&maps.backends(first_slot, word.eligible())?);
    let serving = decode_run(&maps.backends(first_slot + word.eligible(), word.serving())?);
    let affinity = Affinity { id: affinity.id(), seconds: affinity.seconds() };
    Ok(eligible.zip(serving).map(|(eligible, serving)| {
        let members = Members::new(&eligible, &serving, word.drops());
        KernelSet { first_slot, members, affinity }
    }))
}

/// Backends of a run, sorted as the model has them; `None` unless programs can find each of them by its digest.
fn decode_run(slots: &[BackendSlot]) -> Option<Vec<Backend>> {
    let is_sound = |slot: &BackendSlot| *slot == backend_slot(backend(*slot), slot.counter != UNCOUNTED);
    if !slots.is_sorted_by_key(|slot| slot.digest) || !slots.iter().all(is_sound) {
        return None;
    }
    let mut run: Vec<_> = slots.iter().copied().map(backend).collect();
    run.sort_unstable();
    Some(run)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use cproxy_core::{Frontend, Protocol, parse_address};
    use cproxy_ebpf::{PROTOCOL_ANY, PROTOCOL_TCP};

    use super::*;

    #[derive(Default)]
    struct Maps {
        frontends: HashMap<FrontendKey, SetId>,
        sets: Vec<Set>,
        backends: Vec<BackendSlot>,
    }

    impl TableMaps for Maps {
        fn capacity(&self) -> Capacity {
            let [sets, slots] = [self.sets.len(), self.backends.len()].map(|length| length as u32);
            Capacity { frontends: 8, sets, slots }
        }

        fn settings(&self) -> Result<Settings, TableError> {
            // SAFETY: integers only.
            Ok(unsafe { std::mem::zeroed() })
        }

        fn frontends(&self) -> Result<Vec<(FrontendKey, SetId)>, TableError> {
            Ok(self.frontends.iter().map(|(&key, &set)| (key, set)).collect())
        }

        fn set(&self, set: SetId) -> Result<Option<Set>, TableError> {
            Ok(self.sets.get(set as usize).copied())
        }

        fn backends(&self, first_slot: u32, count: u32) -> Result<Vec<BackendSlot>, TableError> {
            Ok(self.backends[first_slot as usize..][..count as usize].to_vec())
        }
    }

    const EMPTY: Set = Set { word: 0, affinity: 0 };

    fn address() -> Address {
        parse_address("10.96.0.1").unwrap()
    }

    fn vip() -> Frontend {
        Frontend { address: address(), port: 80, protocol: Protocol::Tcp }
    }

    /// Two backends, sorted by digest.
    fn slots() -> Vec<BackendSlot> {
        let backend = |host| Backend { address: parse_address(&format!("10.0.0.{host}")).unwrap(), port: 8080 };
        let mut slots: Vec<_> = (1..=2).map(|host| backend_slot(backend(host), host == 1)).collect();
        slots.sort_by_key(|slot| slot.digest);
        slots
    }

    /// A table of one frontend with these backends, and a set.
    fn table(backends: Vec<BackendSlot>, word: SetWord) -> KernelTable {
        let sets = vec![EMPTY, Set { word: word.0, affinity: AffinityWord::new(7, 60).0 }];
        decode_table(&Maps { frontends: [(key(vip()), 1)].into(), sets, backends }).unwrap()
    }

    #[test]
    fn a_set_has_its_backends_and_affinity() {
        let read = table(slots(), SetWord::new(0, 1, 1, true));
        assert_eq!((read.is_damaged, read.frontends.get(&vip())), (false, Some(&1)));
        let set = &read.sets[&1];
        assert_eq!((set.members.eligible().len(), set.members.kept().len(), set.members.drops), (1, 1, true));
        assert_eq!(set.affinity, Affinity { id: 7, seconds: 60 });
    }

    #[test]
    fn a_set_in_which_programs_find_no_backend_is_left_out() {
        let both = SetWord::new(0, 2, 0, false);
        assert!(table(slots(), both).sets.contains_key(&1));
        let [mut unsorted, mut wrong_digest, mut wrong_counter] = [(); 3].map(|()| slots());
        unsorted.reverse();
        wrong_digest[1].digest += 1;
        wrong_counter[0].counter = 1;
        for (what, backends, word) in [
            ("outside the map", slots(), SetWord::new(1, 2, 0, false)),
            ("far outside", slots(), SetWord(u64::MAX)),
            ("not sorted", unsorted, both),
            ("with another digest", wrong_digest, both),
            ("with another counter", wrong_counter, both),
        ] {
            let read = table(backends, word);
            assert_eq!((read.frontends.len(), read.sets.len()), (1, 0), "{what}");
        }
    }

    #[test]
    fn keys_that_no_agent_writes_are_damage() {
        let key = |port, protocol, zero| FrontendKey { address: address().words(), port, protocol, zero };
        for (what, found, set, is_damaged, addresses) in [
            ("a ClusterIP", key(0, PROTOCOL_ANY, 0), 0, false, 1),
            ("a ClusterIP with backends", key(0, PROTOCOL_ANY, 0), 1, true, 1),
            ("a port of any protocol", key(80, PROTOCOL_ANY, 0), 0, true, 0),
            ("another protocol", key(80, 132, 0), 1, true, 0),
            ("padding", key(80, PROTOCOL_TCP, 1), 1, true, 0),
        ] {
            let read =
                decode_table(&Maps { frontends: [(found, set)].into(), sets: vec![EMPTY; 2], ..Maps::default() });
            let read = read.unwrap();
            assert_eq!((read.is_damaged, read.addresses.len()), (is_damaged, addresses), "{what}");
            assert!(read.frontends.is_empty(), "{what}");
        }
        let sets = vec![Set { word: SetWord::new(0, 0, 0, true).0, affinity: 0 }];
        assert!(
            decode_table(&Maps { sets, ..Maps::default() }).unwrap().is_damaged,
            "a set of unknown ports that drops"
        );
    }
}
