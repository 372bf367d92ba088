//! Validated configuration of `cproxy run`; no I/O.

mod changes;
mod setting_rows;

use std::{collections::BTreeMap, fmt, path::PathBuf};

pub use changes::{Change, Changes};
use cproxy_core::{Balance, Exclusions, ExternalIps, NodeContext};
use cproxy_datapath::sockets::Mode;
use cproxy_wire::ApiServer;
pub use setting_rows::SettingRow;
use tracing::Level;

use cproxy_daemon::{ListenAddress, LogFormat};

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
    /// Other network namespaces than the agent's.
    pub other_netns: bool,
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

/// Counters of calls by Service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServiceCounting {
    /// The programs do not count.
    #[default]
    Off,
    /// The programs count.
    On,
}

impl ServiceCounting {
    /// Its name on the command line.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
        }
    }
}

/// Configuration of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Whether the agent does anything on this machine. An agent that runs has found it so at its start.
    pub enabled: bool,
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
    /// Whether calls are counted by Service.
    pub service_counters: ServiceCounting,
    /// Addresses by which the agent tests its own programs.
    pub canary: CanaryAddresses,
    /// Address of `/metrics`, if there is one.
    pub metrics_address: Option<ListenAddress>,
    /// Address of the health checks, if there is one.
    pub healthz_address: Option<ListenAddress>,
    /// Directory of pinned maps and links.
    pub pin_dir: PathBuf,
    /// Run directory, with `ready` and `cproxy.sock`.
    pub run_dir: PathBuf,
    /// Least severe level to log.
    pub log_level: Level,
    /// Format of log lines.
    pub log_format: LogFormat,
    /// Where flags got their values, by the name of the flag; defaults are left out.
    pub origins: BTreeMap<String, String>,
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
        if self.node.external_ips == ExternalIps::Ignore {
            f.write_str("; ignores external addresses of Services")?;
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
        if self.service_counters == ServiceCounting::On {
            f.write_str("; counts calls by Service")?;
        }
        write!(f, "; canary {}", self.canary)?;
        for (name, address) in [("metrics", &self.metrics_address), ("health checks", &self.healthz_address)] {
            if let Some(address) = address {
                write!(f, "; {name} at {address}")?;
            }
        }
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
        list("ports", self.ports.iter().map(u16::to_string).collect())?;
        if self.other_netns { f.write_str("; left alone: other network namespaces") } else { Ok(()) }
    }
}
