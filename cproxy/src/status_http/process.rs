//! Metrics of the process, with the names that Prometheus's clients use for them.

use std::{
    fs,
    time::{SystemTime, UNIX_EPOCH},
};

use cproxy_daemon::{Exposition, MetricKind};
use rustix::process::{Resource, getrlimit};

/// Ticks per second in /proc: `USER_HZ`, which is the same on all architectures that the agent is built for.
const TICKS_PER_SECOND: f64 = 100.0;

/// Writes the metrics of this process, as far as /proc can be read.
pub(super) fn write(metrics: &mut Exposition, started: SystemTime) {
    use MetricKind::{Counter, Gauge};
    let read = |name: &str| fs::read_to_string(format!("/proc/self/{name}")).unwrap_or_default();
    if let Some(ticks) = cpu_ticks(&read("stat")) {
        let seconds = ticks as f64 / TICKS_PER_SECOND;
        metrics.number("process_cpu_seconds_total", Counter, "CPU time of the agent in seconds.", seconds);
    }
    if let Ok(since) = started.duration_since(UNIX_EPOCH) {
        let help = "Time at which the agent was started, in seconds since 1970.";
        metrics.number("process_start_time_seconds", Gauge, help, since.as_secs_f64());
    }
    let status = read("status");
    for (name, field, help) in [
        ("process_resident_memory_bytes", "VmRSS:", "Memory of the agent that is resident, in bytes."),
        ("process_virtual_memory_bytes", "VmSize:", "Address space of the agent in bytes."),
    ] {
        if let Some(kibibytes) = kibibytes(&status, field) {
            metrics.number(name, Gauge, help, kibibytes << 10);
        }
    }
    if let Ok(descriptors) = fs::read_dir("/proc/self/fd") {
        // Without that of the directory itself.
        let count = descriptors.count().saturating_sub(1);
        metrics.number("process_open_fds", Gauge, "Open descriptors of the agent.", count);
    }
    if let Some(limit) = getrlimit(Resource::Nofile).current {
        metrics.number("process_max_fds", Gauge, "Limit of its open descriptors.", limit);
    }
}

/// Ticks in user and kernel mode (proc_pid_stat(5)). The second field is a name in parentheses, with any characters.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let user: u64 = fields.nth(11)?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

fn kibibytes(status: &str, field: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(field))?;
    value.trim().trim_end_matches(" kB").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_memory_are_read_from_proc() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 250 25 0 0 20 0 1 0 100 1000 50";
        assert_eq!(cpu_ticks(stat), Some(275));
        assert_eq!((cpu_ticks(""), cpu_ticks("7 (a) S 1")), (None, None));
        let status = "Name:\tcproxy\nVmSize:\t    4096 kB\nVmRSS:\t     512 kB\n";
        assert_eq!((kibibytes(status, "VmRSS:"), kibibytes(status, "VmHWM:")), (Some(512), None));
    }
}
