//! What `cproxy run` was asked to do, validated; no I/O.

use std::path::PathBuf;

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
