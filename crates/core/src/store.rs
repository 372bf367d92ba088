//! What is known of the cluster: compact rows of Services and EndpointSlices.
//!
//! A relist is staged beside the rows in force and takes their place at its end, so that a half-read list never thins a
//! table.
//!
//! Rows are kept packed, in trees: a hash map would be half empty after it has grown, and twice there while it grows.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    Address, NodeContext, ObjectName, ObjectRow, Problem, ServiceName, ServiceRow, SliceRow, names::Texts,
    node_context::NodeRow, object_row::Parsed, packed::Packed,
};
use crate::api::{EndpointSlice, Node, Service};

/// The kinds that a source delivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ResourceKind {
    /// v1 Service.
    Services,
    /// discovery.k8s.io/v1 EndpointSlice.
    EndpointSlices,
    /// v1 Node.
    Nodes,
}

impl ResourceKind {
    /// What one object of the kind is called.
    #[must_use]
    pub fn singular(self) -> &'static str {
        match self {
            Self::Services => "Service",
            Self::EndpointSlices => "EndpointSlice",
            Self::Nodes => "Node",
        }
    }
}

/// What a source says. A kind's list is `ListStarted`, objects, `ListDone`; whatever was not named in it is gone.
#[derive(Clone, Debug)]
pub enum Event {
    /// A complete list of a kind follows. An unfinished one is forgotten.
    ListStarted(ResourceKind),
    /// The list is complete.
    ListDone(ResourceKind),
    /// A Service is, or was changed to be, so.
    Service(Box<Service>),
    /// A Service is gone.
    ServiceDeleted(ServiceName),
    /// An EndpointSlice is, or was changed to be, so.
    EndpointSlice(Box<EndpointSlice>),
    /// An EndpointSlice is gone.
    EndpointSliceDeleted(ObjectName),
    /// A Service or an EndpointSlice is, or was changed to be, so; from a source that keeps rows itself.
    Row(ObjectRow),
    /// A Node is, or was changed to be, so. Only the own one counts.
    Node(Box<Node>),
    /// The Node of this name is gone.
    NodeDeleted(String),
    /// An object is, or was changed to be, what cannot be read.
    Unreadable {
        /// Its kind.
        kind: ResourceKind,
        /// Its name, if that can be read.
        name: Option<ObjectName>,
        /// What is wrong with it.
        message: String,
    },
    /// The VM has these addresses now.
    PodIps(Vec<Address>),
}

/// The rows in force.
#[derive(Debug, Default)]
pub struct Store {
    own: NodeContext,
    /// The own Node, while there is one.
    node: Option<NodeRow>,
    /// A list of Nodes is under way: what it has said of the own one.
    staged_node: Option<Option<Parsed<NodeRow>>>,
    nodes_complete: bool,
    services: BTreeMap<Arc<ServiceName>, Packed>,
    slices: BTreeMap<ObjectName, Packed>,
    /// Each slice under the name of its Service.
    slices_of: BTreeSet<(Arc<ServiceName>, Arc<str>)>,
    namespaces: Texts,
    staged_services: Option<Staged>,
    staged_slices: Option<Staged>,
    services_complete: bool,
    slices_complete: bool,
    dirty: BTreeSet<Arc<ServiceName>>,
    problems: BTreeMap<(ResourceKind, ObjectName), Box<[Problem]>>,
}

/// What a list has said so far.
type Staged = BTreeMap<ObjectName, Parsed<Packed>>;

impl Store {
    /// An empty store, as seen from this place.
    #[must_use]
    pub fn new(own: NodeContext) -> Self {
        Self { own, ..Self::default() }
    }

