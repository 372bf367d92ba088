//! Cluster state: compact rows of Services and EndpointSlices.
//!
//! A relist is staged beside the rows in force and replaces them at its end, so that a half-read list never shrinks a
//! table. One that lacks most of them is held back until a second one agrees.
//!
//! Packed rows are in trees: a hash map would be half empty after it has grown, and in memory twice while it grows.

mod held;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

pub(crate) use held::is_most;
use held::{Held, Objects, Staged};
pub use held::{ListReport, ListSource, ListVerdict, SECOND_LIST_AFTER};

use super::{
    Address, ExternalIps, NodeContext, ObjectName, ObjectRow, Problem, ResourceKind, ServiceName, ServiceRow, SliceRow,
    names::Texts, node_context::NodeRow, object_row::Parsed, packed::Packed,
};
use crate::api::{EndpointSlice, Node, Service};

/// Event of a source. The list of a kind is `ListStarted`, objects, `ListDone`; objects that it did not name are gone.
#[derive(Clone, Debug)]
pub enum Event {
    /// Start of a complete list of a kind. An unfinished list is discarded.
    ListStarted(ResourceKind),
    /// Origin of the list that is about to end. One without an origin counts whatever it lacks.
    ListFrom(ResourceKind, ListSource),
    /// End of the list.
    ListDone(ResourceKind),
    /// Service that exists or was changed.
    Service(Box<Service>),
    /// EndpointSlice that exists or was changed.
    EndpointSlice(Box<EndpointSlice>),
    /// Row of a Service or an EndpointSlice that exists or was changed, from a source that stores rows itself.
    Row(ObjectRow),
    /// Node that exists or was changed. Only this node counts.
    Node(Box<Node>),
    /// Kind and name of a deleted object.
    Deleted(ResourceKind, ObjectName),
    /// Object that exists or was changed, and cannot be decoded.
    Unreadable {
        /// Kind of the object.
        kind: ResourceKind,
        /// Name of the object, if that can be read.
        name: Option<ObjectName>,
        /// Error in the object.
        message: String,
    },
    /// Current addresses of the VM.
    PodIps(Vec<Address>),
    /// Given addresses of the node; empty: those of its Node.
    NodeIps(Vec<Address>),
    /// Treatment of the external addresses of Services.
    ExternalIps(ExternalIps),
    /// Present problems of a source that knows more of its objects than the store does, such as files.
    SourceProblems {
        /// Parts of it that cannot be read. They may have any object.
        unread: Vec<Problem>,
        /// Other problems.
        others: Vec<Problem>,
    },
    /// The objects of a kind were compared with the source as it was after the comparison of this number was asked for:
    /// all changes until then have arrived.
    Compared(ResourceKind, u64),
}

impl Event {
    /// Kind of the object that the event adds, changes or deletes, if it does.
    #[must_use]
    pub fn changed_kind(&self) -> Option<ResourceKind> {
        match self {
            Self::Service(_) => Some(ResourceKind::Services),
            Self::EndpointSlice(_) => Some(ResourceKind::EndpointSlices),
            Self::Node(_) => Some(ResourceKind::Nodes),
            Self::Row(row) => Some(row.kind),
            Self::Deleted(kind, _) | Self::Unreadable { kind, .. } => Some(*kind),
            Self::ListStarted(_)
            | Self::ListFrom(..)
            | Self::ListDone(_)
            | Self::PodIps(_)
            | Self::NodeIps(_)
            | Self::ExternalIps(_)
            | Self::SourceProblems { .. }
            | Self::Compared(..) => None,
        }
    }
}

/// Rows in force.
#[derive(Debug, Default)]
pub struct Store {
    context: NodeContext,
    /// Node of the pod, while it exists.
    node: Option<StoredNode>,
    services: BTreeMap<Arc<ServiceName>, Packed>,
    /// Slices under the names of their Services.
    slices: BTreeMap<SliceKey, Packed>,
    /// Services of the slices whose names do not begin with them, as those of the EndpointSlice controller do.
    unlike_names: BTreeMap<ObjectName, Arc<ServiceName>>,
    namespaces: Texts,
    lists: Lists,
    dirty: BTreeSet<Arc<ServiceName>>,
    list_reports: Vec<ListReport>,
    problems: BTreeMap<(ResourceKind, ObjectName), Box<[Problem]>>,
    /// Parts of the source that cannot be read, and its other problems.
    source_problems: [Vec<Problem>; 2],
}

/// Service and name of a slice.
type SliceKey = (Arc<ServiceName>, Arc<str>);

/// Node of the pod.
#[derive(Debug)]
struct StoredNode {
    name: ObjectName,
    packed: Packed,
    row: NodeRow,
}

/// Lists of all kinds.
#[derive(Debug, Default)]
struct Lists {
    services: List,
    slices: List,
    nodes: List,
}

/// List of one kind.
#[derive(Debug, Default)]
struct List {
    /// Objects of the list that is under way, and its origin.
    staged: Option<Staged>,
    source: Option<ListSource>,
    held: Option<Held>,
    /// View of the rows in force.
    view: Option<Arc<str>>,
    /// A list was complete at least once.
    is_complete: bool,
    /// Number of the comparison with the source that was asked for and has not ended.
    awaited_comparison: Option<u64>,
}

