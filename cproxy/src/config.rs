//! What `cproxy run` was asked to do, validated; no I/O.

use std::{fmt, path::PathBuf};

use cproxy_core::{Balance, Own};
use cproxy_datapath::sockets::Mode;
use cproxy_wire::ApiServer;

/// Where Services and EndpointSlices come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// An API server.
    ApiServer(ApiServer),
    /// Files and directories.
    Manifests(Vec<PathBuf>),
}

/// Whose sockets, and which destinations, are left alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exclude {
    /// Processes in or below these cgroup2 directories.
    pub cgroups: Vec<PathBuf>,
    /// Processes of these users.
    pub uids: Vec<u32>,
    /// Destinations with these ports.
    pub ports: Vec<u16>,
}

/// Everything `cproxy run` needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where objects come from.
    pub source: Source,
    /// A manifest that is served until the first complete sync.
    pub bootstrap: Option<PathBuf>,
    /// The place: the own node, its addresses and the VM's, as far as they are given.
    pub own: Own,
    /// Where to attach; `None`: the cgroup2 root.
    pub cgroup: Option<PathBuf>,
    /// Who is left alone.
    pub exclude: Exclude,
    /// How a backend is chosen for a new connection.
    pub balance: Balance,
    /// Which stale sockets are closed.
    pub terminate_sockets: Mode,
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
        if let Some(name) = &self.own.node_name {
            write!(f, "; node {name}")?;
        }
        for (what, addresses) in [("node addresses", &self.own.node_ips), ("given own addresses", &self.own.pod_ips)] {
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
        write!(f, "; closes {closed}")?;
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
