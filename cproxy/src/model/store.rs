//! What is known of the cluster: compact rows of Services and EndpointSlices.
//!
//! A relist is staged beside the rows in force and takes their place at its end, so that a half-read list never thins a
//! table.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use super::{Address, ObjectName, Own, Problem, ServiceName, ServiceRow, SliceRow, own::NodeRow};
use crate::k8s::objects::{EndpointSlice, Node, Service};

/// The kinds that a source delivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// v1 Service.
    Services,
    /// discovery.k8s.io/v1 EndpointSlice.
    EndpointSlices,
    /// v1 Node.
    Nodes,
}

impl Kind {
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
    ListStarted(Kind),
    /// The list is complete.
    ListDone(Kind),
    /// A Service is, or was changed to be, so.
    Service(Box<Service>),
    /// A Service is gone.
    ServiceDeleted(ServiceName),
    /// An EndpointSlice is, or was changed to be, so.
    EndpointSlice(Box<EndpointSlice>),
    /// An EndpointSlice is gone.
    EndpointSliceDeleted(ObjectName),
    /// A Node is, or was changed to be, so. Only the own one counts.
    Node(Box<Node>),
    /// The Node of this name is gone.
    NodeDeleted(String),
    /// An object is, or was changed to be, what cannot be read.
    Unreadable {
        /// Its kind.
        kind: Kind,
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
    own: Own,
    /// The own Node, while there is one.
    node: Option<NodeRow>,
    /// A list of Nodes is under way: what it has said of the own one.
    staged_node: Option<Option<Parsed<NodeRow>>>,
    nodes_complete: bool,
    services: HashMap<ServiceName, ServiceRow>,
    slices: HashMap<ServiceName, BTreeMap<ObjectName, SliceRow>>,
    service_of_slice: HashMap<ObjectName, ServiceName>,
    staged_services: Option<HashMap<ServiceName, Parsed<ServiceRow>>>,
    staged_slices: Option<HashMap<ObjectName, Parsed<SliceRow>>>,
    services_complete: bool,
    slices_complete: bool,
    dirty: BTreeSet<ServiceName>,
    problems: BTreeMap<(Kind, ObjectName), Vec<Problem>>,
}

/// A row (or none, if the object is not served) and what was wrong with its object.
#[derive(Debug)]
struct Parsed<Row> {
    row: Option<Row>,
    problems: Vec<Problem>,
}

impl Store {
    /// An empty store, as seen from this place.
    #[must_use]
    pub fn new(own: Own) -> Self {
        Self { own, ..Self::default() }
    }

