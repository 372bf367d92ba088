//! Configuration of `cproxy run`: its settings, and what follows from them; no I/O.

mod changes;
mod choice;
mod origins;
mod setting;
mod setting_rows;
mod table;

use std::{fmt, path::PathBuf};

use clap::Args;
use cproxy_core::{Balance, Exclusions, NodeContext};
use cproxy_datapath::{EXCLUDED_CGROUPS_MAX, EXCLUSIONS_MAX, bpf::PolicyPins, sockets::TerminateSockets};
use cproxy_wire::ApiServer;

pub(crate) use self::choice::choice;
#[cfg(feature = "schema")]
pub use self::setting::Manual;
pub use self::{
    changes::{Change, Changes},
    choice::{Choice, ExcludeNetns, ExistingConnections, OnTimeout, PolicyMode, ServiceCounting},
    origins::{Origins, Switch},
    setting::{Applies, Group, Secrecy, Setting, Settings},
    setting_rows::SettingRow,
    table::{
        BootstrapSettings, CgroupSettings, CounterSettings, LogSettings, MonitoringSettings, NodeNameSettings,
        NodeSettings, PinDirSettings, PolicySettings, ReceiveSettings, RunDirSettings, SourceSettings, SwitchSettings,
        TrafficSettings, WaitSettings,
    },
};
pub use crate::canary::CanaryAddresses;

/// Source of Services and EndpointSlices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectSource {
    /// An API server.
    ApiServer(ApiServer),
    /// Files and directories.
    Manifests(Vec<PathBuf>),
}

/// Settings that the task which owns the table needs, from the start and whenever they change.
#[derive(Clone, Debug)]
pub struct LoopSettings {
    /// Processes and destinations that are left alone, as the programs know them.
    pub exclusions: Exclusions,
    /// Choice of a backend for a new connection.
    pub balance: Balance,
    /// Stale sockets to close.
    pub terminate_sockets: TerminateSockets,
}

/// Makes the configuration of its groups, and all that goes over them.
macro_rules! groups {
    ($($(#[$of_group:meta])* $field:ident: $group:ty,)*) => {
        /// All settings by group, in the order of the help; those of `cproxy wait` come last.
        pub const SETTINGS: &[Group] = &[$(<$group>::GROUP,)* WaitSettings::GROUP];

        /// Configuration of the agent: all settings of `cproxy run`, which are its flags.
        #[derive(Args, Clone, Debug, PartialEq, Eq)]
        pub struct Config {
            $($(#[$of_group])*
            #[command(flatten)]
            pub $field: $group,)*
        }

        impl Config {
            /// The groups with their values, in the order of the help.
            fn groups(&self) -> Vec<&dyn Settings> {
                vec![$(&self.$field),*]
            }

            /// Takes the values of `old` for settings that count at the next start.
            fn keep(&mut self, old: &Self) {
                $(self.$field.keep(&old.$field);)*
            }
        }
    };
}

groups! {
    /// Whether the agent does anything on this machine. An agent that runs has found it so at its start.
    switch: Switch,
    /// Source of the objects: what a change of its kind replaces as a whole.
    source: SourceSettings,
    /// Table until the first complete sync.
    bootstrap: BootstrapSettings,
    /// Name of the node.
    node_name: NodeNameSettings,
    /// Addresses of node and VM, as far as they are given.
    node: NodeSettings,
    /// Place of the programs.
    cgroup: CgroupSettings,
    /// Calls that are translated, and how.
    traffic: TrafficSettings,
    /// Network policy of the pod.
    policy: PolicySettings,
    /// Traffic from outside.
    receive: ReceiveSettings,
    /// Counters by Service.
    counters: CounterSettings,
    /// Tests by the agent itself, and what monitoring sees.
    monitoring: MonitoringSettings,
    /// The pin directory.
    pins: PinDirSettings,
    /// The run directory.
    run: RunDirSettings,
    /// The log.
    log: LogSettings,
}

impl Config {
    /// Says which setting has more values than the programs have room for, if one has.
    ///
    /// # Errors
    /// Names the flag, the number of its values and the limit.
    pub fn check(&self) -> Result<(), String> {
        let TrafficSettings { exclude_cgroup, exclude_uid, exclude_port, exclude_netns, .. } = &self.traffic;
        let has_netns = *exclude_netns == ExcludeNetns::Others;
        let counts = [
            ("--exclude-cgroup", exclude_cgroup.len(), EXCLUDED_CGROUPS_MAX - usize::from(has_netns)),
            ("--exclude-uid", exclude_uid.len(), EXCLUSIONS_MAX),
            ("--exclude-port", exclude_port.len(), EXCLUSIONS_MAX),
            ("--policy-exempt-cgroup", self.policy.policy_exempt_cgroup.len(), PolicyPins::EXEMPT_CGROUPS_MAX),
        ];
        let Some((flag, count, most)) = counts.into_iter().find(|(_, count, most)| count > most) else {
            return Ok(());
        };
        let beside = if has_netns && flag == "--exclude-cgroup" { " beside --exclude-netns" } else { "" };
        Err(format!("{flag}: {count} values; at most {most} are allowed{beside}"))
    }

    /// Node and VM that the agent runs on, as far as they are given.
    #[must_use]
    pub fn node_context(&self) -> NodeContext {
        self.node.context(&self.node_name)
    }
}

impl SourceSettings {
    /// The source that they name.
    #[must_use]
    pub fn source(&self) -> ObjectSource {
        if self.manifests.is_empty() {
            ObjectSource::ApiServer(ApiServer {
                kubeconfig: self.kubeconfig.clone(),
                addresses: self.apiserver.clone(),
                tls_server_name: self.tls_server_name.clone(),
            })
        } else {
            ObjectSource::Manifests(self.manifests.clone())
        }
    }

    /// Whether it is an API server. `manifests` is the setting of the other kind, and all others are its own.
    fn is_api_server(&self) -> bool {
        self.manifests.is_empty()
    }
}

impl NodeNameSettings {
    /// The given name. An empty one, as scripts may leave it in a flag, counts as absent.
    #[must_use]
    pub fn name(&self) -> Option<String> {
        self.node_name.clone().filter(|name| !name.is_empty())
    }
}

impl NodeSettings {
    /// Node and VM, as far as they are given.
    #[must_use]
    pub fn context(&self, name: &NodeNameSettings) -> NodeContext {
        NodeContext {
            node_name: name.name(),
            node_ips: self.node_ip.clone(),
            pod_ips: self.pod_ip.clone(),
            external_ips: self.external_ips,
        }
    }
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

/// The source, and the settings that some place has.
impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.source().fmt(f)?;
        let is_of_source = |name: &str| SourceSettings::SETTINGS.iter().any(|setting| setting.name == name);
        let rows = self.rows().into_iter().filter(|row| !is_of_source(&row.name));
        for row in rows.filter(|row| self.switch.origins.has(&row.name)) {
            write!(f, "; {} {}", row.name, row.value.unwrap_or_default())?;
        }
        Ok(())
    }
}