/// Start of namespaces that no object of a source has: for objects of the agent's own.
const OWN: char = '~';

/// Whether objects of this namespace are the agent's own.
pub(crate) fn is_own(namespace: &str) -> bool {
    namespace.starts_with(OWN)
}

impl Lists {
    fn of(&mut self, kind: ResourceKind) -> &mut List {
        match kind {
            ResourceKind::Services => &mut self.services,
            ResourceKind::EndpointSlices => &mut self.slices,
            ResourceKind::Nodes => &mut self.nodes,
        }
    }
}

impl Store {
    /// Empty store, as seen from this node and VM.
    #[must_use]
    pub fn new(context: NodeContext) -> Self {
        Self { context, ..Self::default() }
    }

    /// Applies an event. Returns its new problems.
    pub fn apply(&mut self, event: Event) -> Vec<Problem> {
        match event {
            Event::ListStarted(kind) => {
                let list = self.lists.of(kind);
                (list.staged, list.source) = (Some(Staged::default()), None);
            }
            Event::ListFrom(kind, source) => self.lists.of(kind).source = Some(source),
            Event::ListDone(kind) => return self.finish_list(kind),
            Event::Service(service) => {
                return self.apply_row(ResourceKind::Services, ObjectRow::of_service(&service, self.node_name()));
            }
            Event::EndpointSlice(slice) => {
                return self.apply_row(ResourceKind::EndpointSlices, ObjectRow::of_slice(&slice, self.node_name()));
            }
            Event::Node(node) => {
                let row = ObjectRow::of_node(&node).filter(|row| self.is_pods_node(&row.name.name));
                return row.map_or_else(Vec::new, |row| self.apply_row(ResourceKind::Nodes, Some(row)));
            }
            Event::Row(row) => return self.apply_row(row.kind, Some(row)),
            Event::Deleted(kind, name) => return self.delete(kind, &scoped(kind, name)),
            Event::Unreadable { kind, name, message } => return self.apply_unreadable(kind, name, &message),
            Event::PodIps(addresses) => self.set_pod_ips(addresses),
            Event::ExternalIps(external_ips) => self.set_external_ips(external_ips),
            Event::SourceProblems { unread, others } => self.source_problems = [unread, others],
            Event::NodeIps(addresses) => self.change_node(|store| store.context.node_ips = addresses),
            // An earlier comparison may have shown an earlier state.
            Event::Compared(kind, number) => {
                self.lists.of(kind).awaited_comparison.take_if(|awaited| *awaited <= number);
            }
        }
        Vec::new()
    }

    /// Whether an event changes nothing but a list that is under way, or begins one.
    #[must_use]
    pub fn is_of_pending_list(&self, event: &Event) -> bool {
        let Lists { services, slices, nodes } = &self.lists;
        match (event, event.changed_kind()) {
            (Event::ListStarted(_), _) => true,
            (_, Some(ResourceKind::Services)) => services.staged.is_some(),
            (_, Some(ResourceKind::EndpointSlices)) => slices.staged.is_some(),
            (_, Some(ResourceKind::Nodes)) => nodes.staged.is_some(),
            (_, None) => false,
        }
    }

