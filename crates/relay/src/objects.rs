//! Objects in the order of the API server's lists, in chunks that snapshots share. A change copies one chunk if a
//! snapshot has it, so that a snapshot costs what has changed since, not the whole cluster.

use std::{cmp::Ordering, iter, sync::Arc};

use crate::object::{Meta, Object};

/// Objects of one chunk, at most.
const CHUNK_MAX: usize = 128;

/// Object, and the event that brought it.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) object: Arc<Object>,
    /// Sequence number of the event; `None`: a list did.
    pub(crate) sequence: Option<u64>,
}

/// All objects of a kind. A clone shares them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Objects {
    /// Sorted chunks, none of which is empty.
    chunks: Vec<Arc<Vec<Entry>>>,
    len: usize,
}

/// Position in the objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    chunk: usize,
    index: usize,
}

/// Names of an object.
pub(crate) type Names<'a> = (&'a str, &'a str);

pub(crate) fn names(meta: &Meta) -> Names<'_> {
    (&meta.namespace, &meta.name)
}

/// Order of the API server's lists: by the text `NAMESPACE/NAME`.
pub(crate) fn compare((namespace, name): Names<'_>, (other_namespace, other_name): Names<'_>) -> Ordering {
    if namespace == other_namespace {
        return name.cmp(other_name);
    }
    namespace.bytes().chain(iter::once(b'/')).cmp(other_namespace.bytes().chain(iter::once(b'/')))
}

impl Objects {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of the pointers that a clone has of its own.
    pub(crate) fn clone_bytes(&self) -> usize {
        self.chunks.len() * size_of::<Arc<Vec<Entry>>>()
    }

    /// Position of an object, or where it would be.
    fn find(&self, wanted: Names<'_>) -> Result<Cursor, Cursor> {
        let is_not_after = |chunk: &Arc<Vec<Entry>>| {
            chunk.first().is_some_and(|first| compare(names(&first.object.meta), wanted) != Ordering::Greater)
        };
        let chunk = self.chunks.partition_point(is_not_after).saturating_sub(1);
        let entries = self.chunks.get(chunk).map_or(&[][..], |chunk| chunk);
        let found = entries.binary_search_by(|entry| compare(names(&entry.object.meta), wanted));
        found.map(|index| Cursor { chunk, index }).map_err(|index| Cursor { chunk, index })
    }

    pub(crate) fn get(&self, namespace: &str, name: &str) -> Option<&Entry> {
        let Cursor { chunk, index } = self.find((namespace, name)).ok()?;
        self.chunks.get(chunk)?.get(index)
    }

    /// Puts an object in its place. Returns the one that was there.
    pub(crate) fn insert(&mut self, entry: Entry) -> Option<Entry> {
        match self.find(names(&entry.object.meta)) {
            Ok(Cursor { chunk, index }) => {
                let chunk = Arc::make_mut(self.chunks.get_mut(chunk)?);
                chunk.get_mut(index).map(|stored| std::mem::replace(stored, entry))
            }
            Err(Cursor { chunk, index }) => {
                self.len += 1;
                match self.chunks.get_mut(chunk) {
                    Some(entries) => {
                        let entries = Arc::make_mut(entries);
                        entries.insert(index, entry);
                        if entries.len() > CHUNK_MAX {
                            // Objects often come in their order, after which nothing follows.
                            let at = if index == CHUNK_MAX { CHUNK_MAX } else { CHUNK_MAX / 2 };
                            let rest = entries.split_off(at);
                            self.chunks.insert(chunk + 1, Arc::new(rest));
                        }
                    }
                    None => self.chunks.push(Arc::new(vec![entry])),
                }
                None
            }
        }
    }

    pub(crate) fn remove(&mut self, namespace: &str, name: &str) -> Option<Entry> {
        let Cursor { chunk: at, index } = self.find((namespace, name)).ok()?;
        let chunk = Arc::make_mut(self.chunks.get_mut(at)?);
        let entry = chunk.remove(index);
        self.len -= 1;
        let left = chunk.len();
        let next = self.chunks.get(at + 1).map_or(CHUNK_MAX, |next| next.len());
        if left == 0 {
            self.chunks.remove(at);
        } else if left + next <= CHUNK_MAX / 2 {
            let next = self.chunks.remove(at + 1);
            Arc::make_mut(self.chunks.get_mut(at)?).extend(next.iter().cloned());
        }
        Some(entry)
    }

