//! cproxy-relay: a read-only list/watch server between an API server and many agents.
//!
//! ```text
//! API server -> upstream -> Cache -> responses (requests, lists, watches) -> clients (limits) -> listen -> client
//! ```
//!
//! The objects, their history and the wire format are in `cproxy-relay-core`, identities and views in
//! `cproxy-relay-auth`.

mod cache;
mod check;
pub mod cli;
mod clients;
mod config;
mod jitter;
mod listen;
mod metrics;
mod metrics_server;
mod output;
mod policies;
mod relay;
mod responses;
mod run;
mod upstream;

pub use metrics::every_metric;
