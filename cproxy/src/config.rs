//! What `cproxy run` was asked to do, validated; no I/O.

use std::{fmt, path::PathBuf};

use crate::k8s::ApiServer;

/// Where Services and EndpointSlices come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// An API server.
    ApiServer(ApiServer),
    /// Files and directories.
    Manifests(Vec<PathBuf>),
}

/// Everything `cproxy run` needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where objects come from.
    pub source: Source,
    /// A manifest that is served until the first complete sync.
    pub bootstrap: Option<PathBuf>,
    /// Where to attach; `None`: the cgroup2 root.
    pub cgroup: Option<PathBuf>,
    /// Where maps and links are pinned.
    pub pin_dir: PathBuf,
    /// Where `ready` and `cproxy.sock` appear.
    pub run_dir: PathBuf,
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Source::ApiServer(server) => server.fmt(f)?,
            Source::Manifests(paths) => {
                let paths: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
                write!(f, "manifests {}", paths.join(", "))?;
            }
        }
        if let Some(path) = &self.bootstrap {
            write!(f, "; bootstrap {}", path.display())?;
        }
        match &self.cgroup {
            Some(dir) => write!(f, "; cgroup {}", dir.display())?,
            None => write!(f, "; the cgroup2 root")?,
        }
        write!(f, "; pins in {}, run directory {}", self.pin_dir.display(), self.run_dir.display())
    }
}
