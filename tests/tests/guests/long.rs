//! Tests that take minutes under emulation, or need special kernels: for `cargo xtask vm test` alone.

mod cost;
mod direct_routing;
mod lacking;
mod matrix;
mod microvm;
