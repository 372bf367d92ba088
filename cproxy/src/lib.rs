//! cproxy: Kubernetes ClusterIPs inside a microVM, by socket hooks.
//!
//! ```text
//! source (API server | files) -> events -> Store -> dirty Services -> rows -> operations -> apply -> kernel
//! ```
//!
//! See ARCHITECTURE.md for the way of one event and of one connect.

pub mod admin;
pub mod agent;
pub mod bpf;
pub mod cli;
pub mod config;
pub mod k8s;
mod log_limit;
pub mod manifests;
pub mod memory;
pub mod model;
mod mountinfo;
pub mod network_changes;
pub mod own_address;
mod owned_dir;
pub mod report;
pub mod sockets;
pub mod wait;
