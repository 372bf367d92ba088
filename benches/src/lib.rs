//! Common parts of the benchmarks: statistics, reports, the description of the machine, and queries to the kernel.

pub mod arena;
pub mod bpf;
pub mod calls;
pub mod kube_proxy;
pub mod machine;
pub mod node;
pub mod paired;
pub mod pod;
pub mod pods;
pub mod report;
pub mod rest;
pub mod start;
pub mod subject;
pub mod summary;
