//! Failures to enforce policy.

use std::{io, path::PathBuf};

use cproxy_policy::PolicyTooLarge;

use crate::bpf::{error::TableError, load::LoadError};

/// Failure to install, attach or write a policy.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// A pin or a directory could not be used.
    #[error("{}: {}", .0.display(), .1)]
    Io(PathBuf, io::Error),
    /// The programs could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The policy does not fit.
    #[error("the policy does not fit into the kernel's maps: {0}")]
    TooLarge(#[from] PolicyTooLarge),
    /// A map could not be used.
    #[error(transparent)]
    Map(#[from] TableError),
    /// A program could not be attached.
    #[error("cannot attach the policy's program {0}: {1}")]
    Attach(&'static str, io::Error),
}
