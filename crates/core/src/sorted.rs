//! Sorted collections and lists of few elements.
//!
//! Collections are filled one by one. `collect` sorts a list first, which takes 5 KiB of code for each type
//! (docs/decisions/016). That is faster for many elements, and no matter for few. Lists are sorted by the positions of
//! their elements, whose sort is the same for each type: those of the standard library take 2 to 3 KiB for each.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet},
    mem,
};

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

/// Sorts a list of few elements. Equal ones keep their order.
pub fn sort_few<T: Ord>(list: &mut [T]) {
    sort_few_by(list, T::cmp);
}

/// Sorts a list of few elements, and leaves one of equal ones.
pub fn sort_unique<T: Ord>(list: &mut Vec<T>) {
    sort_few(list);
    list.dedup();
}

/// Sorts a list of few elements by a comparison. Equal ones keep their order.
pub fn sort_few_by<T>(list: &mut [T], compare: impl Fn(&T, &T) -> Ordering) {
    if list.len() < 2 {
        return;
    }
    let mut order = order_by(list.len(), &|a, b| match (list.get(a), list.get(b)) {
        (Some(a), Some(b)) => compare(a, b),
        _ => Ordering::Equal,
    });
    arrange(&mut order, &mut |a, b| list.swap(a, b));
}

/// Positions of so many elements in their order.
fn order_by(count: usize, compare: &dyn Fn(usize, usize) -> Ordering) -> Vec<usize> {
    let mut order: Vec<_> = (0..count).collect();
    order.sort_by(|&a, &b| compare(a, b));
    order
}

/// Brings the element from each position of `order` to the place where the position is.
fn arrange(order: &mut [usize], swap: &mut dyn FnMut(usize, usize)) {
    for start in 0..order.len() {
        let mut at = start;
        while let Some(place) = order.get_mut(at) {
            let from = mem::replace(place, at);
            if from == start {
                break;
            }
            swap(at, from);
            at = from;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_list_is_sorted_as_the_standard_library_does_it(
            list in prop::collection::vec((0_u8..8, any::<u8>()), 0..40),
        ) {
            let (mut stable, mut expected) = (list.clone(), list.clone());
            sort_few_by(&mut stable, |a, b| a.0.cmp(&b.0));
            expected.sort_by_key(|element| element.0);
            prop_assert_eq!(stable, expected);
            let (mut unique, mut expected) = (list.clone(), list);
            sort_unique(&mut unique);
            expected.sort_unstable();
            expected.dedup();
            prop_assert_eq!(unique, expected);
        }
    }
}
