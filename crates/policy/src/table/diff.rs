//! Difference of two sorted lists.

use super::operation::Runs;

/// New runs of an entry; `None`: it goes.
pub(super) type Change = Option<Runs>;

/// Entries that are not the same before and after, sorted.
pub(super) fn changes<K: Ord + Copy>(before: &[(K, Runs)], after: &[(K, Runs)]) -> Vec<(K, Change)> {
    let (mut before, mut after) = (before.iter().peekable(), after.iter().peekable());
    let mut changes = Vec::new();
    loop {
        match (before.peek(), after.peek()) {
            (None, None) => return changes,
            (Some((old, _)), Some((new, _))) if old == new => {
                let (old, new) = (before.next(), after.next());
                changes.extend(new.filter(|_| old != new).map(|&(key, runs)| (key, Some(runs))));
            }
            (Some((old, _)), new) if new.is_none_or(|(new, _)| old < new) => {
                changes.extend(before.next().map(|(key, _)| (*key, None)));
            }
            _ => changes.extend(after.next().map(|&(key, runs)| (key, Some(runs)))),
        }
    }
}
