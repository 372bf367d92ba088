//! What the benchmarks have in common: how a result is summed up, shown and kept, on what machine it was found, and
//! what the kernel is asked.

pub mod arena;
pub mod bpf;
pub mod kube_proxy;
pub mod machine;
pub mod node;
pub mod paired;
pub mod plot;
pub mod report;
pub mod rest;
pub mod subject;
pub mod summary;
