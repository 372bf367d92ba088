//! Common parts of the benchmarks: how a result is summed up, shown and kept, the machine it was found on, and
//! questions to the kernel.

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
