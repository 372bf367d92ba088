//! Resources that are watched, and the store's events for the agent's.

use cproxy_core::{
    Event, ResourceKind,
    api::{EndpointSlice, Node, Object, Service},
};

/// Resource that is listed and watched.
pub trait WatchedResource: Object + Send + 'static {
    /// Kind in the store.
    const RESOURCE: ResourceKind;
    /// Features that are lost without this resource, if it is optional; `None` if the agent cannot do without it.
    const LOST_WITHOUT: Option<&'static str> = None;
}

/// Resource that the agent's store keeps.
pub trait StoredResource: WatchedResource {
    /// Event of an object that was added or changed.
    fn applied(object: Box<Self>) -> Event;
}

impl WatchedResource for Service {
    const RESOURCE: ResourceKind = ResourceKind::Services;
}

impl StoredResource for Service {
    fn applied(object: Box<Self>) -> Event {
        Event::Service(object)
    }
}

impl WatchedResource for EndpointSlice {
    const RESOURCE: ResourceKind = ResourceKind::EndpointSlices;
}

impl StoredResource for EndpointSlice {
    fn applied(object: Box<Self>) -> Event {
        Event::EndpointSlice(object)
    }
}

impl WatchedResource for Node {
    const RESOURCE: ResourceKind = ResourceKind::Nodes;
    const LOST_WITHOUT: Option<&'static str> =
        Some("zone hints are not followed and, without --node-ip, node ports are not served");
}

impl StoredResource for Node {
    fn applied(object: Box<Self>) -> Event {
        Event::Node(object)
    }
}
