//! Settings of the task that owns the table, from the configuration and the machine's cgroups and network namespace.

use cproxy_core::{Address, Exclusions};
use cproxy_datapath::bpf::{PinDir, excluded_cgroup, netns_cookie};
use cproxy_network::NetworkPath;

use super::{error::AgentError, own_sockets::socket_setup};
use crate::config::{Config, ExcludeNetns, LoopSettings};

/// Reason why the agent would refuse settings that this machine does not fit, if it would.
pub(crate) fn settings_error(config: &Config) -> Option<String> {
    let error = check_canary(config).and_then(|()| loop_settings(config)).err();
    error.map(|error| error.to_string())
}

/// Refuses addresses of this machine for the canary.
pub(super) fn check_canary(config: &Config) -> Result<(), AgentError> {
    let setup = socket_setup(&PinDir::new(&config.pins.pin_dir));
    let is_own = |address: &Address| {
        let address = (*address).into();
        NetworkPath::to(address, &setup).is_ok_and(|path| path.source == address)
    };
    let own = config.monitoring.canary_address.iter().find(is_own);
    own.map_or(Ok(()), |own| Err(AgentError::OwnCanary(own)))
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
