//! What the benchmarks have in common: how a result is summed up and kept, on what machine it was found, and what the
//! kernel is asked.

pub mod bpf;
pub mod machine;
pub mod paired;
pub mod results;
pub mod summary;
