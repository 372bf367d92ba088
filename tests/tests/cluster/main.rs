//! The agent with a real Kubernetes API server: the kernel's table and connections follow all created, changed and
//! deleted objects, through every end of the agent or of the API server.
//!
//! Nothing here depends on timing: after a change, a marker is sent through the same watches
//! ([`fixture::Cluster::expect`]), and the table is compared once that has arrived.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod fixture;
mod rows;

mod access;
mod changes;
mod check;
mod cleanup;
mod credentials;
mod failover;
mod greedy;
mod health;
mod helm;
mod kubeconfigs;
mod kustomize;
mod lists;
mod long;
mod memory;
mod node;
mod own_address;
mod own_sockets;
mod reload;
mod restart;
mod restored;
mod routes;
mod soak;
mod trouble;
