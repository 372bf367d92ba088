//! The harness of live tests, the demonstration and the benchmarks: an isolated environment on this machine
//! ([`sandbox`]), the programs that run in it ([`process`], [`relay_server`], [`echo`], [`witness`], [`http`]), a real
//! Kubernetes control plane ([`control_plane`]), its objects ([`manifest`], [`population`], [`writer`]), virtual
//! machines ([`guest`], [`outside`]) and the cost of programs ([`usage`], [`pinned`]).
//!
//! Every value undoes its effects when it is dropped, on success, on failure and while a panic unwinds. Nothing is
//! mocked: namespaces, cgroups, system calls, etcd and kube-apiserver are the real ones, which is why it needs root.

#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a harness reports a broken environment by panicking, with a sentence that says what to do"
)]

pub mod api;
pub mod audit;
pub mod borrower;
pub mod build;
pub mod control_plane;
pub mod controllers;
pub mod echo;
// It reads the registers of x86_64.
#[cfg(target_arch = "x86_64")]
pub mod faults;
pub mod fleet;
pub mod guest;
pub mod http;
pub mod init_systems;
// It writes the registers of x86_64.
#[cfg(target_arch = "x86_64")]
pub mod injected;
pub mod isolation;
pub mod kube_proxy;
pub mod manifest;
pub mod memory;
pub mod nameserver;
pub mod nonce;
pub mod oci;
pub mod older;
pub mod outside;
pub mod own_files;
pub mod pinned;
pub mod population;
pub mod process;
pub mod program;
pub mod random;
pub mod relay;
pub mod relay_server;
pub mod sandbox;
pub mod seccomp;
pub mod shared;
pub mod storm;
pub mod strace;
pub mod supervised;
pub mod usage;
pub mod witness;
pub mod world;
pub mod writer;

mod cgroup;
mod credentials;
mod directory;
mod done;
mod mounts;
pub mod netns;
mod server;

pub use done::Done;
pub use mounts::UNMOUNT_CGROUP2;
pub use server::Server;
