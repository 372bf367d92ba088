//! All frontends of a Service except ClusterIPs, by real system calls: external addresses, load balancers' addresses,
//! and the Node's ports; and the effect of this node and the VM's address on them.

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
