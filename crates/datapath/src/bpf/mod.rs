//! Everything that talks to the kernel about BPF: the environment it needs, programs, pins, maps.
//!
//! The long-running agent never loads programs itself: that needs the kernel's whole BTF in memory for a moment. A
//! short-lived child of the same binary ([`install`]) loads, attaches and pins; the agent opens the pins.

mod cgroups;
mod counters;
mod environment;
mod exclusions;
mod growing;
mod install;
mod kernel_btf;
#[cfg(test)]
mod layout;
mod lookup;
mod memory_cgroup;
mod pins;
mod probe;
mod syscalls;
mod tables;

/// The innermost error, which is the one that says something.
fn root_cause(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source()).last().unwrap_or(error).to_string()
}

pub use counters::read_counters;
pub use environment::{Environment, EnvironmentError, Mount, Scope};
pub use exclusions::{CgroupError, excluded_cgroup};
pub use install::{InstallError, Loaded, Program, attached, install, try_load};
pub use kernel_btf::hide_kernel_btf;
pub use lookup::{Lookup, LookupError, Serving, Snapshot, SocketStates};
pub use memory_cgroup::leave_memory_cgroup;
pub use pins::{PinDir, PinError, PinLock};
pub use probe::{Features, MAP_TYPES, MapType, has_errno_helper, has_hooks, has_map_type};
pub use tables::{SocketMark, Table, TableError};