    /// Takes an event in. Returns the problems that are new with it.
    pub fn apply(&mut self, event: Event) -> Vec<Problem> {
        match event {
            Event::ListStarted(ResourceKind::Services) => self.staged_services = Some(Staged::new()),
            Event::ListStarted(ResourceKind::EndpointSlices) => self.staged_slices = Some(Staged::new()),
            Event::ListStarted(ResourceKind::Nodes) => self.staged_node = Some(None),
            Event::ListDone(ResourceKind::Services) => return self.services_listed(),
            Event::ListDone(ResourceKind::EndpointSlices) => return self.slices_listed(),
            Event::ListDone(ResourceKind::Nodes) => return self.nodes_listed(),
            Event::Service(service) => {
                return self.take_row(ResourceKind::Services, ObjectRow::of_service(&service, self.node_name()));
            }
            Event::EndpointSlice(slice) => {
                return self.take_row(ResourceKind::EndpointSlices, ObjectRow::of_slice(&slice, self.node_name()));
            }
            Event::Row(row) => return self.take_row(row.kind, Some(row)),
            Event::ServiceDeleted(name) => match &mut self.staged_services {
                Some(staged) => drop(staged.remove(&name)),
                None => self.remove_service(&name),
            },
            Event::EndpointSliceDeleted(name) => match &mut self.staged_slices {
                Some(staged) => drop(staged.remove(&name)),
                None => self.remove_slice(&name),
            },
            Event::Node(node) => return self.take_node(&node),
            Event::NodeDeleted(name) => {
                if self.is_own(&name) {
                    match &mut self.staged_node {
                        Some(staged) => *staged = None,
                        None => drop(self.put_node(None)),
                    }
                }
            }
            Event::Unreadable { kind, name, message } => return self.take_unreadable(kind, name, &message),
            Event::PodIps(addresses) => self.set_pod_ips(addresses),
        }
        Vec::new()
    }

