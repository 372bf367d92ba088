//! Names in the run directory and requests at its socket.

use std::time::Duration;

/// File of a complete table.
pub(super) const READY: &str = "ready";
/// File of programs that are attached below the cgroup root.
pub(super) const LIMITED: &str = "limited";
/// File of a pod's policy that is not in force.
pub(super) const CLOSED: &str = "closed";
/// File of a failure that another attempt may repair.
pub(super) const FAILED: &str = "failed";
/// File of a failure that would repeat itself.
pub(super) const UNUSABLE: &str = "unusable";
/// Socket that is there as long as the agent lives, for all users.
pub(super) const ALIVE: &str = "alive";
/// Socket of the agent.
pub(super) const SOCKET: &str = "cproxy.sock";

/// Request for the frontends, by name.
pub(super) const REQUEST_SERVICES: &str = "services\n";
/// Request for the gauges.
pub(super) const REQUEST_GAUGES: &str = "gauges\n";
/// Request for the source.
pub(super) const REQUEST_SOURCE: &str = "source\n";
/// Start of a request for the view of a destination, which follows it.
pub(super) const REQUEST_EXPLAIN: &str = "explain ";
/// Request for the present problems.
pub(super) const REQUEST_PROBLEMS: &str = "problems\n";
/// Request for the pod's policy.
pub(super) const REQUEST_POLICY: &str = "policy\n";
/// Request for what the pod receives for load balancers.
pub(super) const REQUEST_RECEIVE: &str = "receive\n";
/// Request for a look at the programs.
pub(super) const REQUEST_HEALTH: &str = "health\n";
/// Request for the settings in force.
pub(super) const REQUEST_CONFIG: &str = "config\n";
/// Request for the last lines of the log.
pub(super) const REQUEST_LOG: &str = "log\n";
/// Start of a request for another level of the log, which follows it.
pub(super) const REQUEST_LOG_LEVEL: &str = "log-level ";
/// Request for a new seed.
pub(super) const REQUEST_RESEED: &str = "reseed\n";
pub(super) const REQUEST_HOLD: &str = "reseed before-snapshot\n";

/// Longest time for a response.
pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
