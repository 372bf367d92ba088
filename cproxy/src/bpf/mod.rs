//! Everything that talks to the kernel about BPF: the environment it needs, programs, pins, maps.
//!
//! The long-running agent never loads programs itself: that needs the kernel's whole BTF in memory for a moment. A
//! short-lived child of the same binary ([`install`]) loads, attaches and pins; the agent opens the pins.

mod environment;
mod install;
mod pins;
mod syscalls;
mod tables;

/// The innermost error, which is the one that says something.
fn root_cause(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source()).last().unwrap_or(error).to_string()
}

pub use environment::{Environment, EnvironmentError};
pub use install::{InstallError, Program, install};
pub use pins::{PinDir, PinError, PinLock};
pub use tables::{SocketMark, Table, TableError, unnamed_rows};
