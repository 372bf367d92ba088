//! Reasons why the agent does not run.

use std::{io, path::PathBuf, process::ExitStatus};

use cproxy_core::Address;
use cproxy_datapath::bpf::{CgroupError, EnvironmentError, PinError, TableError};
use cproxy_wire::ClientError;

use super::{policy::PolicyStartError, receive::ReceiveStartError};
use crate::{
    manifests::ManifestError,
    run_dir::{Failure, RunDirError},
    status_http::StatusHttpError,
};

/// Reason why the agent does not run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The machine lacks a requirement.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// An excluded cgroup does not exist.
    #[error("--exclude-cgroup {0}")]
    Exclude(#[from] CgroupError),
    /// Network namespaces cannot be told apart.
    #[error("--exclude-netns: the kernel does not tell network namespaces apart (Linux 5.14 does): {0}")]
    ExcludeNetns(io::Error),
    /// The pin directory cannot be used.
    #[error(transparent)]
    Pins(#[from] PinError),
    /// The programs could not be installed, with the child's message.
    #[error("{0}")]
    Install(String, Failure),
    /// The child that installs was killed, for example for lack of memory.
    #[error("the child that installs the programs was killed: {0}")]
    InstallEnded(ExitStatus),
    /// The child could not be started.
    #[error("cannot start {0}: {1}")]
    Child(PathBuf, io::Error),
    /// The maps cannot be used.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The API server's configuration cannot be used.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The manifests cannot be used.
    #[error(transparent)]
    Manifests(#[from] ManifestError),
    /// The bootstrap manifest cannot be used.
    #[error("--bootstrap {0}: {1}")]
    Bootstrap(PathBuf, String),
    /// The canary would lead to this machine itself.
    #[error("--canary-address {0}: this machine has the address: choose one that nothing has, or none")]
    OwnCanary(Address),
    /// Network policy cannot be enforced.
    #[error(transparent)]
    Policy(#[from] PolicyStartError),
    /// Nothing can be received for load balancers.
    #[error(transparent)]
    Receive(#[from] ReceiveStartError),
    /// The run directory cannot be used.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// An address of the metrics or health checks cannot be opened.
    #[error(transparent)]
    StatusHttp(#[from] StatusHttpError),
    /// The thread of the metrics and health checks cannot be started.
    #[error("cannot start the thread of the metrics and health checks: {0}")]
    StatusHttpThread(io::Error),
    /// Signals cannot be received.
    #[error("cannot wait for SIGHUP: {0}")]
    Signal(io::Error),
    /// The broker has ended, without which the agent cannot change its files.
    #[error("the broker, a child of the agent, was ended by somebody: {0}")]
    BrokerEnded(String),
    /// The source has ended, which it never should.
    #[error("the source of events has ended")]
    SourceEnded,
}

impl AgentError {
    /// Whether a setting names something that does not exist, or is of another kind.
    #[must_use]
    pub fn is_of_setting(&self) -> bool {
        match self {
            Self::Environment(EnvironmentError::NotCgroup2(_) | EnvironmentError::NotBpffs(_))
            | Self::Exclude(CgroupError::NotCgroup2(_)) => true,
            Self::Manifests(ManifestError::Io(_, error)) | Self::Exclude(CgroupError::Io(_, error)) => {
                is_absence(error)
            }
            Self::Policy(error) => error.is_of_setting(),
            Self::StatusHttp(StatusHttpError { error, .. }) => is_absence(error),
            Self::Client(ClientError::Kubeconfig(path, _)) | Self::Bootstrap(path, _) => !path.is_file(),
            _ => false,
        }
    }

    /// Whether another attempt on this machine may succeed.
    pub(super) fn failure(&self) -> Failure {
        match self {
            Self::Environment(EnvironmentError::Io(..)) => Failure::Transient,
            Self::Environment(_) => Failure::Lasting,
            Self::Install(_, failure) => *failure,
            _ => Failure::Transient,
        }
    }
}

fn is_absence(error: &io::Error) -> bool {
    use io::ErrorKind::{AddrNotAvailable, InvalidInput, NotADirectory, NotFound};
    matches!(error.kind(), AddrNotAvailable | InvalidInput | NotADirectory | NotFound)
}
