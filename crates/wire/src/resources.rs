//! The kinds that are watched, and what they mean to the agent.

use cproxy_core::{
    Event, ObjectName, ResourceKind,
    api::{EndpointSlice, Metadata, Node, Object, Service},
};

/// A kind that is watched.
pub(super) trait WatchedResource: Object + Send + 'static {
    const RESOURCE: ResourceKind;
    /// What cannot be done without it; nothing: the agent cannot do without it at all.
    const LOST_WITHOUT: Option<&'static str> = None;

    fn applied(object: Box<Self>) -> Event;
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
