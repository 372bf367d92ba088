//! Contents of a manifest file: rows, which the store then shares. Whole objects are kept only on request.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use cproxy_core::{
    self, Event, ObjectName, ObjectRow, Problem, ResourceKind, ServiceName,
    api::{EndpointSlice, Node, Service},
    object_name,
};

/// Parts of the files that the reader needs.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Name of the pod's node: rows are relative to it, and other Nodes do not count.
    pub node: Option<String>,
    /// Service that is kept whole with its slices, besides their rows.
    pub whole: Option<ServiceName>,
}

/// Contents of a file.
#[derive(Debug, Default)]
pub struct Contents {
    objects: Vec<Kept>,
    problems: BTreeSet<Problem>,
}

/// Object of a file.
#[derive(Debug)]
pub(super) enum Kept {
    Row(ObjectRow),
    /// Requested whole object, besides its row.
    Whole(Box<(ObjectRow, Whole)>),
    /// Node of the pod.
    Node(Box<(ObjectName, Node)>),
    Unreadable(Box<(ResourceKind, ObjectName, String)>),
}

/// Object as it was written.
#[derive(Debug)]
pub enum Whole {
    /// A Service.
    Service(Service),
    /// An EndpointSlice.
    Slice(EndpointSlice),
}

/// Identity of an object.
pub(super) type Id<'a> = (ResourceKind, &'a ObjectName);

impl Contents {
    /// The file as complete lists of all kinds.
    pub fn events(&self) -> impl Iterator<Item = Event> {
        lists(&self.objects)
    }

    /// Problems of the file's objects, except those that their rows or the store report.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.problems.iter()
    }

    /// Requested whole objects.
    #[must_use]
    pub fn whole(&self) -> BTreeMap<(ResourceKind, &ObjectName), &Whole> {
        whole(&self.objects)
    }

    pub(super) fn objects(&self) -> &[Kept] {
        &self.objects
    }

    pub(super) fn service(&mut self, service: Service, wanted: &Wanted) {
        let Some(row) = ObjectRow::of_service(&service, wanted.node.as_deref()) else { return };
        let is_whole = wanted.whole.is_some() && object_name(&service.metadata) == wanted.whole;
        self.objects.push(Kept::new(row, is_whole.then_some(Whole::Service(service))));
    }

    pub(super) fn slice(&mut self, slice: EndpointSlice, wanted: &Wanted) {
        let slice = defaulted(slice);
        let Some(row) = ObjectRow::of_slice(&slice, wanted.node.as_deref()) else { return };
        let is_whole = wanted.whole.as_ref().is_some_and(|service| cproxy_core::is_slice_of(&slice, service));
        self.objects.push(Kept::new(row, is_whole.then_some(Whole::Slice(slice))));
    }

    pub(super) fn node(&mut self, node: Node, wanted: &Wanted) {
        if let Some(own) = wanted.node.as_deref().filter(|own| node.metadata.name.as_deref() == Some(own)) {
            self.objects.push(Kept::Node(Box::new((ObjectName::new("", own), node))));
        }
    }

    pub(super) fn unreadable(&mut self, kind: ResourceKind, name: ObjectName, message: String) {
        self.objects.push(Kept::Unreadable(Box::new((kind, name, message))));
    }

    pub(super) fn problem(&mut self, object: impl fmt::Display, message: &str) {
        self.problems.insert(Problem::new(object, "", message));
    }

    /// Appends the contents that follow.
    pub(super) fn append(&mut self, mut next: Self) {
        self.objects.append(&mut next.objects);
        self.problems.append(&mut next.problems);
    }

    /// Frees spare capacity at the end of the file.
    pub(super) fn shrink_to_fit(&mut self) {
        self.objects.shrink_to_fit();
    }
}

/// Slice with the API server's defaults: an unnamed port has the name "".
fn defaulted(mut slice: EndpointSlice) -> EndpointSlice {
    for port in slice.ports.iter_mut().flatten() {
        port.name.get_or_insert_default();
    }
    slice
}

/// Objects as complete lists of all kinds. Of several definitions the last counts, readable or not.
pub(super) fn lists<'a>(objects: impl IntoIterator<Item = &'a Kept>) -> impl Iterator<Item = Event> {
    let kinds = [ResourceKind::Nodes, ResourceKind::Services, ResourceKind::EndpointSlices];
    let objects = objects.into_iter().map(Kept::event);
    kinds.into_iter().map(Event::ListStarted).chain(objects).chain(kinds.into_iter().map(Event::ListDone))
}

/// Requested whole objects. Of several readable definitions the last counts.
pub(super) fn whole<'a>(objects: impl IntoIterator<Item = &'a Kept>) -> BTreeMap<Id<'a>, &'a Whole> {
    let mut all = BTreeMap::new();
    for object in objects {
        match object {
            Kept::Whole(whole) => drop(all.insert(object.id(), &whole.1)),
            Kept::Row(_) => drop(all.remove(&object.id())),
            Kept::Node(_) | Kept::Unreadable(_) => {}
        }
    }
    all
}

impl Kept {
    fn new(row: ObjectRow, whole: Option<Whole>) -> Self {
        match whole {
            Some(whole) => Self::Whole(Box::new((row, whole))),
            None => Self::Row(row),
        }
    }

    pub(super) fn id(&self) -> Id<'_> {
        match self {
            Self::Row(row) => (row.kind(), row.name()),
            Self::Whole(object) => (object.0.kind(), object.0.name()),
            Self::Node(node) => (ResourceKind::Nodes, &node.0),
            Self::Unreadable(object) => (object.0, &object.1),
        }
    }

    fn event(&self) -> Event {
        match self {
            Self::Row(row) => Event::Row(row.clone()),
            Self::Whole(object) => Event::Row(object.0.clone()),
            Self::Node(node) => Event::Node(Box::new(node.1.clone())),
            Self::Unreadable(object) => {
                let (kind, name, message) = &**object;
                Event::Unreadable { kind: *kind, name: Some(name.clone()), message: message.clone() }
            }
        }
    }
}
