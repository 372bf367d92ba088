//! Network policies: objects to verdicts of single pods, without any I/O.
//!
//! ```text
//! NetworkPolicies, Pods, Namespaces -> model -> Resolver -> PodPolicy, AddressSlices -> compiled classes -> verdicts
//! ```
//!
//! Nothing here fails, waits, logs or knows the time: a bad object yields problems, and the part of it that is wrong
//! matches nothing.

mod address_set;
pub mod api;
mod compile;
mod labels;
mod model;
mod pod_policy;
mod read;
mod resolver;
mod selector;
pub mod served;
mod table;
#[cfg(test)]
mod tests;

pub use address_set::{AddressSlice, SLICE_ADDRESSES_MAX, SetName, SetReference, SliceName};
pub use compile::{Class, Compiled, Decision, Interval, Prefixes, RUN_INTERVALS_MAX, Reason, Verdict, compile};
pub use labels::Labels;
pub use model::{
    Action, ContainerPort, Direction, Directions, IpBlock, Namespace, Node, Peers, Pod, PodSelection, Policy, PortName,
    PortRange, Ports, Protocol, Rule, Scope, Tier,
};
pub use pod_policy::{PodIsolation, PodPeers, PodPolicy, PodPorts, PodRule};
pub use read::Read;
pub use resolver::{
    Changes, Event, POD_ADDRESSES_MAX, POD_NAMES_MAX, POD_PARTS_MAX, POD_SETS_MAX, PodIdentity, Resolver,
};
pub use selector::{LabelSelector, LabelSelectorError};
pub use table::{INTERVALS_MAX, Operation, PEERS_MAX, PolicyTable, PolicyTooLarge, Run, Runs};
