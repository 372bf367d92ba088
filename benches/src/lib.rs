//! What the benchmarks have in common: how a result is summed up, and on what machine it was found.

pub mod machine;
pub mod summary;