    /// Whether all kinds that count have been listed completely at least once. Nothing may be derived from the store
    /// before that.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.pending_lists().next().is_none()
    }

    /// Kinds without a complete list so far, of those that count.
    pub fn pending_lists(&self) -> impl Iterator<Item = ResourceKind> {
        let Lists { services, slices, nodes } = &self.lists;
        let lists = [
            (ResourceKind::Services, services.is_complete),
            (ResourceKind::EndpointSlices, slices.is_complete),
            (ResourceKind::Nodes, nodes.is_complete || self.context.node_name.is_none()),
        ];
        lists.into_iter().filter(|(_, is_complete)| !is_complete).map(|(kind, _)| kind)
    }

    /// Whether a list is held back that lacks most objects.
    #[must_use]
    pub fn is_in_doubt(&self) -> bool {
        self.lists.services.held.is_some() || self.lists.slices.held.is_some()
    }

    /// Decisions since the last call about lists that lack most objects.
    pub fn take_list_reports(&mut self) -> Vec<ListReport> {
        std::mem::take(&mut self.list_reports)
    }

    /// Whether the Node of this name exists; `None` without a name.
    #[must_use]
    pub fn has_node(&self) -> Option<bool> {
        self.context.node_name.as_ref().map(|_| self.node.is_some())
    }

    /// Expects the comparison of this number with the source, or a later one: the objects may have changed unseen.
    pub fn await_comparison(&mut self, number: u64) {
        for list in [&mut self.lists.services, &mut self.lists.slices] {
            list.awaited_comparison = Some(number);
        }
    }

    /// Whether Services and EndpointSlices have been compared with the source since [`Store::await_comparison`]. The
    /// Node is optional for every source, and so is its comparison.
    #[must_use]
    pub fn is_compared(&self) -> bool {
        self.lists.services.awaited_comparison.is_none() && self.lists.slices.awaited_comparison.is_none()
    }

    /// Name of this node, if it is known.
    #[must_use]
    pub fn node_name(&self) -> Option<&str> {
        self.context.node_name.as_deref()
    }

    /// Zone of this node, if it is known.
    #[must_use]
    pub fn zone(&self) -> Option<&Arc<str>> {
        self.node.as_ref().and_then(|node| node.row.zone.as_ref())
    }

    /// Addresses of this node: the given ones, else those of its Node.
    #[must_use]
    pub fn node_ips(&self) -> &[Address] {
        let of_node = || self.node.as_ref().map_or(&[][..], |node| &node.row.internal_ips);
        if self.context.node_ips.is_empty() { of_node() } else { &self.context.node_ips }
    }

    /// Addresses of the VM.
    #[must_use]
    pub fn pod_ips(&self) -> &[Address] {
        &self.context.pod_ips
    }

    /// Whether external addresses of Services are served.
    pub(super) fn serves_external_ips(&self) -> bool {
        self.context.external_ips == ExternalIps::Serve
    }

    /// Services whose rows or slices have changed since the last call; none until the store is complete.
    pub fn take_dirty(&mut self) -> BTreeSet<Arc<ServiceName>> {
        std::mem::take(&mut self.dirty)
    }

    /// Row of the Service of that name.
    #[must_use]
    pub fn service_row(&self, name: &ServiceName) -> Option<ServiceRow> {
        self.services.get(name).map(|packed| ServiceRow::unpack(packed))
    }

    /// Rows of all Services, ordered by name.
    pub fn services(&self) -> impl Iterator<Item = (&ServiceName, ServiceRow)> {
        self.services.iter().map(|(name, packed)| (&**name, ServiceRow::unpack(packed)))
    }

    /// Rows of all Services, each with the number of backends that its slices have for all of their ports.
    pub(super) fn services_with_backends(&self) -> impl Iterator<Item = (ServiceRow, usize)> {
        let mut slices = self.slices.iter().peekable();
        self.services.iter().map(move |(name, row)| {
            let mut backends = 0_usize;
            while let Some(((service, _), slice)) = slices.next_if(|((service, _), _)| service <= name) {
                if service == name {
                    backends = backends.saturating_add(SliceRow::packed_backends(slice));
                }
            }
            (ServiceRow::unpack(row), backends)
        })
    }

    /// Names of all Services, ordered.
    pub fn service_names(&self) -> impl ExactSizeIterator<Item = &Arc<ServiceName>> {
        self.services.keys()
    }

    /// Slices of a Service with their names, ordered by name.
    pub fn slices(&self, service: &ServiceName) -> impl Iterator<Item = (ObjectName, SliceRow)> {
        let slices = self.slices_of(self.known_service(service));
        slices.map(|(service, name, packed)| (slice_name(service, name), SliceRow::unpack(packed)))
    }

    /// Row of a Service, and its name as the store has it.
    pub(super) fn named_service(&self, name: &ServiceName) -> Option<(&Arc<ServiceName>, ServiceRow)> {
        let (name, packed) = self.services.get_key_value(name)?;
        Some((name, ServiceRow::unpack(packed)))
    }

    /// Rows of the slices of a Service of this name, ordered by name: cheaper than one by one.
    pub(super) fn slice_rows(&self, service: &Arc<ServiceName>) -> impl Iterator<Item = SliceRow> {
        self.slices_of(service.clone()).map(|(_, _, packed)| SliceRow::unpack(packed))
    }

    fn slices_of(&self, service: Arc<ServiceName>) -> impl Iterator<Item = (&ServiceName, &Arc<str>, &Packed)> {
        let from = self.slices.range((service.clone(), Arc::default())..);
        let of_service = from.take_while(move |((other, _), _)| Arc::ptr_eq(other, &service) || *other == service);
        of_service.map(|((service, name), packed)| (&**service, name, packed))
    }

    /// Row of the slice of that name.
    #[must_use]
    pub fn slice(&self, name: &ObjectName) -> Option<SliceRow> {
        self.packed_slice(name).map(|packed| SliceRow::unpack(packed))
    }

    /// Parts of the source that cannot be read now. They may have any object.
    #[must_use]
    pub fn unread(&self) -> &[Problem] {
        let [unread, _] = &self.source_problems;
        unread
    }

    /// Problems of the source, also those of parts that cannot be read.
    pub fn source_problems(&self) -> impl Iterator<Item = &Problem> {
        self.source_problems.iter().flatten()
    }

    /// Current problems: of the source, then by object.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.source_problems().chain(self.problems.values().flatten())
    }

    fn apply_row(&mut self, kind: ResourceKind, row: Option<ObjectRow>) -> Vec<Problem> {
        let Some(ObjectRow { kind, mut name, parsed }) = row else { return vec![nameless(kind.singular())] };
        name.namespace = self.namespaces.share(&name.namespace);
        let list = self.lists.of(kind);
        if let Some(staged) = &mut list.staged {
            staged.insert(name, parsed);
            return Vec::new();
        }
        if let Some(held) = &mut list.held {
            held.candidate.insert(name.clone(), parsed.clone());
        }
        let new = self.put(kind, name, parsed);
        new.into_iter().chain(self.settle(kind)).collect()
    }

    fn delete(&mut self, kind: ResourceKind, name: &ObjectName) -> Vec<Problem> {
        let list = self.lists.of(kind);
        if let Some(staged) = &mut list.staged {
            staged.insert(name.clone(), Parsed { row: None, problems: Box::default() });
            return Vec::new();
        }
        if let Some(held) = &mut list.held {
            held.candidate.remove(name);
        }
        self.remove(kind, name);
        self.settle(kind)
    }

    fn packed(&self, kind: ResourceKind, name: &ObjectName) -> Option<&Packed> {
        match kind {
            ResourceKind::Services => self.services.get(name),
            ResourceKind::EndpointSlices => self.packed_slice(name),
            ResourceKind::Nodes => self.node.as_ref().filter(|node| node.name == *name).map(|node| &node.packed),
        }
    }

    fn packed_slice(&self, name: &ObjectName) -> Option<&Packed> {
        self.find_slice(name).map(|(_, packed)| packed)
    }

    /// Key and row of the slice of that name.
    fn find_slice(&self, name: &ObjectName) -> Option<(&SliceKey, &Packed)> {
        if self.slices.is_empty() {
            return None;
        }
        let under = |service: Arc<ServiceName>| self.slices.get_key_value(&(service, name.name.clone()));
        let named = |service: &str| ServiceName { namespace: name.namespace.clone(), name: service.into() };
        match self.unlike_names.get(name) {
            Some(service) => under(service.clone()),
            None => services_of_name(&name.name).find_map(|service| under(Arc::new(named(service)))),
        }
    }

    fn put(&mut self, kind: ResourceKind, name: ObjectName, parsed: Parsed<Packed>) -> Vec<Problem> {
        let new = self.record_problems(kind, &name, parsed.problems);
        self.put_row(kind, name, parsed.row);
        new
    }

    fn remove(&mut self, kind: ResourceKind, name: &ObjectName) {
        self.problems.remove(&(kind, name.clone()));
        self.put_row(kind, name.clone(), None);
    }

    /// Replaces the row of an object, and marks the Services that it concerns.
    fn put_row(&mut self, kind: ResourceKind, name: ObjectName, row: Option<Packed>) {
        match kind {
            ResourceKind::EndpointSlices => self.put_slice(name, row),
            ResourceKind::Services | ResourceKind::Nodes if self.packed(kind, &name) == row.as_ref() => {}
            ResourceKind::Services => self.put_service(&name, row),
            ResourceKind::Nodes => self.put_node(name, row),
        }
    }

    fn is_pods_node(&self, node: &str) -> bool {
        self.context.node_name.as_deref() == Some(node)
    }

    fn put_node(&mut self, name: ObjectName, row: Option<Packed>) {
        let node = row.map(|packed| StoredNode { name, row: NodeRow::unpack(&packed), packed });
        self.change_node(|store| store.node = node);
    }

    /// Changes the node. Its zone and addresses concern all Services.
    fn change_node(&mut self, change: impl FnOnce(&mut Self)) {
        let before = (self.zone().cloned(), self.node_ips().to_vec());
        change(self);
        if before != (self.zone().cloned(), self.node_ips().to_vec()) && self.is_complete() {
            self.dirty.extend(self.services.keys().cloned());
        }
    }

    fn set_pod_ips(&mut self, addresses: Vec<Address>) {
        if self.context.pod_ips != addresses {
            let before = std::mem::replace(&mut self.context.pod_ips, addresses);
            let own = [before, self.context.pod_ips.clone()].concat();
            self.mark_each(|service| {
                let mut outside = service.external_ips.iter().chain(&service.load_balancer_ips);
                !service.source_ranges.is_empty() || outside.any(|address| own.contains(address))
            });
        }
    }

    fn set_external_ips(&mut self, external_ips: ExternalIps) {
        if self.context.external_ips != external_ips {
            self.context.external_ips = external_ips;
            self.mark_each(|service| !service.external_ips.is_empty());
        }
    }

    /// Marks the Services that a change of a setting concerns.
    fn mark_each(&mut self, is_concerned: impl Fn(&ServiceRow) -> bool) {
        let concerned = self.services().filter(|(_, service)| is_concerned(service));
        let concerned: Vec<_> = concerned.map(|(name, _)| self.known_service(name)).collect();
        concerned.into_iter().for_each(|name| self.mark(name));
    }

    /// An undecodable object keeps its last good state or, failing that, an earlier definition in the list.
    fn apply_unreadable(&mut self, kind: ResourceKind, name: Option<ObjectName>, message: &str) -> Vec<Problem> {
        let Some(name) = name.map(|name| scoped(kind, name)) else { return vec![nameless(kind.singular())] };
        if kind == ResourceKind::Nodes && !self.is_pods_node(&name.name) {
            return Vec::new();
        }
        let problems = |row: &Option<Packed>| {
            let (kind, served) = (kind.singular(), if kind == ResourceKind::Services { "served" } else { "used" });
            let consequence = match row {
                Some(_) => "; its last state stays".to_owned(),
                None => format!(": this {kind} is not {served}"),
            };
            Box::from([Problem::new(format_args!("{kind} {name}"), "", message.to_owned() + &consequence)])
        };
        let row = self.packed(kind, &name).cloned();
        match &mut self.lists.of(kind).staged {
            Some(staged) => {
                let row = row.or_else(|| staged.row(&name).cloned());
                let problems = problems(&row);
                staged.insert(name, Parsed { row, problems });
                Vec::new()
            }
            None => {
                let problems = problems(&row);
                self.record_problems(kind, &name, problems)
            }
        }
    }

    /// Completes a list: objects that it did not name are gone.
    fn finish_list(&mut self, kind: ResourceKind) -> Vec<Problem> {
        let list = self.lists.of(kind);
        let (staged, source) = (list.staged.take().unwrap_or_default().finish(), list.source.take());
        let counting = match source {
            Some(source) => self.judge_list(kind, staged, source),
            None => {
                list.held = None;
                Some(staged)
            }
        };
        counting.map_or_else(Vec::new, |staged| self.replace_all(kind, staged))
    }

    /// Returns a list if it counts, and holds it back otherwise.
    fn judge_list(&mut self, kind: ResourceKind, staged: Objects, source: ListSource) -> Option<Objects> {
        let (missing, known) = self.loss(kind, &staged);
        let list = self.lists.of(kind);
        let is_same_view = list.view == source.view;
        let (verdict, counting) = match list.held.take() {
            held if !is_most(missing, known) => (held.map(|_| ListVerdict::Disagreed), Some(staged)),
            Some(held) if held.is_confirmed_by(&source) => (Some(ListVerdict::Agreed), Some(staged)),
            Some(held) => {
                list.held = Some(held.with(staged));
                (None, None)
            }
            None => {
                list.held = Some(Held::new(staged, &source));
                (Some(ListVerdict::Doubted), None)
            }
        };
        if counting.is_some() {
            list.view = source.view;
        }
        let server = source.server;
        self.list_reports.extend(verdict.map(|verdict| ListReport {
            kind,
            server,
            missing,
            known,
            verdict,
            is_same_view,
        }));
        counting
    }

    /// Number of objects in force that a list lacks, and of all. Objects of the agent's own do not count.
    fn loss(&self, kind: ResourceKind, staged: &Objects) -> (usize, usize) {
        if kind == ResourceKind::Nodes {
            return (0, 0);
        }
        let names = self.in_force(kind).filter(|name| !is_own(&name.namespace));
        names.fold((0, 0), |(missing, known), name| {
            let is_there = staged.get(&name).is_some_and(|parsed| parsed.row.is_some());
            (missing + usize::from(!is_there), known + 1)
        })
    }

    /// Lets a list count that was held back, once it does not lack most objects any more.
    fn settle(&mut self, kind: ResourceKind) -> Vec<Problem> {
        let Some(mut held) = self.lists.of(kind).held.take_if(|held| held.is_due()) else { return Vec::new() };
        let (missing, known) = self.loss(kind, &held.candidate);
        if is_most(missing, known) {
            held.still_lacks(missing, known);
            self.lists.of(kind).held = Some(held);
            return Vec::new();
        }
        let (server, verdict) = (held.server.clone(), ListVerdict::Disagreed);
        self.list_reports.push(ListReport { kind, server, missing, known, verdict, is_same_view: true });
        self.replace_all(kind, held.candidate)
    }

    /// Replaces the rows of a kind by those of a list.
    fn replace_all(&mut self, kind: ResourceKind, mut staged: Objects) -> Vec<Problem> {
        let gone: Vec<_> = self.known(kind).filter(|name| !staged.contains_key(name)).collect();
        gone.iter().for_each(|name| self.remove(kind, name));
        let mut new = Vec::new();
        for (name, parsed) in &mut staged {
            new.extend(self.record_problems(kind, name, std::mem::take(&mut parsed.problems)));
        }
        let rows = staged.into_iter().map(|(name, parsed)| (name, parsed.row));
        match kind {
            ResourceKind::Services => self.replace_services(rows),
            ResourceKind::EndpointSlices => self.replace_slices(rows),
            ResourceKind::Nodes => rows.for_each(|(name, row)| self.put_row(kind, name, row)),
        }
        self.namespaces.remove_unused();
        self.lists.of(kind).is_complete = true;
        new
    }

    /// Replaces the rows of all Services. `rows` are sorted by name, and have every Service that there is.
    fn replace_services(&mut self, rows: impl ExactSizeIterator<Item = (ObjectName, Option<Packed>)>) {
        let mut known = std::mem::take(&mut self.services).into_iter().peekable();
        let mut services = Vec::with_capacity(rows.len());
        for (name, row) in rows {
            let (name, before) = match known.next_if(|(known, _)| **known == name) {
                Some((name, before)) => (name, Some(before)),
                None => (self.known_service(&name), None),
            };
            // Of equal rows, the earlier one stays: the other is at the end of the heap, which can then shrink.
            let row = if before == row {
                before
            } else {
                self.mark(name.clone());
                row
            };
            services.extend(row.map(|row| (name, row)));
        }
        self.services = services.into_iter().collect();
    }

    /// Replaces the rows of all slices. `rows` are sorted by name, and have every slice that there is.
    fn replace_slices(&mut self, rows: impl ExactSizeIterator<Item = (ObjectName, Option<Packed>)>) {
        let mut slices = Vec::<(SliceKey, Packed)>::with_capacity(rows.len());
        let mut unlike_names = Vec::new();
        for (name, row) in rows {
            let before = self.find_slice(&name).map(|(key, packed)| (key.clone(), packed.clone()));
            let after = match (before, row) {
                (Some((key, packed)), Some(row)) if packed == row => Some((key, packed)),
                (before, row) => {
                    before.into_iter().for_each(|((service, _), _)| self.mark(service));
                    row.map(|row| {
                        // Slices of one Service mostly follow each other.
                        let last = slices.last().map(|((service, _), _)| service);
                        let service = self.service_of_slice(&name, &row, last);
                        self.mark(service.clone());
                        ((service, name.name.clone()), row)
                    })
                }
            };
            let Some((key, row)) = after else { continue };
            if !is_like(&key.0.name, &name.name) {
                unlike_names.push((name, key.0.clone()));
            }
            slices.push((key, row));
        }
        self.slices.clear();
        self.slices = slices.into_iter().collect();
        self.unlike_names = unlike_names.into_iter().collect();
    }

    /// Every object of a kind with a row or with problems.
    fn known(&self, kind: ResourceKind) -> impl Iterator<Item = ObjectName> {
        let troubled = self.problems.keys().filter(move |key| key.0 == kind).map(|key| key.1.clone());
        self.in_force(kind).chain(troubled)
    }

    /// Every object of a kind with a row.
    fn in_force(&self, kind: ResourceKind) -> impl Iterator<Item = ObjectName> {
        let services = (kind == ResourceKind::Services).then(|| self.services.keys().map(|name| (**name).clone()));
        let slice = |(service, name): &(Arc<ServiceName>, Arc<str>)| slice_name(service, name);
        let slices = (kind == ResourceKind::EndpointSlices).then(|| self.slices.keys().map(slice));
        let node = self.node.iter().filter(move |_| kind == ResourceKind::Nodes).map(|node| node.name.clone());
        services.into_iter().flatten().chain(slices.into_iter().flatten()).chain(node)
    }

    /// Marks a Service as changed. Before the store is complete, all count as changed.
    fn mark(&mut self, service: Arc<ServiceName>) {
        if self.is_complete() {
            self.dirty.insert(service);
        }
    }

    fn put_service(&mut self, name: &ServiceName, row: Option<Packed>) {
        let name = self.known_service(name);
        match row {
            Some(row) => drop(self.services.insert(name.clone(), row)),
            None => drop(self.services.remove(&name)),
        }
        self.mark(name);
    }

    fn put_slice(&mut self, name: ObjectName, row: Option<Packed>) {
        let before = self.find_slice(&name);
        if before.map(|(_, packed)| packed) == row.as_ref() {
            return;
        }
        let before = before.map(|((service, _), _)| service.clone());
        let Some(row) = row else {
            self.unlike_names.remove(&name);
            if let Some(service) = before {
                self.withdraw_slice(service, name.name);
            }
            return;
        };
        let service = self.service_of_slice(&name, &row, None);
        if let Some(before) = before.filter(|before| *before != service) {
            self.withdraw_slice(before, name.name.clone());
        }
        self.mark(service.clone());
        self.slices.insert((service.clone(), name.name.clone()), row);
        if is_like(&service.name, &name.name) {
            self.unlike_names.remove(&name);
        } else {
            self.unlike_names.insert(name, service);
        }
    }

    fn withdraw_slice(&mut self, service: Arc<ServiceName>, name: Arc<str>) {
        let key = (service, name);
        self.slices.remove(&key);
        self.mark(key.0);
    }

    /// Service of a slice with this row. `near` may be it.
    fn service_of_slice(&self, slice: &ObjectName, row: &Packed, near: Option<&Arc<ServiceName>>) -> Arc<ServiceName> {
        let name = ServiceName { namespace: slice.namespace.clone(), name: SliceRow::packed_service(row).into() };
        let near = near.filter(|near| ***near == name).cloned();
        near.unwrap_or_else(|| self.known_service(&name))
    }

    /// The interned name of a Service, if there is one.
    fn known_service(&self, name: &ServiceName) -> Arc<ServiceName> {
        if let Some((known, _)) = self.services.get_key_value(name) {
            return known.clone();
        }
        let name = Arc::new(name.clone());
        let of_slice = self.slices.range((name.clone(), Arc::default())..).next().map(|((service, _), _)| service);
        of_slice.filter(|service| **service == name).cloned().unwrap_or(name)
    }

    /// Records an object's problems. Returns those that it did not have before.
    fn record_problems(&mut self, kind: ResourceKind, name: &ObjectName, problems: Box<[Problem]>) -> Vec<Problem> {
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

/// Rebuilds a tree: insertion in ascending order leaves its nodes half empty.
pub(super) fn refill<Key: Ord, Value>(rows: &mut BTreeMap<Key, Value>) {
    *rows = std::mem::take(rows).into_iter().collect();
}

/// Name of a slice, which is in the namespace of its Service.
fn slice_name(service: &ServiceName, name: &Arc<str>) -> ObjectName {
    ObjectName { namespace: service.namespace.clone(), name: name.clone() }
}

/// Names of Services whose slice may have this name: what precedes a hyphen, the longest first, and the whole name.
fn services_of_name(slice: &str) -> impl Iterator<Item = &str> {
    let beginnings = slice.rmatch_indices('-').filter_map(|(at, _)| slice.get(..at));
    beginnings.chain([slice])
}

/// Whether a Service is one of those.
fn is_like(service: &str, slice: &str) -> bool {
    slice.strip_prefix(service).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// Name of an object as the store has it: that of a Node has no namespace.
fn scoped(kind: ResourceKind, name: ObjectName) -> ObjectName {
    if kind == ResourceKind::Nodes { ObjectName::new("", name.name) } else { name }
}

fn nameless(kind: &str) -> Problem {
    Problem::new(kind, "metadata.name", "missing: this object is not used")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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

    /// A slice moves between Services with which its name begins, and others.
    #[test]
    fn a_slice_is_found_whatever_its_service_is_called() {
        let slice = |service: &str| {
            let metadata = serde_json::json!({"name": "web-api-x", "labels": {"kubernetes.io/service-name": service}});
            let object = serde_json::json!({"metadata": metadata, "addressType": "IPv4"});
            Event::EndpointSlice(serde_json::from_value(object).unwrap())
        };
        let name = || ObjectName::new("default", "web-api-x");
        let services = ["web-api-x", "web", "other", "web-api", "we", "web-", "other"];
        let mut store = Store::default();
        for service in services {
            store.apply(slice(service));
            assert_eq!(store.slice(&name()).map(|row| row.service).as_deref(), Some(service));
            for other in services {
                let count = usize::from(other == service);
                assert_eq!(store.slices(&ServiceName::new("default", other)).count(), count, "{other} {service}");
            }
            assert!(store.slice(&ObjectName::new("other", "web-api-x")).is_none());
        }
        for service in services {
            store.apply(slice(service));
            store.apply(Event::Deleted(ResourceKind::EndpointSlices, name()));
            assert!(store.slice(&name()).is_none(), "{service}");
            assert!(store.slices.is_empty() && store.unlike_names.is_empty(), "{service}");
        }
    }

    #[test]
    fn services_and_slices_have_to_be_compared_after_a_restore() {
        let mut store = Store::new(NodeContext::default());
        let apply = |store: &mut Store, event| assert!(store.apply(event).is_empty());
        assert!(store.is_compared(), "nothing was asked for");
        store.await_comparison(2);
        apply(&mut store, Event::Compared(ResourceKind::Services, 2));
        apply(&mut store, Event::Compared(ResourceKind::Nodes, 2));
        // A list may have been under way before.
        apply(&mut store, Event::ListStarted(ResourceKind::EndpointSlices));
        apply(&mut store, Event::ListDone(ResourceKind::EndpointSlices));
        // So may an earlier comparison.
        apply(&mut store, Event::Compared(ResourceKind::EndpointSlices, 1));
        assert!(!store.is_compared());
        apply(&mut store, Event::Compared(ResourceKind::EndpointSlices, 2));
        assert!(store.is_compared());
        store.await_comparison(3);
        assert!(!store.is_compared());
    }

    fn numbered(number: u16) -> Event {
        let object = serde_json::json!({"metadata": {"name": format!("s{number}")},
                                        "spec": {"clusterIP": format!("10.96.1.{number}"), "ports": [{"port": 80}]}});
        Event::Service(serde_json::from_value(object).unwrap())
    }

    /// List of Services by a server, a time after the first one was asked for.
    fn list(store: &mut Store, server: &str, view: Option<&str>, seconds: u64, numbers: &[u16]) -> Vec<ListVerdict> {
        static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
        let requested = *START.get_or_init(std::time::Instant::now) + std::time::Duration::from_secs(seconds);
        let view = view.map(Into::into);
        let source = ListSource { server: server.into(), view, requested, ended: requested };
        let kind = ResourceKind::Services;
        let objects = numbers.iter().map(|number| numbered(*number));
        // The agent's own do not count.
        let own = serde_json::json!({"metadata": {"name": "canary", "namespace": "~cproxy"},
                                     "spec": {"clusterIP": "10.96.9.9", "ports": [{"port": 7}]}});
        let own = Event::Service(serde_json::from_value(own).unwrap());
        let events = [Event::ListStarted(kind)].into_iter().chain(objects).chain([own]);
        for event in events.chain([Event::ListFrom(kind, source), Event::ListDone(kind)]) {
            assert!(store.apply(event).is_empty());
        }
        store.take_list_reports().into_iter().map(|report| report.verdict).collect()
    }

    fn numbers(store: &Store) -> usize {
        store.service_names().len() - 1
    }

    proptest! {
        /// Objects come in any order, more than once, and are deleted while the list is under way.
        #[test]
        fn a_list_has_what_its_last_events_leave(
            known in prop::collection::btree_set(1..9_u16, 0..6),
            events in prop::collection::vec((any::<bool>(), 1..9_u16, 80..83_u16), 0..24),
        ) {
            let kind = ResourceKind::Services;
            let object = |number: u16, port: u16| {
                let object = serde_json::json!({"metadata": {"name": format!("s{number}")},
                                                "spec": {"clusterIP": "10.96.1.1", "ports": [{"port": port}]}});
                Event::Service(serde_json::from_value(object).unwrap())
            };
            let mut store = Store::new(NodeContext::default());
            let known = known.into_iter().map(|number| object(number, 80));
            let mut left = BTreeMap::new();
            let changes = events.into_iter().map(|(is_there, number, port)| {
                if is_there {
                    left.insert(format!("s{number}"), port);
                    return object(number, port);
                }
                let name = format!("s{number}");
                left.remove(&name);
                Event::Deleted(kind, ServiceName::new("default", name))
            });
            for event in known.chain([Event::ListStarted(kind)]).chain(changes).chain([Event::ListDone(kind)]) {
                prop_assert!(store.apply(event).is_empty());
            }
            let found = store.services().map(|(name, row)| (name.name.to_string(), row.ports[0].port));
            prop_assert_eq!(Vec::from_iter(found), Vec::from_iter(left));
        }
    }

    #[test]
    fn a_list_that_lacks_most_objects_counts_once_a_second_one_agrees() {
        let doubted = [ListVerdict::Doubted];
        for (server, seconds, verdict) in
            [("a", 9, None), ("a", 10, Some(ListVerdict::Agreed)), ("b", 0, Some(ListVerdict::Agreed))]
        {
            let mut store = Store::new(NodeContext::default());
            assert!(list(&mut store, "a", None, 0, &[1, 2, 3, 4]).is_empty());
            assert!(list(&mut store, "a", None, 0, &[1, 2]).is_empty(), "half of them");
            assert_eq!(list(&mut store, "a", None, 100, &[]), doubted);
            assert_eq!((numbers(&store), store.is_in_doubt()), (2, true));
            // It was asked for before the first one had ended.
            assert_eq!(list(&mut store, "b", None, 99, &[]), []);
            assert_eq!(list(&mut store, server, None, 100 + seconds, &[]), Vec::from_iter(verdict));
            assert_eq!((numbers(&store), store.is_in_doubt()), if verdict.is_some() { (0, false) } else { (2, true) });
        }
    }

    #[test]
    fn rows_in_force_follow_all_changes_while_a_list_is_held_back() {
        let mut store = Store::new(NodeContext::default());
        list(&mut store, "a", None, 0, &[1, 2, 3, 4, 5]);
        list(&mut store, "a", None, 1, &[5]);
        let apply = |store: &mut Store, event| assert!(store.apply(event).is_empty());
        apply(&mut store, numbered(6));
        apply(&mut store, Event::Deleted(ResourceKind::Services, ServiceName::new("default", "s5")));
        assert_eq!((numbers(&store), store.is_in_doubt()), (5, true));
        // The objects come back one by one.
        for (number, left) in [(1, 5), (2, 3)] {
            apply(&mut store, numbered(number));
            assert_eq!(numbers(&store), left);
        }
        assert!(!store.is_in_doubt());
        let reports: Vec<_> = store.take_list_reports().into_iter().map(|report| report.verdict).collect();
        assert_eq!(reports, [ListVerdict::Disagreed]);
        // So does a list.
        assert_eq!(list(&mut store, "a", None, 20, &[1]), [ListVerdict::Doubted]);
        assert_eq!(list(&mut store, "b", None, 21, &[1, 2, 3]), [ListVerdict::Disagreed]);
        assert_eq!(numbers(&store), 3);
    }

    #[test]
    fn a_list_counts_with_the_change_that_brings_half_of_the_objects_back() {
        let mut store = Store::new(NodeContext::default());
        list(&mut store, "a", None, 0, &Vec::from_iter(1..=100));
        list(&mut store, "a", None, 1, &[]);
        // New objects, and some that vanish, beside those that come back.
        for number in 1..=25 {
            assert!(store.is_in_doubt(), "{number}");
            [number, 100 + number].into_iter().for_each(|number| drop(store.apply(numbered(number))));
            let gone = ServiceName::new("default", format!("s{}", 101 - number));
            assert!(store.apply(Event::Deleted(ResourceKind::Services, gone)).is_empty());
        }
        // Of 100, 25 are new, 25 are back, and 50 lack.
        assert_eq!((numbers(&store), store.is_in_doubt()), (50, false));
    }

    #[test]
    fn a_list_of_another_view_is_known_as_such_and_one_without_an_origin_counts() {
        let mut store = Store::new(NodeContext::default());
        list(&mut store, "a", None, 0, &[1, 2, 3]);
        list(&mut store, "b", Some("view"), 1, &[]);
        assert_eq!(list(&mut store, "b", Some("view"), 12, &[]), [ListVerdict::Agreed]);
        list(&mut store, "b", Some("view"), 20, &[1, 2, 3]);
        let kind = ResourceKind::Services;
        list(&mut store, "b", Some("view"), 21, &[]);
        [Event::ListStarted(kind), Event::ListDone(kind)].into_iter().for_each(|event| drop(store.apply(event)));
        assert_eq!((store.service_names().len(), store.is_in_doubt()), (0, false));
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
        assert!(store.apply(unreadable(web())).is_empty(), "the same problem is reported once");
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
        store.apply(Event::Deleted(ResourceKind::Services, web()));
        assert!(resolve(&store).is_empty() && problems(&store).is_empty());
        store.apply(unreadable(web()));
        assert_eq!(problems(&store), ["Service default/web: spec.ports: no: this Service is not served"]);
        let nameless = Event::Unreadable { kind: ResourceKind::Services, name: None, message: String::new() };
        assert_eq!(
            store.apply(nameless).first().map(ToString::to_string).unwrap(),
            "Service: metadata.name: missing: this object is not used"
        );
    }
}
