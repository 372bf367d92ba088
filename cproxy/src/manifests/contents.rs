//! Contents of a manifest file: rows, which the store then shares. Whole objects, and those of network policies, are
//! kept only on request.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use cproxy_core::{
    self, Event, ObjectName, ObjectRow, Problem, ResourceKind, ServiceName,
    api::{EndpointSlice, Node, Service},
    object_name,
};

use super::policy_objects::{PolicyKind, PolicyObject, PolicyObjects, located};

/// Choices of the reader of files.
#[derive(Clone, Debug, Default)]
pub struct ParseOptions {
    /// Name of this node: rows are relative to it, and other Nodes do not count.
    pub node_name: Option<String>,
    /// Service that is kept whole with its slices, besides their rows.
    pub whole_service: Option<ServiceName>,
    /// Whether Namespaces, NetworkPolicies and Pods are kept. Otherwise they are passed over.
    pub has_policies: bool,
    /// Whether a path may be a pipe or a device, which is read once. Reading it may never end.
    pub has_pipes: bool,
}

/// Contents of a file.
#[derive(Debug, Default)]
pub struct Contents {
    objects: Vec<FileObject>,
    policy_objects: Vec<PolicyObject>,
    problems: BTreeSet<Problem>,
}

/// Object of a file.
#[derive(Debug)]
pub(super) enum FileObject {
    Row(ObjectRow),
    /// Row, and the whole object that was requested.
    Whole(Box<(ObjectRow, WholeObject)>),
    /// Node of the pod.
    Node(Box<(ObjectName, Node)>),
    Unreadable(Box<(ResourceKind, ObjectName, String)>),
}

/// Object as it was written.
#[derive(Debug)]
pub enum WholeObject {
    /// A Service.
    Service(Service),
    /// An EndpointSlice.
    Slice(EndpointSlice),
}

/// Identity of an object.
pub(super) type ObjectId<'a> = (ResourceKind, &'a ObjectName);

impl Contents {
    /// The file as complete lists of all kinds.
    pub fn events(&self) -> impl Iterator<Item = Event> {
        list_events(&self.objects)
    }

    /// Problems of the file's objects, except those that their rows or the store report.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.problems.iter()
    }

    /// Requested whole objects.
    #[must_use]
    pub fn whole_objects(&self) -> BTreeMap<(ResourceKind, &ObjectName), &WholeObject> {
        whole_objects(&self.objects)
    }

    /// Objects of network policies.
    #[must_use]
    pub fn policy_objects(&self) -> PolicyObjects<'_> {
        self.policy_objects.iter().collect()
    }

    pub(super) fn objects(&self) -> &[FileObject] {
        &self.objects
    }

    pub(super) fn each_policy_object(&self) -> &[PolicyObject] {
        &self.policy_objects
    }

    pub(super) fn add_service(&mut self, service: Service, options: &ParseOptions) {
        let Some(row) = ObjectRow::of_service(&service, options.node_name.as_deref()) else { return };
        let is_whole = options.whole_service.is_some() && object_name(&service.metadata) == options.whole_service;
        self.objects.push(FileObject::new(row, is_whole.then_some(WholeObject::Service(service))));
    }

    pub(super) fn add_slice(&mut self, slice: EndpointSlice, options: &ParseOptions) {
        let slice = with_defaults(slice);
        let Some(row) = ObjectRow::of_slice(&slice, options.node_name.as_deref()) else { return };
        let is_whole = options.whole_service.as_ref().is_some_and(|service| cproxy_core::is_slice_of(&slice, service));
        self.objects.push(FileObject::new(row, is_whole.then_some(WholeObject::Slice(slice))));
    }

    pub(super) fn add_node(&mut self, node: Node, options: &ParseOptions) {
        if let Some(own) = options.node_name.as_deref().filter(|own| node.metadata.name == *own) {
            self.objects.push(FileObject::Node(Box::new((ObjectName::new("", own), node))));
        }
    }

    pub(super) fn add_unreadable(&mut self, kind: ResourceKind, name: ObjectName, message: String) {
        self.objects.push(FileObject::Unreadable(Box::new((kind, name, message))));
    }

    /// Adds an object of network policies. Its problems get its `location`, since it has none of its own.
    pub(super) fn add_policy_object(
        &mut self,
        object: PolicyObject,
        problems: Vec<Problem>,
        location: impl fmt::Display,
    ) {
        self.policy_objects.push(object);
        self.problems.extend(problems.into_iter().map(|problem| located(problem, &location)));
    }

    /// Records that a NetworkPolicy is not used whose names are not known.
    pub(super) fn add_unknown_policy(&mut self, options: &ParseOptions) {
        if options.has_policies {
            let unknown = ObjectName::new("", "");
            self.policy_objects.push(PolicyObject::Unreadable(PolicyKind::NetworkPolicies, unknown));
        }
    }

    pub(super) fn add_problem(&mut self, object: impl fmt::Display, message: &str) {
        self.problems.insert(Problem::new(object, "", message));
    }

    /// Appends the contents that follow.
    pub(super) fn append(&mut self, mut next: Self) {
        self.objects.append(&mut next.objects);
        self.policy_objects.append(&mut next.policy_objects);
        self.problems.append(&mut next.problems);
    }

    /// Frees spare capacity at the end of the file.
    pub(super) fn shrink_to_fit(&mut self) {
        self.objects.shrink_to_fit();
        self.policy_objects.shrink_to_fit();
    }
}

/// Slice with the API server's defaults: an unnamed port has the name "".
fn with_defaults(mut slice: EndpointSlice) -> EndpointSlice {
    for port in &mut slice.ports {
        port.name.get_or_insert_default();
    }
    slice
}

/// Objects as complete lists of all kinds. Of several definitions the last counts, readable or not.
pub(super) fn list_events<'a>(objects: impl IntoIterator<Item = &'a FileObject>) -> impl Iterator<Item = Event> {
    let kinds = [ResourceKind::Nodes, ResourceKind::Services, ResourceKind::EndpointSlices];
    let objects = objects.into_iter().map(FileObject::event);
    kinds.into_iter().map(Event::ListStarted).chain(objects).chain(kinds.into_iter().map(Event::ListDone))
}

/// Requested whole objects. Of several readable definitions the last counts.
pub(super) fn whole_objects<'a>(
    objects: impl IntoIterator<Item = &'a FileObject>,
) -> BTreeMap<ObjectId<'a>, &'a WholeObject> {
    let mut all = BTreeMap::new();
    for object in objects {
        match object {
            FileObject::Whole(whole) => drop(all.insert(object.id(), &whole.1)),
            FileObject::Row(_) => drop(all.remove(&object.id())),
            FileObject::Node(_) | FileObject::Unreadable(_) => {}
        }
    }
    all
}

impl FileObject {
    fn new(row: ObjectRow, whole: Option<WholeObject>) -> Self {
        match whole {
            Some(whole) => Self::Whole(Box::new((row, whole))),
            None => Self::Row(row),
        }
    }

    pub(super) fn id(&self) -> ObjectId<'_> {
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
