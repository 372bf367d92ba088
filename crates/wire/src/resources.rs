//! Resources that the agent watches, and the store's events for their objects.

use cproxy_core::{
    Event, ObjectName, ResourceKind,
    api::{EndpointSlice, Metadata, Node, Object, Service},
};

/// Resource that the agent watches.
pub(super) trait WatchedResource: Object + Send + 'static {
    /// Kind in the store.
    const RESOURCE: ResourceKind;
    /// Features that are lost without this resource, if it is optional; `None` if the agent cannot do without it.
    const LOST_WITHOUT: Option<&'static str> = None;

    /// Event of an object that was added or changed.
    fn applied(object: Box<Self>) -> Event;
    /// Event of an object that was deleted; `None` if its name is missing.
    fn deleted(meta: &Metadata) -> Option<Event>;
}

impl WatchedResource for Service {
    const RESOURCE: ResourceKind = ResourceKind::Services;

    fn applied(object: Box<Self>) -> Event {
        Event::Service(object)
    }
    fn deleted(meta: &Metadata) -> Option<Event> {
        namespaced(meta).map(Event::ServiceDeleted)
    }
}

impl WatchedResource for EndpointSlice {
    const RESOURCE: ResourceKind = ResourceKind::EndpointSlices;

    fn applied(object: Box<Self>) -> Event {
        Event::EndpointSlice(object)
    }
    fn deleted(meta: &Metadata) -> Option<Event> {
        namespaced(meta).map(Event::EndpointSliceDeleted)
    }
}

impl WatchedResource for Node {
    const RESOURCE: ResourceKind = ResourceKind::Nodes;
    const LOST_WITHOUT: Option<&'static str> =
        Some("zone hints are not followed and, without --node-ip, node ports are not served");

    fn applied(object: Box<Self>) -> Event {
        Event::Node(object)
    }
    fn deleted(meta: &Metadata) -> Option<Event> {
        meta.name.clone().map(Event::NodeDeleted)
    }
}

fn namespaced(meta: &Metadata) -> Option<ObjectName> {
    Some(ObjectName::new(meta.namespace.as_deref()?, meta.name.as_deref()?))
}
