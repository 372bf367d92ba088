//! Sorted lists of ids.

/// Adds an id to a list, or removes it.
pub(super) fn change(list: &mut Vec<u32>, id: u32, comes: bool) {
    match (list.binary_search(&id), comes) {
        (Err(at), true) => list.insert(at, id),
        (Ok(at), false) => drop(list.remove(at)),
        _ => {}
    }
}

/// Ids of one list that another does not have.
pub(super) fn difference(list: &[u32], other: &[u32]) -> Vec<u32> {
    list.iter().filter(|id| other.binary_search(id).is_err()).copied().collect()
}
