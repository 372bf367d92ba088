//! A table that forgets its oldest entries rather than grow.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
};

/// Bounded number of entries with a bounded cost, each at its place in the order of insertion.
#[derive(Debug)]
pub(super) struct Table<K, V> {
    entries: HashMap<K, Entry<V>>,
    /// Keys by the serial number of their entry.
    order: BTreeMap<u64, K>,
    next_serial: u64,
    cost: usize,
    entries_max: usize,
    cost_max: usize,
}

#[derive(Debug)]
struct Entry<V> {
    serial: u64,
    cost: usize,
    value: V,
}

impl<K: Clone + Eq + Hash, V> Table<K, V> {
    pub(super) fn new(entries_max: usize, cost_max: usize) -> Self {
        let (entries, order) = (HashMap::new(), BTreeMap::new());
        Self { entries, order, next_serial: 0, cost: 0, entries_max, cost_max }
    }

    pub(super) fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    pub(super) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key).map(|entry| &mut entry.value)
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Inserts an entry as the newest, in place of the one with its key.
    pub(super) fn insert(&mut self, key: K, value: V, cost: usize) {
        self.remove(&key);
        if cost > self.cost_max || self.entries_max == 0 {
            return;
        }
        while self.entries.len() >= self.entries_max || self.cost + cost > self.cost_max {
            self.remove_oldest();
        }
        let serial = self.next_serial;
        self.next_serial += 1;
        self.cost += cost;
        self.order.insert(serial, key.clone());
        self.entries.insert(key, Entry { serial, cost, value });
    }

    pub(super) fn remove(&mut self, key: &K) {
        if let Some(Entry { serial, cost, .. }) = self.entries.remove(key) {
            self.order.remove(&serial);
            self.cost -= cost;
        }
    }

    /// Removes the oldest entries for which this holds.
    pub(super) fn remove_oldest_while(&mut self, mut is_unused: impl FnMut(&V) -> bool) {
        while let Some(key) = self.order.first_key_value().map(|(_, key)| key.clone())
            && self.get(&key).is_none_or(&mut is_unused)
        {
            self.remove(&key);
        }
    }

    fn remove_oldest(&mut self) {
        if let Some((_, key)) = self.order.pop_first()
            && let Some(entry) = self.entries.remove(&key)
        {
            self.cost -= entry.cost;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same with a list, newest last.
    fn naive_insert(list: &mut Vec<(u8, u32, usize)>, key: u8, value: u32, cost: usize) {
        list.retain(|entry| entry.0 != key);
        if cost <= 10 {
            list.push((key, value, cost));
        }
        while list.len() > 4 || list.iter().map(|entry| entry.2).sum::<usize>() > 10 {
            list.remove(0);
        }
    }

    proptest! {
        #[test]
        fn the_newest_entries_are_kept(
            steps in proptest::collection::vec((0..8_u8, 0..12_usize, 0..4_u8), 0..100),
        ) {
            let (mut table, mut list) = (Table::new(4, 10), Vec::new());
            for ((key, cost, action), value) in steps.into_iter().zip(0..) {
                match action {
                    0 => {
                        table.remove(&key);
                        list.retain(|entry: &(u8, u32, usize)| entry.0 != key);
                    }
                    1 => {
                        table.remove_oldest_while(|value| value % 3 == 0);
                        let kept = list.iter().position(|entry| entry.1 % 3 != 0).unwrap_or(list.len());
                        list.drain(..kept);
                    }
                    _ => {
                        table.insert(key, value, cost);
                        naive_insert(&mut list, key, value, cost);
                    }
                }
                prop_assert_eq!(table.len(), list.len());
                prop_assert_eq!(table.order.len(), list.len());
                prop_assert_eq!(table.cost, list.iter().map(|entry| entry.2).sum::<usize>());
                for (key, value, _) in &list {
                    prop_assert_eq!(table.get(key), Some(value));
                }
            }
        }
    }
}
