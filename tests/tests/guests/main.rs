//! The image of a minimal guest in virtual machines with kernels of their own, with an API server, pods and a
//! nameserver outside: the environment of the workload at its start, the handling of errors, and the cost.
//!
//! Run by `cargo xtask test`, or by `cargo xtask vm test` with each of several kernels.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod common;

mod bad;
mod cgroups;
mod containers;
mod packets;
mod policy;
mod restored;
mod start;
mod systemd;
mod vsock;

mod long;
