//! Network policies: objects to verdicts of single pods, without any I/O.
//!
//! ```text
//! NetworkPolicies, Pods, Namespaces -> model -> Resolver -> PodPolicy, AddressSlices -> compiled classes -> verdicts
//! ```
//!
//! Nothing here fails, waits, logs or knows the time: a bad object yields problems, and the part of it that is wrong
//! matches nothing.

pub mod api;
mod labels;
mod model;
mod read;
mod selector;

pub use labels::Labels;
pub use model::{
    Action, ContainerPort, Direction, Directions, IpBlock, Namespace, Node, Peers, Pod, PodSelection, Policy, PortName,
    PortRange, Ports, Protocol, Rule, Scope, Tier,
};
pub use read::Read;
pub use selector::{LabelSelector, LabelSelectorError};
