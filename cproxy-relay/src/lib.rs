//! cproxy-relay: a read-only list/watch server between an API server and many agents.
//!
//! ```text
//! API server -> upstream -> Cache -> handler (request) -> body (list, watch) -> connection -> client
//! ```
//!
//! The objects, their history and the wire format are in `cproxy-relay-core`, identities and views in
//! `cproxy-relay-auth`.

mod address;
mod body;
mod cache;
mod check;
pub mod cli;
mod config;
mod connection;
mod guest_sockets;
mod handler;
mod jitter;
mod listener;
mod lists;
mod metrics;
mod metrics_server;
mod refusal_log;
mod relay;
mod request_limit;
mod run;
mod slots;
mod throttle;
mod tls;
mod unsent;
mod upstream;

pub use metrics::every_metric;