    /// Object at the cursor, which moves to the next one.
    pub(crate) fn next(&self, cursor: &mut Cursor) -> Option<&Arc<Object>> {
        let chunk = self.chunks.get(cursor.chunk)?;
        let entry = chunk.get(cursor.index)?;
        cursor.index += 1;
        if cursor.index == chunk.len() {
            *cursor = Cursor { chunk: cursor.chunk + 1, index: 0 };
        }
        Some(&entry.object)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.chunks.iter().flat_map(|chunk| chunk.iter())
    }

    /// Changes all entries.
    pub(crate) fn for_each(&mut self, mut change: impl FnMut(&mut Entry)) {
        for chunk in &mut self.chunks {
            Arc::make_mut(chunk).iter_mut().for_each(&mut change);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;
    use crate::kind::Kind;

    fn entry(namespace: &str, name: &str, sequence: u64) -> Entry {
        let meta = Meta {
            namespace: namespace.into(),
            name: name.into(),
            version: 1,
            labels: Box::default(),
            cluster_ip: Box::default(),
            service_type: Box::default(),
        };
        let object = Arc::new(Object { kind: Kind::Services, meta, protobuf: Bytes::new() });
        Entry { object, sequence: Some(sequence) }
    }

    fn content(objects: &Objects) -> Vec<(String, Option<u64>)> {
        objects
            .iter()
            .map(|entry| (format!("{}/{}", entry.object.meta.namespace, entry.object.meta.name), entry.sequence))
            .collect()
    }

    proptest! {
        #[test]
        fn objects_are_those_of_a_sorted_map_and_snapshots_stay(
            steps in prop::collection::vec((0_u8..4, 0_u16..400, any::<bool>()), 0..900),
        ) {
            let (mut objects, mut model) = (Objects::default(), BTreeMap::new());
            let mut snapshots = Vec::new();
            for (number, (namespace, name, is_removal)) in steps.into_iter().enumerate() {
                let (namespace, name) = (["a", "a-b", "a.b", "b"][usize::from(namespace)], format!("n{name}"));
                let key = format!("{namespace}/{name}");
                if is_removal && number % 3 > 0 {
                    let removed = objects.remove(namespace, &name).map(|entry| entry.sequence);
                    prop_assert_eq!(removed, model.remove(&key));
                } else {
                    let before = objects.insert(entry(namespace, &name, number as u64)).map(|entry| entry.sequence);
                    prop_assert_eq!(before, model.insert(key, Some(number as u64)));
                }
                let found = objects.get(namespace, &name).map(|entry| entry.sequence);
                prop_assert_eq!(found, model.get(&format!("{namespace}/{name}")).copied());
                if number % 100 == 0 {
                    snapshots.push((objects.clone(), content(&objects)));
                }
            }
            prop_assert_eq!(content(&objects), model.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(objects.len(), objects.iter().count());
            prop_assert!(objects.chunks.iter().all(|chunk| (1..=CHUNK_MAX).contains(&chunk.len())));
            for (snapshot, expected) in snapshots {
                prop_assert_eq!(content(&snapshot), expected);
                let (mut cursor, mut count) = (Cursor::default(), 0);
                while snapshot.next(&mut cursor).is_some() {
                    count += 1;
                }
                prop_assert_eq!(count, snapshot.len());
            }
        }
    }

    #[test]
    fn a_change_copies_one_chunk_of_a_snapshot() {
        let mut objects = Objects::default();
        for number in 0..10_000 {
            objects.insert(entry("a", &format!("n{number:05}"), 0));
        }
        assert_eq!(objects.chunks.len(), 10_000_usize.div_ceil(CHUNK_MAX), "chunks are full");
        let snapshot = objects.clone();
        objects.insert(entry("a", "n05000", 1));
        let shared = objects.chunks.iter().zip(&snapshot.chunks).filter(|(one, other)| Arc::ptr_eq(one, other)).count();
        assert_eq!(shared, objects.chunks.len() - 1);
    }
}
