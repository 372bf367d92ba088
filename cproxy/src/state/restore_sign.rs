//! Signs that the VM was restored from a snapshot.

use std::fmt;

/// Sign that the VM was restored from a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreSign {
    /// The VM has another generation id.
    NewGeneration,
    /// The wall clock was set, for which there are other reasons.
    ClockStep,
    /// The network has changed, and the API server does not answer on the present connection.
    ConnectionLost,
}

impl fmt::Display for RestoreSign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NewGeneration => "the VM was restored from a snapshot",
            Self::ClockStep => "the clock was set, perhaps after a restore of the VM",
            Self::ConnectionLost => "the network has changed, perhaps after a restore of the VM",
        })
    }
}
