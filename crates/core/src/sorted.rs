//! Sorted collections of elements in any order, filled one by one. `collect` sorts a list first, which takes 5 KiB of
//! code for each type (docs/decisions/016). That is faster for many elements, and no matter for few.

use std::collections::{BTreeMap, BTreeSet};

/// Map of these entries; of equal keys, the last one counts.
pub fn sorted_map<K: Ord, V>(entries: impl IntoIterator<Item = (K, V)>) -> BTreeMap<K, V> {
    let mut map = BTreeMap::new();
    map.extend(entries);
    map
}

/// Set of these elements.
pub fn sorted_set<T: Ord>(elements: impl IntoIterator<Item = T>) -> BTreeSet<T> {
    let mut set = BTreeSet::new();
    set.extend(elements);
    set
}
