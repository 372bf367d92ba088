//! The user side of the socket programs: kernel features, loading, pins, maps, and the sockets that are
//! connected through them.

pub mod bpf;
pub mod canary;
pub mod owned_dir;
pub mod sockets;

pub use cproxy_ebpf::{EXCLUDED_CGROUPS_MAX, EXCLUSIONS_MAX, LAYOUT_VERSION, TCP_PLACES};
