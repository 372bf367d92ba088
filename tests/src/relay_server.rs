//! A running `cproxy-relay run`, the program under test.

use std::{
    ffi::{OsStr, OsString},
    io,
    net::SocketAddr,
    path::PathBuf,
    process::ExitStatus,
    time::Duration,
};

use crate::{
    http,
    process::{COMMAND_TIMEOUT, Output, Signal, run},
    program::{Program, Running, Settings, without_settings},
    sandbox::{Placement, Sandbox},
};

/// Address of the metrics, unless another one is set.
const METRICS: &str = "127.0.0.1:9443";

/// The program under test, from the environment variable `CPROXY_RELAY_BIN`.
///
/// # Panics
/// When the variable is not set.
pub fn relay_binary() -> PathBuf {
    std::env::var_os("CPROXY_RELAY_BIN").map(PathBuf::from).expect(
        "CPROXY_RELAY_BIN is not set: build the relay with `cargo xtask build` and set it to target/dist/cproxy-relay",
    )
}

/// Runs the relay's program with `args` to its end.
pub fn cproxy_relay<S: AsRef<OsStr>>(sandbox: &Sandbox, args: impl IntoIterator<Item = S>) -> Output {
    let mut command = without_settings(relay_binary());
    command.args(args);
    run(sandbox, Placement::Unhooked, command, "", COMMAND_TIMEOUT)
}

/// Arguments and environment of `cproxy-relay run`. The relay is outside the sandbox's cgroup.
pub type RelayServer<'s> = Program<'s, RelaySettings>;

/// A running relay. It ends when this value is dropped.
pub type RunningRelay = Running<RelaySettings>;

/// Address of a relay's metrics and health checks.
#[derive(Debug)]
pub struct RelaySettings {
    metrics: SocketAddr,
}

impl Settings for RelaySettings {
    const NAME: &'static str = "cproxy-relay";

    fn binary() -> PathBuf {
        relay_binary()
    }

    fn args(&self) -> Vec<OsString> {
        vec!["--metrics-bind-address".into(), self.metrics.to_string().into()]
    }

    fn check_ready(&self) -> io::Result<()> {
        http::get(self.metrics, "/readyz").map(drop)
    }
}

impl<'s> RelayServer<'s> {
    /// A relay without an API server and without a listener, which must be added. Metrics are at 127.0.0.1:9443.
    pub fn new(sandbox: &'s Sandbox) -> Self {
        let metrics = METRICS.parse().expect("a constant is an address");
        Self::with_settings(sandbox, Placement::Unhooked, RelaySettings { metrics })
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
}

impl RunningRelay {
    /// Address of the metrics and health checks.
    #[must_use]
    pub fn metrics_address(&self) -> SocketAddr {
        self.own.metrics
    }

    /// The text of `/metrics`.
    ///
    /// # Panics
    /// When the relay does not answer.
    pub fn metrics(&self) -> String {
        http::get(self.own.metrics, "/metrics").expect("the relay does not answer /metrics")
    }

    /// Value of one metric, such as `cproxy_relay_watches{resource="services"}`.
    ///
    /// # Panics
    /// When the relay does not have it.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.metrics();
        metric(&text, name).unwrap_or_else(|| panic!("no metric {name} in: {text}"))
    }

    /// Asks the relay to end, and waits.
    ///
    /// # Panics
    /// When it has not ended after `timeout`.
    pub fn terminate(&mut self, timeout: Duration) -> ExitStatus {
        self.signal(Signal::TERM);
        self.wait(timeout).unwrap_or_else(|| panic!("the relay has not ended within {timeout:?}"))
    }
}

/// Value of a metric in Prometheus' text.
fn metric(text: &str, name: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
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
