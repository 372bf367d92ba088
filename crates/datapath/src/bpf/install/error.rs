//! Failures to install the programs.

use std::{io, path::PathBuf};

use aya::{
    maps::MapError,
    programs::{ProgramError, links::LinkError},
};

use crate::bpf::{
    error::{TableError, root_cause},
    load::LoadError,
    pins::PinError,
};

/// Failure to install the programs.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// The programs of network policy could not be attached behind the others.
    #[error(transparent)]
    Policy(Box<super::super::policy::PolicyError>),
    /// The programs could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The places of TCP sockets could not be freed.
    #[error("cannot free the places of TCP sockets: {}", root_cause(.0))]
    TcpPlaces(MapError),
    /// Further places of TCP sockets could not be freed.
    #[error("cannot free the places of TCP sockets: {0}")]
    FurtherTcpPlaces(TableError),
    /// The resizable maps could not be created.
    #[error("cannot make the first maps: {0}")]
    FirstMaps(FirstMapsError),
    /// A program could not be attached.
    #[error("cannot attach {0} to {cgroup}: {2}; is the kernel built with CONFIG_CGROUP_BPF?", cgroup = .1.display())]
    Attach(&'static str, PathBuf, AttachError),
    /// The rest of an older layout's table could not be removed.
    #[error("the table of an older layout was taken over, but not all of it removed: {0}")]
    Takeover(PinError),
    /// A file could not be used.
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
}

impl InstallError {
    /// Whether another attempt on this machine would fail in the same way.
    #[must_use]
    pub fn is_lasting(&self) -> bool {
        !matches!(self, Self::FirstMaps(_) | Self::Takeover(_) | Self::Io(..))
    }
}

/// Reason why the resizable maps could not be created.
#[derive(Debug, thiserror::Error)]
pub enum FirstMapsError {
    /// There was no thread.
    #[error("no thread: {0}")]
    NoThread(io::Error),
    /// A thread did not end by itself.
    #[error("a thread has panicked")]
    Panicked,
    /// There was no memory or descriptor.
    #[error(transparent)]
    Map(TableError),
}

/// Reason why a program could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The kernel refused to attach it.
    #[error("{}", root_cause(.0))]
    Program(#[from] ProgramError),
    /// The link that it got cannot be kept.
    #[error("{}", root_cause(.0))]
    Link(#[from] LinkError),
    /// A link that is there could not be updated.
    #[error(transparent)]
    Update(io::Error),
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn a_text_that_has_its_cause_is_not_followed_by_it() {
        let first_maps = InstallError::FirstMaps(FirstMapsError::Panicked);
        assert_eq!(first_maps.to_string(), "cannot make the first maps: a thread has panicked");
        let load = InstallError::Load(LoadError::Missing("map"));
        assert_eq!(load.to_string(), "the embedded object has no map: this build is broken");
        for error in [first_maps, load] {
            assert!(error.source().is_none(), "{error}");
        }
    }
}
