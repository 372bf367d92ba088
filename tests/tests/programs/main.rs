//! Programs through ClusterIPs, as users run them: how a language's runtime, a resolver or a protocol's library copes
//! with translated sockets. Each test checks a program's exit code, its output, and the pod that answered.
//!
//! A program that is not installed is a failure; `cargo xtask setup` installs them all.

#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod build;
mod fixture;

mod clients;
mod completion;
mod flows;
mod kernel_sockets;
mod redis;
mod resolvers;
