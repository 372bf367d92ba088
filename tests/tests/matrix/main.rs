//! The data path by real system calls, every one that an application may make: the matrix ([`cells`]), what one socket
//! remembers ([`flows`]), sockets in several hands ([`handles`]), other ways to connect ([`opening`]), session affinity
//! ([`affinity`]) and whether the choice is even ([`balance`]).
//!
//! Run with `--test-threads=1`: a cgroup is the whole process's. Nothing here depends on timing: a wait ends with what
//! is waited for, and its end without that is a failure.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod choice;
mod message;
mod play;
mod script;
mod servers;
mod socket;
mod world;

mod affinity;
mod balance;
mod cells;
mod flows;
mod handles;
mod opening;