    /// Whether all kinds that count have been listed completely at least once; before that, nothing may be derived from
    /// the store.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let has_node = self.nodes_complete || self.own.node_name.is_none();
        self.services_complete && self.slices_complete && has_node
    }

    /// The own node's name, if it is known.
    #[must_use]
    pub fn node_name(&self) -> Option<&str> {
        self.own.node_name.as_deref()
    }

    /// The own node's zone, if it is known.
    #[must_use]
    pub fn zone(&self) -> Option<&Arc<str>> {
        self.node.as_ref().and_then(|node| node.zone.as_ref())
    }

    /// The own node's addresses: as given, else of its Node.
    #[must_use]
    pub fn node_ips(&self) -> &[Address] {
        let of_node = || self.node.as_ref().map_or(&[][..], |node| &node.internal_ips);
        if self.own.node_ips.is_empty() { of_node() } else { &self.own.node_ips }
    }

    /// The VM's own addresses.
    #[must_use]
    pub fn pod_ips(&self) -> &[Address] {
        &self.own.pod_ips
    }

    /// The Services whose rows or slices have changed since the last call. Until the store is complete nothing can be
    /// made of changes.
    pub fn take_dirty(&mut self) -> BTreeSet<Arc<ServiceName>> {
        std::mem::take(&mut self.dirty)
    }

    /// The Service of that name.
    #[must_use]
    pub fn service_row(&self, name: &ServiceName) -> Option<ServiceRow> {
        self.services.get(name).map(|packed| ServiceRow::unpack(packed))
    }

    /// All Services, ordered by name.
    pub fn services(&self) -> impl Iterator<Item = (&ServiceName, ServiceRow)> {
        self.services.iter().map(|(name, packed)| (&**name, ServiceRow::unpack(packed)))
    }

    /// The names of all Services, ordered.
    pub fn service_names(&self) -> impl ExactSizeIterator<Item = &Arc<ServiceName>> {
        self.services.keys()
    }

    /// The slices of a Service with their names, ordered by them.
    pub fn slices(&self, service: &ServiceName) -> impl Iterator<Item = (ObjectName, SliceRow)> {
        let first = (self.known_service(service), Arc::default());
        let of_service = self.slices_of.range(first..).take_while(move |(other, _)| **other == *service);
        of_service.filter_map(|(service, name)| {
            let name = ObjectName { namespace: service.namespace.clone(), name: name.clone() };
            let row = self.slice(&name)?;
            Some((name, row))
        })
    }

    /// The slice of that name.
    #[must_use]
    pub fn slice(&self, name: &ObjectName) -> Option<SliceRow> {
        self.slices.get(name).map(|packed| SliceRow::unpack(packed))
    }

    /// What is wrong now, ordered by object.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.problems.values().flatten()
    }

    fn take_row(&mut self, kind: ResourceKind, row: Option<ObjectRow>) -> Vec<Problem> {
        let Some(ObjectRow { kind, mut name, parsed }) = row else { return vec![nameless(kind.singular())] };
        name.namespace = self.namespaces.share(&name.namespace);
        match self.staged(kind) {
            Some(staged) => drop(staged.insert(name, parsed)),
            None => return self.put(kind, name, parsed),
        }
        Vec::new()
    }

    fn staged(&mut self, kind: ResourceKind) -> Option<&mut Staged> {
        match kind {
            ResourceKind::Services => self.staged_services.as_mut(),
            ResourceKind::EndpointSlices => self.staged_slices.as_mut(),
            ResourceKind::Nodes => None,
        }
    }

    fn packed(&self, kind: ResourceKind, name: &ObjectName) -> Option<&Packed> {
        match kind {
            ResourceKind::Services => self.services.get(name),
            ResourceKind::EndpointSlices => self.slices.get(name),
            ResourceKind::Nodes => None,
        }
    }

    fn put(&mut self, kind: ResourceKind, name: ObjectName, parsed: Parsed<Packed>) -> Vec<Problem> {
        match kind {
            ResourceKind::Services => self.put_service(name, parsed),
            _ => self.put_slice(name, parsed),
        }
    }

    fn is_own(&self, node: &str) -> bool {
        self.own.node_name.as_deref() == Some(node)
    }

    fn take_node(&mut self, node: &Node) -> Vec<Problem> {
        let Some(name) = node.metadata.name.as_deref().filter(|name| self.is_own(name)) else { return Vec::new() };
        let mut problems = Vec::new();
        let row = NodeRow::from_object(name, node, &mut problems);
        let parsed = Some(Parsed { row: Some(row), problems: problems.into() });
        match &mut self.staged_node {
            Some(staged) => *staged = parsed,
            None => return self.put_node(parsed),
        }
        Vec::new()
    }

    fn nodes_listed(&mut self) -> Vec<Problem> {
        self.nodes_complete = true;
        let staged = self.staged_node.take().flatten();
        self.put_node(staged)
    }

    /// The own Node is so now, or not there.
    fn put_node(&mut self, parsed: Option<Parsed<NodeRow>>) -> Vec<Problem> {
        let (row, problems) = parsed.map_or_else(Default::default, |parsed| (parsed.row, parsed.problems));
        let name = ObjectName::new("", self.own.node_name.as_deref().unwrap_or_default());
        let new = self.note(ResourceKind::Nodes, &name, problems);
        let before = (self.zone().cloned(), self.node_ips().to_vec());
        self.node = row;
        if before != (self.zone().cloned(), self.node_ips().to_vec()) && self.is_complete() {
            self.dirty.extend(self.services.keys().cloned());
        }
        new
    }

    fn set_pod_ips(&mut self, addresses: Vec<Address>) {
        if self.own.pod_ips != addresses {
            self.own.pod_ips = addresses;
            let restricted = self.services().filter(|(_, service)| !service.source_ranges.is_empty());
            let restricted: Vec<_> = restricted.map(|(name, _)| self.known_service(name)).collect();
            restricted.into_iter().for_each(|name| self.mark(name));
        }
    }

    /// What an object was before it could no longer be read, it stays; if it was nothing, an earlier definition in the
    /// same list counts.
    fn take_unreadable(&mut self, kind: ResourceKind, name: Option<ObjectName>, message: &str) -> Vec<Problem> {
        let Some(name) = name else { return vec![nameless(kind.singular())] };
        let stays = |is_known: bool| if is_known { "its last state stays" } else { "ignored" };
        let problems = |label: String, is_known: bool| {
            Box::from([Problem::new(label, "", format!("{message}; {}", stays(is_known)))])
        };
        match kind {
            ResourceKind::Services | ResourceKind::EndpointSlices => {
                let label = format!("{} {name}", kind.singular());
                let row = self.packed(kind, &name).cloned();
                match self.staged(kind) {
                    Some(staged) => {
                        let row = row.or_else(|| staged.remove(&name).and_then(|earlier| earlier.row));
                        let problems = problems(label, row.is_some());
                        staged.insert(name, Parsed { row, problems });
                    }
                    None => return self.note(kind, &name, problems(label, row.is_some())),
                }
            }
            ResourceKind::Nodes if !self.is_own(&name.name) => {}
            ResourceKind::Nodes => {
                let row = self.node.clone();
                let problems = problems(format!("Node {}", name.name), row.is_some());
                let parsed = Some(Parsed { row, problems });
                match &mut self.staged_node {
                    Some(staged) => *staged = parsed,
                    None => return self.put_node(parsed),
                }
            }
        }
        Vec::new()
    }

    fn services_listed(&mut self) -> Vec<Problem> {
        let staged = self.staged_services.take().unwrap_or_default();
        let new = self.take_list(ResourceKind::Services, staged, Self::remove_service);
        refill(&mut self.services);
        self.services_complete = true;
        new
    }

    fn slices_listed(&mut self) -> Vec<Problem> {
        let staged = self.staged_slices.take().unwrap_or_default();
        let new = self.take_list(ResourceKind::EndpointSlices, staged, Self::remove_slice);
        refill(&mut self.slices);
        self.slices_of = std::mem::take(&mut self.slices_of).into_iter().collect();
        self.slices_complete = true;
        new
    }

    fn take_list(&mut self, kind: ResourceKind, staged: Staged, remove: fn(&mut Self, &ObjectName)) -> Vec<Problem> {
        let gone: Vec<_> = self.known(kind).filter(|name| !staged.contains_key(name)).cloned().collect();
        gone.iter().for_each(|name| remove(self, name));
        let mut new = Vec::new();
        for (name, parsed) in staged {
            new.extend(self.put(kind, name, parsed));
        }
        self.namespaces.forget_unused();
        new
    }

    /// Every object of a kind that left a trace: a row, or only problems.
    fn known(&self, kind: ResourceKind) -> impl Iterator<Item = &ObjectName> {
        let troubled = self.problems.keys().filter(move |key| key.0 == kind).map(|key| &key.1);
        let services = (kind == ResourceKind::Services).then(|| self.services.keys().map(|name| &**name));
        let slices = (kind == ResourceKind::EndpointSlices).then(|| self.slices.keys());
        services.into_iter().flatten().chain(slices.into_iter().flatten()).chain(troubled)
    }

    /// The Service is to be computed anew. Before the store is complete, all are.
    fn mark(&mut self, service: Arc<ServiceName>) {
        if self.is_complete() {
            self.dirty.insert(service);
        }
    }

    fn put_service(&mut self, name: ServiceName, parsed: Parsed<Packed>) -> Vec<Problem> {
        let new = self.note(ResourceKind::Services, &name, parsed.problems);
        match parsed.row {
            Some(row) if self.services.get(&name) == Some(&row) => {}
            Some(row) => {
                let name = self.known_service(&name);
                self.mark(name.clone());
                self.services.insert(name, row);
            }
            None => self.drop_service_row(&name),
        }
        new
    }

    fn put_slice(&mut self, name: ObjectName, parsed: Parsed<Packed>) -> Vec<Problem> {
        let new = self.note(ResourceKind::EndpointSlices, &name, parsed.problems);
        let before = self.slices.get(&name);
        if before == parsed.row.as_ref() {
            return new;
        }
        let service = |row: &Packed| SliceRow::packed_service(row).to_owned();
        if before.map(service) != parsed.row.as_ref().map(service) {
            self.drop_slice_row(&name);
        }
        let Some(row) = parsed.row else { return new };
        let service = self.service_of(&name, &row);
        self.mark(service.clone());
        // The name as it is there already, if it is: one text for all who have it.
        let name = self.slices.get_key_value(&name).map_or(name, |(known, _)| known.clone());
        self.slices_of.insert((service, name.name.clone()));
        self.slices.insert(name, row);
        new
    }

    /// The Service of a slice.
    fn service_of(&self, slice: &ObjectName, row: &Packed) -> Arc<ServiceName> {
        let service = SliceRow::packed_service(row);
        self.known_service(&ServiceName { namespace: slice.namespace.clone(), name: service.into() })
    }

    /// The name as others have it, if some do.
    fn known_service(&self, name: &ServiceName) -> Arc<ServiceName> {
        if let Some((known, _)) = self.services.get_key_value(name) {
            return known.clone();
        }
        let name = Arc::new(name.clone());
        let of_slice = self.slices_of.range((name.clone(), Arc::default())..).next().map(|(service, _)| service);
        of_slice.filter(|service| **service == name).cloned().unwrap_or(name)
    }

    fn remove_service(&mut self, name: &ServiceName) {
        self.problems.remove(&(ResourceKind::Services, name.clone()));
        self.drop_service_row(name);
    }

    fn remove_slice(&mut self, name: &ObjectName) {
        self.problems.remove(&(ResourceKind::EndpointSlices, name.clone()));
        self.drop_slice_row(name);
    }

    fn drop_service_row(&mut self, name: &ServiceName) {
        if let Some((name, _)) = self.services.remove_entry(name) {
            self.mark(name);
        }
    }

    fn drop_slice_row(&mut self, name: &ObjectName) {
        let Some(row) = self.slices.remove(name) else { return };
        let of_service = (self.service_of(name, &row), name.name.clone());
        self.slices_of.remove(&of_service);
        self.mark(of_service.0);
    }

    /// Remembers an object's problems; gives back those that it did not have before.
    fn note(&mut self, kind: ResourceKind, name: &ObjectName, problems: Box<[Problem]>) -> Vec<Problem> {
        if problems.is_empty() && self.problems.is_empty() {
            return Vec::new();
        }
        let key = (kind, name.clone());
        if problems.is_empty() {
            self.problems.remove(&key);
            return Vec::new();
        }
        let before = self.problems.insert(key, problems.clone()).unwrap_or_default();
        problems.into_iter().filter(|problem| !before.contains(problem)).collect()
    }
}

