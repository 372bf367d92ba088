//! Programs as people run them, through ClusterIPs: what a language's runtime, a resolver or a protocol's library makes of
//! translated sockets. Each test looks at how a program ended, at what it says, and at which pod answered.
//!
//! Run with `--test-threads=1`: a cgroup is the whole process's. A program that is not installed is a failure; `cargo
//! xtask setup` installs them all.

#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod build;
mod fixture;

mod clients;
mod flows;
mod kernel_sockets;
mod redis;
mod resolvers;
