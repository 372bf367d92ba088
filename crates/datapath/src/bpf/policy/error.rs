//! Failures to enforce policy.

use cproxy_policy::PolicyTooLarge;

use crate::bpf::{error::TableError, linked::LinkedError};

/// Failure to install, attach or write a policy.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// A program could not be loaded or attached, or a pin could not be used.
    #[error(transparent)]
    Linked(#[from] LinkedError),
    /// The policy does not fit.
    #[error("the policy does not fit into the kernel's maps: {0}")]
    TooLarge(#[from] PolicyTooLarge),
    /// A map could not be used.
    #[error(transparent)]
    Map(#[from] TableError),
}