    /// Takes an event in. Returns the problems that are new with it.
    pub fn apply(&mut self, event: Event) -> Vec<Problem> {
        match event {
            Event::ListStarted(Kind::Services) => self.staged_services = Some(HashMap::new()),
            Event::ListStarted(Kind::EndpointSlices) => self.staged_slices = Some(HashMap::new()),
            Event::ListStarted(Kind::Nodes) => self.staged_node = Some(None),
            Event::ListDone(Kind::Services) => return self.services_listed(),
            Event::ListDone(Kind::EndpointSlices) => return self.slices_listed(),
            Event::ListDone(Kind::Nodes) => return self.nodes_listed(),
            Event::Service(service) => return self.take_service(&service),
            Event::EndpointSlice(slice) => return self.take_slice(&slice),
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

    /// The Services whose rows or slices have changed since the last call.
    pub fn take_dirty(&mut self) -> BTreeSet<ServiceName> {
        std::mem::take(&mut self.dirty)
    }

    /// The Service of that name.
    #[must_use]
    pub fn service_row(&self, name: &ServiceName) -> Option<&ServiceRow> {
        self.services.get(name)
    }

    /// All Services.
    pub fn services(&self) -> impl Iterator<Item = (&ServiceName, &ServiceRow)> {
        self.services.iter()
    }

    /// The slices of a Service, ordered by name.
    pub fn slices(&self, name: &ServiceName) -> impl Iterator<Item = &SliceRow> {
        self.slices.get(name).into_iter().flat_map(BTreeMap::values)
    }

    /// The slices of a Service with their names, ordered by them.
    pub fn named_slices(&self, name: &ServiceName) -> impl Iterator<Item = (&ObjectName, &SliceRow)> {
        self.slices.get(name).into_iter().flatten()
    }

    /// The slice of that name.
    #[must_use]
    pub fn slice(&self, name: &ObjectName) -> Option<&SliceRow> {
        self.slices.get(self.service_of_slice.get(name)?)?.get(name)
    }

    /// What is wrong now, ordered by object.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.problems.values().flatten()
    }

    fn take_service(&mut self, service: &Service) -> Vec<Problem> {
        let Some(name) = object_name(&service.metadata) else { return vec![nameless("Service")] };
        let mut problems = Vec::new();
        let row = ServiceRow::from_object(&name, service, self.own.node_name.as_deref(), &mut problems);
        let parsed = Parsed { row, problems };
        match &mut self.staged_services {
            Some(staged) => drop(staged.insert(name, parsed)),
            None => return self.put_service(name, parsed),
        }
        Vec::new()
    }

    fn take_slice(&mut self, slice: &EndpointSlice) -> Vec<Problem> {
        let Some(name) = object_name(&slice.metadata) else { return vec![nameless("EndpointSlice")] };
        let mut problems = Vec::new();
        let row = SliceRow::from_object(&name, slice, self.own.node_name.as_deref(), &mut problems);
        let parsed = Parsed { row, problems };
        match &mut self.staged_slices {
            Some(staged) => drop(staged.insert(name, parsed)),
            None => return self.put_slice(name, parsed),
        }
        Vec::new()
    }

    fn is_own(&self, node: &str) -> bool {
        self.own.node_name.as_deref() == Some(node)
    }

    fn take_node(&mut self, node: &Node) -> Vec<Problem> {
        let Some(name) = node.metadata.name.as_deref().filter(|name| self.is_own(name)) else { return Vec::new() };
        let mut problems = Vec::new();
        let row = NodeRow::from_object(name, node, &mut problems);
        let parsed = Some(Parsed { row: Some(row), problems });
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
        let new = self.note(Kind::Nodes, &name, problems);
        let before = (self.zone().cloned(), self.node_ips().to_vec());
        self.node = row;
        if before != (self.zone().cloned(), self.node_ips().to_vec()) {
            self.dirty.extend(self.services.keys().cloned());
        }
        new
    }

    fn set_pod_ips(&mut self, addresses: Vec<Address>) {
        if self.own.pod_ips != addresses {
            self.own.pod_ips = addresses;
            let restricted = self.services.iter().filter(|(_, service)| !service.source_ranges.is_empty());
            self.dirty.extend(restricted.map(|(name, _)| name.clone()));
        }
    }

    /// What an object was before it could no longer be read, it stays; if it was nothing, an earlier definition in the
    /// same list counts.
    fn take_unreadable(&mut self, kind: Kind, name: Option<ObjectName>, message: &str) -> Vec<Problem> {
        let Some(name) = name else { return vec![nameless(kind.singular())] };
        let stays = |is_known: bool| if is_known { "its last state stays" } else { "ignored" };
        let problems =
            |label: String, is_known: bool| vec![Problem::new(label, "", format!("{message}; {}", stays(is_known)))];
        match kind {
            Kind::Services => {
                let row = self.services.get(&name).cloned();
                match &mut self.staged_services {
                    Some(staged) => {
                        let row = row.or_else(|| staged.remove(&name).and_then(|earlier| earlier.row));
                        let problems = problems(format!("Service {name}"), row.is_some());
                        staged.insert(name, Parsed { row, problems });
                    }
                    None => return self.note(kind, &name, problems(format!("Service {name}"), row.is_some())),
                }
            }
            Kind::EndpointSlices => {
                let row = self.slice(&name).cloned();
                match &mut self.staged_slices {
                    Some(staged) => {
                        let row = row.or_else(|| staged.remove(&name).and_then(|earlier| earlier.row));
                        let problems = problems(format!("EndpointSlice {name}"), row.is_some());
                        staged.insert(name, Parsed { row, problems });
                    }
                    None => return self.note(kind, &name, problems(format!("EndpointSlice {name}"), row.is_some())),
                }
            }
            Kind::Nodes if !self.is_own(&name.name) => {}
            Kind::Nodes => {
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
        self.services_complete = true;
        let gone: Vec<_> = self.known(Kind::Services).filter(|name| !staged.contains_key(name)).collect();
        gone.iter().for_each(|name| self.remove_service(name));
        staged.into_iter().flat_map(|(name, parsed)| self.put_service(name, parsed)).collect()
    }

    fn slices_listed(&mut self) -> Vec<Problem> {
        let staged = self.staged_slices.take().unwrap_or_default();
        self.slices_complete = true;
        let gone: Vec<_> = self.known(Kind::EndpointSlices).filter(|name| !staged.contains_key(name)).collect();
        gone.iter().for_each(|name| self.remove_slice(name));
        staged.into_iter().flat_map(|(name, parsed)| self.put_slice(name, parsed)).collect()
    }

    /// Every object of a kind that left a trace: a row, or only problems.
    fn known(&self, kind: Kind) -> impl Iterator<Item = ObjectName> {
        let rows: Vec<ObjectName> = match kind {
            Kind::Services => self.services.keys().cloned().collect(),
            Kind::EndpointSlices => self.service_of_slice.keys().cloned().collect(),
            Kind::Nodes => Vec::new(),
        };
        let troubled = self.problems.keys().filter(move |key| key.0 == kind).map(|key| key.1.clone());
        rows.into_iter().chain(troubled.collect::<Vec<_>>())
    }

    fn put_service(&mut self, name: ServiceName, parsed: Parsed<ServiceRow>) -> Vec<Problem> {
        let new = self.note(Kind::Services, &name, parsed.problems);
        match parsed.row {
            Some(row) if self.services.get(&name) == Some(&row) => {}
            Some(row) => {
                self.dirty.insert(name.clone());
                self.services.insert(name, row);
            }
            None => self.drop_service_row(&name),
        }
        new
    }

    fn put_slice(&mut self, name: ObjectName, parsed: Parsed<SliceRow>) -> Vec<Problem> {
        let new = self.note(Kind::EndpointSlices, &name, parsed.problems);
        let moved = parsed.row.as_ref().map(|row| &row.service) != self.service_of_slice.get(&name);
        if moved {
            self.drop_slice_row(&name);
        }
        let Some(row) = parsed.row else { return new };
        let slices = self.slices.entry(row.service.clone()).or_default();
        if slices.get(&name) != Some(&row) {
            self.dirty.insert(row.service.clone());
            self.service_of_slice.insert(name.clone(), row.service.clone());
            slices.insert(name, row);
        }
        new
    }

    fn remove_service(&mut self, name: &ServiceName) {
        self.problems.remove(&(Kind::Services, name.clone()));
        self.drop_service_row(name);
    }

    fn remove_slice(&mut self, name: &ObjectName) {
        self.problems.remove(&(Kind::EndpointSlices, name.clone()));
        self.drop_slice_row(name);
    }

    fn drop_service_row(&mut self, name: &ServiceName) {
        if self.services.remove(name).is_some() {
            self.dirty.insert(name.clone());
        }
    }

    fn drop_slice_row(&mut self, name: &ObjectName) {
        let Some(service) = self.service_of_slice.remove(name) else { return };
        if let Some(slices) = self.slices.get_mut(&service) {
            slices.remove(name);
            if slices.is_empty() {
                self.slices.remove(&service);
            }
        }
        self.dirty.insert(service);
    }

    /// Remembers an object's problems; gives back those that it did not have before.
    fn note(&mut self, kind: Kind, name: &ObjectName, problems: Vec<Problem>) -> Vec<Problem> {
        let key = (kind, name.clone());
        if problems.is_empty() {
            self.problems.remove(&key);
            return problems;
        }
        let before = self.problems.insert(key, problems.clone()).unwrap_or_default();
        problems.into_iter().filter(|problem| !before.contains(problem)).collect()
    }
}

/// The name under which an object is known, if it has one.
pub(crate) fn object_name(metadata: &kube::core::ObjectMeta) -> Option<ObjectName> {
    let name = metadata.name.as_deref().filter(|name| !name.is_empty())?;
    let namespace = metadata.namespace.as_deref().filter(|namespace| !namespace.is_empty());
    Some(ObjectName::new(namespace.unwrap_or("default"), name))
}

fn nameless(kind: &str) -> Problem {
    Problem::new(kind, "metadata.name", "missing; the object is ignored")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{desired_rows, resolve};

    fn web() -> ServiceName {
        ServiceName::new("default", "web")
    }

    fn service(port: u16) -> Event {
        let object = serde_json::json!({"metadata": {"name": "web"},
                                        "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": port}]}});
        Event::Service(serde_json::from_value(object).unwrap())
    }

