//! Lists that would take most objects away. The rows in force stay, and go on with all changes, until a second list
//! agrees.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{ObjectName, ResourceKind, object_row::Parsed, packed::Packed};

/// Time after which a list of the same server counts as a second one.
pub const SECOND_LIST_AFTER: Duration = Duration::from_secs(10);

/// Origin of a list.
#[derive(Clone, Debug)]
pub struct ListSource {
    /// Server that has sent it, with the address of the connection.
    pub server: Arc<str>,
    /// View that it shows; `None`: everything.
    pub view: Option<Arc<str>>,
    /// Time of the request.
    pub requested: Instant,
    /// Time of its end.
    pub ended: Instant,
}

impl ListSource {
    /// Whether the list is a second one after a list of `server` that ended at a time: of another server, or of the
    /// same one after a while. It must have been asked for after the first one.
    #[must_use]
    pub fn is_second(&self, server: &str, ended: Instant) -> bool {
        let wait = if *self.server == *server { SECOND_LIST_AFTER } else { Duration::ZERO };
        self.requested >= ended + wait
    }
}

/// Whether a part is more than half, so that its loss is doubted.
pub(crate) const fn is_most(part: usize, whole: usize) -> bool {
    part > whole / 2
}

/// Decision about a list that would take most objects of its kind away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListReport {
    /// Kind of the objects.
    pub kind: ResourceKind,
    /// Server of the list.
    pub server: Arc<str>,
    /// Number of objects that the list lacks, and of all that are in force.
    pub missing: usize,
    /// See `missing`.
    pub known: usize,
    /// The decision.
    pub verdict: ListVerdict,
    /// The list shows the same view as the rows in force: other servers may be asked.
    pub is_same_view: bool,
}

/// See [`ListReport`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListVerdict {
    /// The list is held back.
    Doubted,
    /// A second list agrees, and counts.
    Agreed,
    /// The objects are there again.
    Disagreed,
}

/// Objects of a list.
pub(super) type Objects = BTreeMap<ObjectName, Parsed<Packed>>;

/// Objects of a list that is under way. Servers send them sorted, mostly by name.
#[derive(Debug, Default)]
pub(super) struct Staged {
    sorted: Vec<(ObjectName, Parsed<Packed>)>,
    /// Objects that came after one with a later name or the same.
    others: Objects,
}

impl Staged {
    /// Adds an object, or replaces it.
    pub(super) fn insert(&mut self, name: ObjectName, parsed: Parsed<Packed>) {
        if self.sorted.last().is_none_or(|(last, _)| *last < name) {
            self.sorted.push((name, parsed));
        } else {
            self.others.insert(name, parsed);
        }
    }

    /// Row of an object of the list so far.
    pub(super) fn row(&self, name: &ObjectName) -> Option<&Packed> {
        let sorted = || {
            let index = self.sorted.binary_search_by(|(other, _)| other.cmp(name)).ok()?;
            self.sorted.get(index).map(|(_, parsed)| parsed)
        };
        self.others.get(name).or_else(sorted)?.row.as_ref()
    }

    /// The complete list.
    pub(super) fn finish(self) -> Objects {
        // Of equal names, the last one counts.
        self.sorted.into_iter().chain(self.others).collect()
    }
}

/// List that is held back.
#[derive(Debug)]
pub(super) struct Held {
    /// Its objects, with all changes since.
    pub(super) candidate: Objects,
    /// Server of the first such list, and when it ended.
    pub(super) server: Arc<str>,
    since: Instant,
    /// Changes that may come before it can lack half of the objects or less: each brings one, or takes one away.
    changes_left: usize,
}

impl Held {
    pub(super) fn new(candidate: Objects, source: &ListSource) -> Self {
        Self { candidate, server: source.server.clone(), since: source.ended, changes_left: 0 }
    }

    pub(super) fn is_confirmed_by(&self, source: &ListSource) -> bool {
        source.is_second(&self.server, self.since)
    }

    /// The same with the objects of another list, which lacks most of them, too.
    pub(super) fn with(self, candidate: Objects) -> Self {
        Self { candidate, changes_left: 0, ..self }
    }

    /// Counts a change. Returns whether the list may no longer lack most objects.
    pub(super) fn is_due(&mut self) -> bool {
        self.changes_left = self.changes_left.saturating_sub(1);
        self.changes_left == 0
    }

    /// Takes note that it still lacks most objects.
    pub(super) fn still_lacks(&mut self, missing: usize, known: usize) {
        self.changes_left = missing - known / 2;
    }
}
