//! What takes minutes under emulation, or kernels that are built for it: for `cargo xtask vm test` alone.

mod cost;
mod lacking;
mod matrix;
