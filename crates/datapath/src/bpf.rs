//! Everything that talks to the kernel about BPF: the environment it needs, programs, pins, maps.
//!
//! The long-running agent never loads programs itself: that needs the kernel's whole BTF in memory for a moment. A
//! short-lived child of the same binary ([`install`]) loads, attaches and pins; the agent opens the pins.

mod attachments;
mod cgroups;
mod client_affinity;
mod counters;
pub(crate) mod encoding;
mod environment;
mod error;
mod exclusions;
mod hook_programs;
mod hook_times;
mod install;
mod kernel_btf;
mod kernel_maps;
#[cfg(test)]
#[cfg(has_programs)]
mod layout;
mod linked;
mod load;
mod map_spec;
mod mapping;
mod memory_cgroup;
mod object;
mod open;
mod pins;
mod policy;
mod predecessors;
mod probe;
mod process_cgroup;
mod program;
mod reader;
mod receive;
mod resizable;
mod service_counters;
mod signals;
mod socket_mark;
mod socket_states;
pub mod syscalls;
mod table;
mod takeover;
mod tcp_full;
mod tcp_levels;
mod tcp_move;
mod tcp_places;
mod together;
mod tracing;

pub use attachments::{Attachments, Difference, LinkState};
pub(crate) use cgroups::cgroups_below;
pub use cgroups::{ROOT_CGROUP_ID, cgroup_id, is_cgroup2};
pub use client_affinity::{ClientAffinities, ClientAffinity};
pub use counters::read_counters;
pub use cproxy_ebpf::observation::Verdict as TraceVerdict;
pub use environment::{Environment, EnvironmentError, Mount, Scope};
pub use error::TableError;
pub use exclusions::{CgroupError, excluded_cgroup, in_netns_of, is_in_cgroup, netns_cookie, read_exclusions};
pub use hook_programs::{CGROUPS_MAX, HookPrograms, OtherProgram, hook_programs, missing_programs};
pub use hook_times::{HookTime, hook_times};
pub use install::{AttachError, FirstMapsError, InstallError, attached, install};
pub use kernel_maps::KernelMaps;
pub use linked::{LinkedError, LinkedProgram};
pub use load::{LoadError, Loaded, try_load};
pub use memory_cgroup::leave_memory_cgroup;
pub use object::{HAS_PROGRAMS, ProgramSet};
pub use pins::{PinDir, PinError, PinLock, Removed};
pub use policy::{
    DeniedPeer, PolicyDecision, PolicyError, PolicyHooks, PolicyInForce, PolicyMaps, PolicyPins, PolicyReader,
    PolicySettings, install_policy, other_lookup_programs, policy_programs,
};
pub use probe::{Features, MAP_TYPES, MapType, has_errno_helper, has_hooks, has_map_type};
pub use process_cgroup::ProcessCgroup;
pub use program::Program;
pub use reader::{KernelReader, Serving, SetCache};
pub use receive::{
    ListeningAt, ReceiveMaps, ReceivePins, forget_receive, install_receive, is_receiving, receive_counters,
};
pub use service_counters::{ServiceCounters, ServiceCounts};
pub use socket_mark::SocketMark;
pub use socket_states::SocketStates;
pub use table::{TableMaps, decode_table};
pub use takeover::{end_takeover, has_kept, lock_pins, restore_lock};
pub use tcp_full::TcpFull;
pub use tcp_places::{TCP_PLACES_MAX, TcpPlacesUsage};
pub use tracing::{TraceDestination, TraceError, TraceEvent, TraceFilter, TracedDenial, Tracing};
