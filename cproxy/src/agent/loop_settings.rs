//! Settings of the task that owns the table, from the configuration and the machine's cgroups and network namespace.

use cproxy_core::Exclusions;
use cproxy_datapath::bpf::{excluded_cgroup, netns_cookie};

use super::error::AgentError;
use crate::config::{Config, ExcludeNetns, LoopSettings};

/// Reason why the agent would refuse the cgroups and network namespaces of its settings, if it would.
pub(crate) fn settings_error(config: &Config) -> Option<String> {
    loop_settings(config).err().map(|error| error.to_string())
}

/// Settings of the task that owns the table. Fails if an excluded cgroup does not exist.
pub(super) fn loop_settings(config: &Config) -> Result<LoopSettings, AgentError> {
    let traffic = &config.traffic;
    let cgroups = traffic.exclude_cgroup.iter().map(|dir| excluded_cgroup(dir)).collect::<Result<_, _>>()?;
    let has_netns = traffic.exclude_netns == ExcludeNetns::Others;
    let netns_others_than = has_netns.then(netns_cookie).transpose().map_err(AgentError::ExcludeNetns)?;
    let (uids, ports) = (traffic.exclude_uid.clone(), traffic.exclude_port.clone());
    let exclusions = Exclusions { cgroups, uids, ports, netns_others_than };
    Ok(LoopSettings { exclusions, balance: traffic.balance, terminate_sockets: traffic.terminate_sockets })
}