    fn unreadable(name: ServiceName) -> Event {
        Event::Unreadable { kind: Kind::Services, name: Some(name), message: "spec.ports: no".to_owned() }
    }

    fn problems(store: &Store) -> Vec<String> {
        store.problems().map(ToString::to_string).collect()
    }

    #[test]
    fn an_object_that_can_no_longer_be_read_keeps_its_last_state() {
        let mut store = Store::new(Own::default());
        let lists = |objects: Vec<Event>| {
            let kinds = [Kind::Services, Kind::EndpointSlices];
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
        let mut new = Store::new(Own::default());
        apply(&mut new, lists(vec![service(80), unreadable(web())]));
        assert_eq!(resolve(&new).len(), 1, "of nothing known, an earlier definition counts");

        store.apply(unreadable(web()));
        store.apply(Event::ServiceDeleted(web()));
        assert!(resolve(&store).is_empty() && problems(&store).is_empty());
        store.apply(unreadable(web()));
        assert_eq!(problems(&store), ["Service default/web: spec.ports: no; ignored"]);
        let nameless = Event::Unreadable { kind: Kind::Services, name: None, message: String::new() };
        assert_eq!(
            store.apply(nameless).first().map(ToString::to_string).unwrap(),
            "Service: metadata.name: missing; the object is ignored"
        );
    }
}
