//! The relay between a real API server and real clients. After a change, tests wait for an observable state.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod client;
mod enforced;
mod fixture;
mod go;
mod wire;

mod access;
mod agent;
mod bad_input;
mod churn;
mod clients;
mod guest_sockets;
mod long;
mod operation;
mod policies;
mod policy_replicas;
mod protocol;
mod sharing;
mod skew;
mod upstream;
