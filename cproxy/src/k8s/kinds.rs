//! The kinds that are watched, and what they mean to the agent.

use kube::{Resource, core::ObjectMeta};
use serde::de::DeserializeOwned;

use super::objects::{EndpointSlice, Node, Service};
use crate::model::{Event, Kind, ObjectName};

/// A kind that is watched.
pub(super) trait Watched: Resource<DynamicType = ()> + DeserializeOwned + Send + 'static {
    const KIND: Kind;
    /// What cannot be done without it; nothing: the agent cannot do without it at all.
    const LOST_WITHOUT: Option<&'static str> = None;

    fn applied(object: Box<Self>) -> Event;
    fn deleted(meta: &ObjectMeta) -> Option<Event>;
}

impl Watched for Service {
    const KIND: Kind = Kind::Services;

    fn applied(object: Box<Self>) -> Event {
        Event::Service(object)
    }
    fn deleted(meta: &ObjectMeta) -> Option<Event> {
        namespaced(meta).map(Event::ServiceDeleted)
    }
}

impl Watched for EndpointSlice {
    const KIND: Kind = Kind::EndpointSlices;

    fn applied(object: Box<Self>) -> Event {
        Event::EndpointSlice(object)
    }
    fn deleted(meta: &ObjectMeta) -> Option<Event> {
        namespaced(meta).map(Event::EndpointSliceDeleted)
    }
}

impl Watched for Node {
    const KIND: Kind = Kind::Nodes;
    const LOST_WITHOUT: Option<&'static str> =
        Some("zone hints are not followed and, without --node-ip, node ports are not served");

    fn applied(object: Box<Self>) -> Event {
        Event::Node(object)
    }
    fn deleted(meta: &ObjectMeta) -> Option<Event> {
        meta.name.clone().map(Event::NodeDeleted)
    }
}

fn namespaced(meta: &ObjectMeta) -> Option<ObjectName> {
    Some(ObjectName::new(meta.namespace.as_deref()?, meta.name.as_deref()?))
}
