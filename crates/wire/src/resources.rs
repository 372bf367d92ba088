//! Resources that are watched, and their events.

use cproxy_core::{
    Event, ResourceKind,
    api::{EndpointSlice, Node, Object, Service},
};

/// Resource that can be watched.
pub(super) trait WatchedResource: Object + Send + 'static {
    /// Its kind in the store.
    const RESOURCE: ResourceKind;
    /// Features lost without this resource; `None`: the agent cannot do without it.
    const LOST_WITHOUT: Option<&'static str> = None;

    /// Event of an object that was added or changed.
    fn applied(object: Box<Self>) -> Event;
}

impl WatchedResource for Service {
    const RESOURCE: ResourceKind = ResourceKind::Services;

    fn applied(object: Box<Self>) -> Event {
        Event::Service(object)
    }
}

impl WatchedResource for EndpointSlice {
    const RESOURCE: ResourceKind = ResourceKind::EndpointSlices;

    fn applied(object: Box<Self>) -> Event {
        Event::EndpointSlice(object)
    }
}

impl WatchedResource for Node {
    const RESOURCE: ResourceKind = ResourceKind::Nodes;
    const LOST_WITHOUT: Option<&'static str> =
        Some("zone hints are not followed and, without --node-ip, node ports are not served");

    fn applied(object: Box<Self>) -> Event {
        Event::Node(object)
    }
}
