//! cproxy: Kubernetes ClusterIPs inside a microVM, by socket hooks.
//!
//! ```text
//! source (API server | files) -> events -> Store -> dirty Services -> rows -> operations -> apply -> kernel
//! ```
//!
//! See ARCHITECTURE.md for the path of an event and of a connect().

pub mod agent;
mod canary;
pub mod cli;
pub mod config;
pub mod controls;
pub mod diagnose;
pub mod mailbox;
pub mod manifests;
pub mod privileges;
mod problem_log;
pub mod report;
pub mod run_dir;
pub mod state;
pub mod status_http;
pub mod target;
