//! Sorted lists of ids.

/// Adds an id, if the list does not have it.
pub(super) fn insert(list: &mut Vec<u32>, id: u32) {
    if let Err(at) = list.binary_search(&id) {
        list.insert(at, id);
    }
}

/// Removes an id, if the list has it.
pub(super) fn remove(list: &mut Vec<u32>, id: u32) {
    if let Ok(at) = list.binary_search(&id) {
        list.remove(at);
    }
}

/// Ids of one list that another does not have.
pub(super) fn difference(list: &[u32], other: &[u32]) -> Vec<u32> {
    list.iter().filter(|id| other.binary_search(id).is_err()).copied().collect()
}
