//! Everything but ClusterIPs that leads to a Service, by real system calls: external addresses, load balancers' addresses,
//! ports of the own node; and what the own place has to do with it.
//!
//! Run with `--test-threads=1`: a cgroup is the whole process's.

#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod own_address;
mod policy;
mod reach;
mod world;
