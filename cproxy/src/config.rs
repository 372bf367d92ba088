//! Validated configuration of `cproxy run`; no I/O.

mod changes;

use std::{fmt, path::PathBuf};

pub use changes::{Change, Changes};
use cproxy_core::{Balance, Exclusions, NodeContext};
use cproxy_datapath::sockets::Mode;
use cproxy_wire::ApiServer;
use tracing::Level;

use cproxy_daemon::LogFormat;

pub use crate::canary::CanaryAddresses;

/// Source of Services and EndpointSlices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectSource {
    /// An API server.
    ApiServer(ApiServer),
    /// Files and directories.
    Manifests(Vec<PathBuf>),
}

/// Processes and destinations that are left alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exclude {
    /// cgroup2 directories: processes in or below them.
    pub cgroups: Vec<PathBuf>,
    /// User ids of processes.
    pub uids: Vec<u32>,
    /// Destination ports.
    pub ports: Vec<u16>,
}

/// Settings of the programs and of the search for stale sockets.
#[derive(Clone, Debug)]
pub struct TableSettings {
    /// Processes and destinations that are left alone, as the programs know them.
    pub exclusions: Exclusions,
    /// Choice of a backend for a new connection.
    pub balance: Balance,
    /// Stale sockets to close.
    pub terminate_sockets: Mode,
}

/// Configuration of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Source of the objects.
    pub source: ObjectSource,
    /// Manifest to serve until the first complete sync.
    pub bootstrap: Option<PathBuf>,
    /// Node name, node IPs and VM IPs, as far as they are given.
    pub node: NodeContext,
    /// cgroup to attach to; `None`: the cgroup2 root.
    pub cgroup: Option<PathBuf>,
    /// Exclusions.
    pub exclude: Exclude,
    /// Choice of a backend for a new connection.
    pub balance: Balance,
    /// Stale sockets to close.
    pub terminate_sockets: Mode,
    /// Addresses by which the agent tests its own programs.
    pub canary: CanaryAddresses,
    /// Directory of pinned maps and links.
    pub pin_dir: PathBuf,
    /// Run directory, with `ready` and `cproxy.sock`.
    pub run_dir: PathBuf,
    /// Least severe level to log.
    pub log_level: Level,
    /// Format of log lines.
    pub log_format: LogFormat,
}

impl fmt::Display for ObjectSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ApiServer(server) => server.fmt(f),
            Self::Manifests(paths) => {
                let paths: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
                write!(f, "manifests {}", paths.join(", "))
            }
        }
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)?;
        if let Some(path) = &self.bootstrap {
            write!(f, "; bootstrap {}", path.display())?;
        }
        if let Some(name) = &self.node.node_name {
            write!(f, "; node {name}")?;
        }
        for (what, addresses) in [("node addresses", &self.node.node_ips), ("given own addresses", &self.node.pod_ips)]
        {
            if !addresses.is_empty() {
                let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
                write!(f, "; {what} {}", addresses.join(", "))?;
            }
        }
        match &self.cgroup {
            Some(dir) => write!(f, "; cgroup {}", dir.display())?,
            None => write!(f, "; the cgroup2 root")?,
        }
        self.exclude.fmt(f)?;
        match self.balance {
            Balance::Random => f.write_str("; chooses at random")?,
            Balance::RoundRobin => f.write_str("; chooses round robin")?,
        }
        let closed = match self.terminate_sockets {
            Mode::None => "no stale sockets",
            Mode::Udp => "stale UDP sockets",
            Mode::All => "all stale sockets",
        };
        write!(f, "; closes {closed}; canary {}", self.canary)?;
        write!(f, "; pins in {}, run directory {}", self.pin_dir.display(), self.run_dir.display())
    }
}

impl fmt::Display for Exclude {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut list = |what: &str, names: Vec<String>| match names.as_slice() {
            [] => Ok(()),
            names => write!(f, "; left alone: {what} {}", names.join(", ")),
        };
        list("cgroups", self.cgroups.iter().map(|dir| dir.display().to_string()).collect())?;
        list("uids", self.uids.iter().map(u32::to_string).collect())?;
        list("ports", self.ports.iter().map(u16::to_string).collect())
    }
}
