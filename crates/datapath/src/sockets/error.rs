//! Failures to look for sockets, to list and to close them.

use std::io;

use rustix::io::Errno;

use crate::bpf::{PolicyError, TableError};

/// Maximum number of attempts while the agent replaces maps, which it does seldom ([`TableError::Replaced`]).
pub(super) const REPLACED_TRIES_MAX: u32 = 10;

/// Failure to close or list sockets.
#[derive(Debug, thiserror::Error)]
pub enum SocketsError {
    /// The table could not be read.
    #[error("cannot tell stale sockets: {0}")]
    Table(#[from] TableError),
    /// The policy could not be read.
    #[error("cannot tell what network policy allows: {0}")]
    Policy(Box<PolicyError>),
    /// No thread, or no /proc.
    #[error("cannot look for sockets: {0}: {1}")]
    Io(&'static str, io::Error),
    /// The kernel failed to list sockets, although it can.
    #[error("cannot list sockets: {0}; `cproxy check` tells what is missing for udp_sockets and tcp_sockets")]
    List(Errno),
    /// A socket could not be closed, although the kernel can.
    #[error("cannot close a socket: {0}")]
    Close(Errno),
    /// The storage of other processes' sockets cannot be read.
    #[error("cannot look into the sockets of processes: {0}")]
    Owners(OwnersError),
}

/// Reason why not the sockets of all processes can be looked into.
#[derive(Debug, thiserror::Error)]
pub enum OwnersError {
    /// The kernel, or a filter of system calls, lets no descriptor be duplicated.
    #[error("pidfd_getfd failed: {0}")]
    PidfdGetfd(Errno),
    /// This process lacks a capability.
    #[error("missing {0}: run cproxy as root")]
    MissingCapability(&'static str),
    /// Processes in other pid namespaces cannot be seen.
    #[error("not in the machine's pid namespace")]
    OtherPidNamespace,
    /// The pid namespace is not known.
    #[error("/proc/self/ns/pid: {0}")]
    PidNamespace(io::Error),
}

/// Reason why the kernel's socket monitoring cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiagError {
    /// The kernel is built without this option.
    #[error("the kernel lacks {0}")]
    MissingOption(&'static str),
    /// This process lacks a capability.
    #[error("missing CAP_NET_ADMIN: run cproxy as root")]
    MissingCapability,
    /// The kernel refuses for another reason.
    #[error(transparent)]
    Other(Errno),
}

impl DiagError {
    /// The reason of an error, by the option without which it comes.
    pub(super) fn of(error: Errno, option: &'static str) -> Self {
        match error {
            Errno::NOENT | Errno::OPNOTSUPP | Errno::PROTONOSUPPORT => Self::MissingOption(option),
            Errno::PERM | Errno::ACCESS => Self::MissingCapability,
            error => Self::Other(error),
        }
    }
}

/// Reason why an ability is missing.
#[derive(Debug, thiserror::Error)]
pub enum AbilityError {
    /// Sockets cannot be listed.
    #[error(transparent)]
    Diag(#[from] DiagError),
    /// The sockets of processes cannot be looked into.
    #[error(transparent)]
    Owners(#[from] OwnersError),
    /// The maps cannot be opened.
    #[error(transparent)]
    Table(#[from] TableError),
}

/// The error for a `/proc` that cannot be read.
pub(super) fn no_proc(error: io::Error) -> SocketsError {
    SocketsError::Io("/proc", error)
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn a_text_that_has_its_cause_is_not_followed_by_it() {
        let error = SocketsError::Owners(OwnersError::MissingCapability("CAP_SYS_PTRACE"));
        let text = "cannot look into the sockets of processes: missing CAP_SYS_PTRACE: run cproxy as root";
        assert_eq!(error.to_string(), text);
        assert!(error.source().is_none());
    }
}
