//! Kubernetes objects to map writes, without any I/O.
//!
//! ```text
//! objects -> rows (service, slice) -> Store -> desired rows -> TablePlanner -> ordered operations
//! ```
//!
//! Nothing here fails, waits, logs or knows the time: a bad object yields [`Problem`]s and harms only itself.

mod address;
mod affinity;
pub mod api;
mod desired;
mod eligible;
mod explain;
mod kernel;
mod names;
mod node_context;
mod object_row;
mod packed;
mod planner;
mod problem;
mod receive;
mod retired;
mod scope;
mod service;
mod slice;
mod slot_allocator;
mod sorted;
mod store;
#[cfg(test)]
mod tests;

pub use address::{Address, AddressRange, Backend, Family, Frontend, Protocol, parse_address};
pub use affinity::affinity_id;
pub use desired::{Action, FrontendSource, Row, SERVICE_FRONTENDS_MAX, desired_rows, resolve};
pub use explain::{
    Explanation, OwnerOf, Usage, explain, explain_stored, is_slice_of, services_at, unserved_node_port, won_rows,
};
pub use kernel::{
    Affinity, Balance, Capacity, ExcludedCgroup, Exclusions, Filter, KernelSet, KernelTable, Limits, Members, Op,
    Reserve, TcpPlace,
};
pub use names::{ObjectName, ServiceName, Text, is_label, is_subdomain};
pub use node_context::{ExternalIps, NodeContext};
pub use object_row::{ObjectRow, ResourceKind, object_name};
pub use planner::{CHANGES_MAX, FrontendName, Loss, SetChange, TablePlanner, Write};
pub use problem::{Problem, counted, is_steering, printable, shortened};
pub use receive::{ReceiveOp, ReceivePlanner, ReceiveTable, Received, ReceivedPort, ReceivedPorts};
pub use retired::{Retired, RetiredBackends};
pub use scope::Scope;
pub use service::{ServicePort, ServiceRow, Skipped, served_spec};
pub use slice::{Endpoint, LABEL_SERVICE_NAME, NodeHint, SlicePort, SliceRow};
pub use sorted::{sort_few, sort_few_by, sort_unique, sorted_map, sorted_set};
pub use store::{Event, ListReport, ListSource, ListVerdict, SECOND_LIST_AFTER, Store};
