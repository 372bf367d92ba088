//! Failures to trace.

use std::{io, path::PathBuf};

use crate::bpf::{load::LoadError, pins::PinError, policy::PolicyError};

/// Failure to trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// There is nothing to trace.
    #[error(transparent)]
    Pins(#[from] PinError),
    /// Another process traces.
    #[error("{0} is in use by another cproxy trace: end it first")]
    Busy(PathBuf),
    /// The programs could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A link, a program or a map could not be used.
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
    /// Events of denials cannot be had.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A link is gone.
    #[error("{0} is gone: cproxy or its pins were removed")]
    Removed(PathBuf),
    /// A link still leads to a tracing program.
    #[error(
        "{0}: the agent's program could not be put back: {1}; a running agent does it within a minute, or run \
         `cproxy trace` again"
    )]
    NotPutBack(PathBuf, io::Error),
}
