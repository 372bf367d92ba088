//! Resources that are watched.

use cproxy_core::{
    ResourceKind,
    api::{EndpointSlice, Node, Object, Service},
};

/// Resource that is listed and watched.
pub trait WatchedResource: Object + Send + 'static {
    /// Kind in the store.
    const RESOURCE: ResourceKind;
    /// Features that are lost without this resource, if it is optional; `None` if the agent cannot do without it.
    const LOST_WITHOUT: Option<&'static str> = None;
}

impl WatchedResource for Service {
    const RESOURCE: ResourceKind = ResourceKind::Services;
}

impl WatchedResource for EndpointSlice {
    const RESOURCE: ResourceKind = ResourceKind::EndpointSlices;
}

impl WatchedResource for Node {
    const RESOURCE: ResourceKind = ResourceKind::Nodes;
    const LOST_WITHOUT: Option<&'static str> =
        Some("zone hints are not followed and, without --node-ip, node ports are not served");
}
