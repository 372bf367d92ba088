//! A running `cproxy-relay run`, the program under test.

use std::{
    ffi::OsStr,
    net::SocketAddr,
    ops::{Deref, DerefMut},
    os::fd::OwnedFd,
    path::PathBuf,
    process::ExitStatus,
    time::Duration,
};

use crate::{
    http,
    process::{Daemon, Signal, replace_stderr},
    program::Program,
    sandbox::{Placement, Sandbox},
};

/// Address of the metrics, unless another one is set.
const METRICS: &str = "127.0.0.1:9443";

/// Limit on the first lists, on a busy machine.
const READY_TIMEOUT: Duration = Duration::from_secs(120);

/// The program under test, from the environment variable `CPROXY_RELAY_BIN`.
///
/// # Panics
/// When the variable is not set.
pub fn relay_binary() -> PathBuf {
    std::env::var_os("CPROXY_RELAY_BIN").map(PathBuf::from).expect(
        "CPROXY_RELAY_BIN is not set: build the relay with `cargo xtask build` and set it to target/dist/cproxy-relay",
    )
}

/// Arguments and environment of `cproxy-relay run`.
pub type RelayServer<'s> = Program<'s, RelaySettings>;

/// Address of a relay's metrics and health checks.
#[derive(Debug)]
pub struct RelaySettings {
    metrics: SocketAddr,
}

impl<'s> RelayServer<'s> {
    /// A relay without an API server and without a listener, which must be added. Metrics are at 127.0.0.1:9443.
    pub fn new(sandbox: &'s Sandbox) -> Self {
        let metrics = METRICS.parse().expect("a constant is an address");
        Self::with_settings(sandbox, RelaySettings { metrics })
    }

    /// Adds `--listen address`.
    #[must_use]
    pub fn listen(self, address: impl AsRef<OsStr>) -> Self {
        self.arg("--listen").arg(address)
    }

    /// Adds `--authentication none`.
    #[must_use]
    pub fn without_authentication(self) -> Self {
        self.args(["--authentication", "none"])
    }

    /// Sets another address of the metrics and health checks. Replicas in one sandbox need different ones.
    #[must_use]
    pub fn metrics(mut self, address: SocketAddr) -> Self {
        self.own.metrics = address;
        self
    }

    /// Starts the relay, outside the sandbox's cgroup, and waits for nothing.
    pub fn spawn(self) -> RunningRelay {
        let (sandbox, metrics) = (self.sandbox, self.own.metrics);
        let own = ["--metrics-bind-address".into(), metrics.to_string().into()];
        let command = self.run_command(relay_binary, own);
        let daemon = Daemon::spawn(sandbox, "cproxy-relay", Placement::Unhooked, command);
        RunningRelay { daemon, metrics }
    }

    /// The same with this as its standard error, in place of the log file.
    pub fn spawn_with_stderr(self, stderr: OwnedFd) -> RunningRelay {
        let (sandbox, metrics) = (self.sandbox, self.own.metrics);
        let own = ["--metrics-bind-address".into(), metrics.to_string().into()];
        let mut command = self.run_command(relay_binary, own);
        replace_stderr(&mut command, stderr);
        let daemon = Daemon::spawn(sandbox, "cproxy-relay", Placement::Unhooked, command);
        RunningRelay { daemon, metrics }
    }

    /// Starts the relay and waits until it is ready.
    ///
    /// # Panics
    /// When it ends, or is not ready in time; then the end of its log is printed.
    pub fn start(self) -> RunningRelay {
        let mut relay = self.spawn();
        relay.wait_ready(READY_TIMEOUT);
        relay
    }
}

/// A running relay. It ends when this value is dropped.
#[derive(Debug)]
pub struct RunningRelay {
    daemon: Daemon,
    metrics: SocketAddr,
}

impl RunningRelay {
    /// Waits until `/readyz` says that it is ready.
    ///
    /// # Panics
    /// After `timeout`, or at once when the relay has ended.
    pub fn wait_ready(&mut self, timeout: Duration) {
        let metrics = self.metrics;
        self.daemon.wait_until(timeout, "the relay is ready", |_| http::get(metrics, "/readyz"));
    }

    /// Address of the metrics and health checks.
    #[must_use]
    pub fn metrics_address(&self) -> SocketAddr {
        self.metrics
    }

    /// The text of `/metrics`.
    ///
    /// # Panics
    /// When the relay does not answer.
    pub fn metrics(&self) -> String {
        http::get(self.metrics, "/metrics").expect("the relay does not answer /metrics")
    }

    /// Value of one metric, such as `cproxy_relay_watches{resource="services"}`.
    ///
    /// # Panics
    /// When the relay does not have it.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.metrics();
        metric(&text, name).unwrap_or_else(|| panic!("no metric {name} in: {text}"))
    }

    /// Asks the relay to end, by SIGTERM: it moves its clients first. Wait for its end with [`Daemon::wait`].
    pub fn terminate(&mut self) {
        self.daemon.signal(Signal::TERM);
    }

    /// Asks the relay to end, and waits.
    ///
    /// # Panics
    /// When it has not ended after `timeout`.
    pub fn terminate_and_wait(&mut self, timeout: Duration) -> ExitStatus {
        self.terminate();
        self.daemon.wait(timeout).unwrap_or_else(|| panic!("the relay has not ended within {timeout:?}"))
    }
}

/// Value of a metric in Prometheus' text.
fn metric(text: &str, name: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

impl Deref for RunningRelay {
    type Target = Daemon;

    fn deref(&self) -> &Daemon {
        &self.daemon
    }
}

impl DerefMut for RunningRelay {
    fn deref_mut(&mut self) -> &mut Daemon {
        &mut self.daemon
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_found_by_its_whole_name() {
        let text = "# TYPE a gauge\na{b=\"c\"} 2\na_total 3\na 1.5\n";
        assert_eq!(metric(text, "a"), Some(1.5));
        assert_eq!(metric(text, "a{b=\"c\"}"), Some(2.0));
        assert_eq!(metric(text, "b"), None);
    }
}
