//! Compact row of an object.

use std::fmt;

use super::{ObjectName, Problem, ServiceRow, SliceRow, node_context::NodeRow, packed::Packed};
use crate::api::{EndpointSlice, Metadata, Node, Service};

/// Kind of object that a source delivers.
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
    /// Name of one object of the kind.
    #[must_use]
    pub fn singular(self) -> &'static str {
        match self {
            Self::Services => "Service",
            Self::EndpointSlices => "EndpointSlice",
            Self::Nodes => "Node",
        }
    }
}

/// Row of an object as the store keeps it, or none if the object is not served, and its problems.
#[derive(Clone)]
pub struct ObjectRow {
    pub(super) kind: ResourceKind,
    pub(super) name: ObjectName,
    pub(super) parsed: Parsed<Packed>,
}

/// Row, or none if the object is not served, and its problems.
#[derive(Clone, Debug)]
pub(super) struct Parsed<Row> {
    pub(super) row: Option<Row>,
    pub(super) problems: Box<[Problem]>,
}

impl ObjectRow {
    /// The row of a Service as seen from `node`; `None` if it has no name.
    #[must_use]
    pub fn of_service(service: &Service, node: Option<&str>) -> Option<Self> {
        let name = object_name(&service.metadata)?;
        let mut problems = Vec::new();
        let row = ServiceRow::from_object(&name, service, node, &mut problems).map(|row| row.pack());
        Some(Self { kind: ResourceKind::Services, name, parsed: Parsed { row, problems: problems.into() } })
    }

    /// The row of an EndpointSlice as seen from `node`; `None` if it has no name.
    #[must_use]
    pub fn of_slice(slice: &EndpointSlice, node: Option<&str>) -> Option<Self> {
        let name = object_name(&slice.metadata)?;
        let mut problems = Vec::new();
        let row = SliceRow::from_object(&name, slice, node, &mut problems).map(|row| row.pack());
        Some(Self { kind: ResourceKind::EndpointSlices, name, parsed: Parsed { row, problems: problems.into() } })
    }

    /// The row of a Node; `None` if it has no name.
    #[must_use]
    pub fn of_node(node: &Node) -> Option<Self> {
        let name = Some(&*node.metadata.name).filter(|name| !name.is_empty())?;
        let mut problems = Vec::new();
        let row = NodeRow::from_object(name, node, &mut problems).pack();
        let (name, parsed) = (ObjectName::new("", name), Parsed { row: Some(row), problems: problems.into() });
        Some(Self { kind: ResourceKind::Nodes, name, parsed })
    }

    /// The object's kind.
    #[must_use]
    pub fn kind(&self) -> ResourceKind {
        self.kind
    }

    /// The object's name.
    #[must_use]
    pub fn name(&self) -> &ObjectName {
        &self.name
    }
}

impl fmt::Debug for ObjectRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.singular(), self.name)
    }
}

/// Name of an object, if it has one.
#[must_use]
pub fn object_name(metadata: &Metadata) -> Option<ObjectName> {
    let namespace = if metadata.namespace.is_empty() { "default" } else { &metadata.namespace };
    (!metadata.name.is_empty()).then(|| ObjectName::new(namespace, &*metadata.name))
}