/// What came in one after the other, in order, has left a tree's nodes half empty; built at once they are full.
pub(super) fn refill<Key: Ord, Value>(rows: &mut BTreeMap<Key, Value>) {
    *rows = std::mem::take(rows).into_iter().collect();
}

fn nameless(kind: &str) -> Problem {
    Problem::new(kind, "metadata.name", "missing; the object is ignored")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{desired_rows, resolve};

    fn web() -> ServiceName {
        ServiceName::new("default", "web")
    }

    fn service(port: u16) -> Event {
        let object = serde_json::json!({"metadata": {"name": "web"},
                                        "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": port}]}});
        Event::Service(serde_json::from_value(object).unwrap())
    }

    fn unreadable(name: ServiceName) -> Event {
        Event::Unreadable { kind: ResourceKind::Services, name: Some(name), message: "spec.ports: no".to_owned() }
    }

    fn problems(store: &Store) -> Vec<String> {
        store.problems().map(ToString::to_string).collect()
    }

    #[test]
    fn an_object_that_can_no_longer_be_read_keeps_its_last_state() {
        let mut store = Store::new(NodeContext::default());
        let lists = |objects: Vec<Event>| {
            let kinds = [ResourceKind::Services, ResourceKind::EndpointSlices];
            let (started, done) = (kinds.map(Event::ListStarted), kinds.map(Event::ListDone));
            started.into_iter().chain(objects).chain(done).collect::<Vec<_>>()
        };
        let apply =
            |store: &mut Store, events: Vec<Event>| events.into_iter().for_each(|event| drop(store.apply(event)));
        apply(&mut store, lists(vec![service(80)]));
        let before = resolve(&store);
        assert_eq!(before.len(), 1);
        let stays = ["Service default/web: spec.ports: no; its last state stays"];

        assert_eq!(store.apply(unreadable(web())).len(), 1);
        assert_eq!((resolve(&store), problems(&store)), (before.clone(), stays.map(str::to_owned).to_vec()));
        assert!(store.apply(unreadable(web())).is_empty(), "the same is told once");
        apply(&mut store, lists(vec![unreadable(web())]));
        assert_eq!((resolve(&store), problems(&store)), (before, stays.map(str::to_owned).to_vec()));

        store.apply(service(81));
        assert_eq!(desired_rows(&store, &web()).first().map(|row| row.frontend.port), Some(81));
        assert!(problems(&store).is_empty());

        apply(&mut store, lists(vec![service(80), unreadable(web())]));
        assert_eq!(desired_rows(&store, &web()).first().map(|row| row.frontend.port), Some(81), "the last one counts");
        let mut new = Store::new(NodeContext::default());
        apply(&mut new, lists(vec![service(80), unreadable(web())]));
        assert_eq!(resolve(&new).len(), 1, "of nothing known, an earlier definition counts");

        store.apply(unreadable(web()));
        store.apply(Event::ServiceDeleted(web()));
        assert!(resolve(&store).is_empty() && problems(&store).is_empty());
        store.apply(unreadable(web()));
        assert_eq!(problems(&store), ["Service default/web: spec.ports: no; ignored"]);
        let nameless = Event::Unreadable { kind: ResourceKind::Services, name: None, message: String::new() };
        assert_eq!(
            store.apply(nameless).first().map(ToString::to_string).unwrap(),
            "Service: metadata.name: missing; the object is ignored"
        );
    }
}
