//! The peers, and how each starts and ends.

use std::{
    fmt, fs,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use cproxy_benches::{kube_proxy::KubeProxy, subject};
use cproxy_tests::{
    control_plane::{ControlPlane, NODE},
    echo::Server,
    http,
    population::Shape,
    process::{Agent, Daemon, RunningAgent, cproxy, cproxy_binary},
    sandbox::{Netns, Sandbox},
    writer::Writer,
};

/// Address of cproxy's metrics.
const METRICS: &str = "127.0.0.1:10249";
/// Usual interval of Prometheus's scrapes (its example configuration has it).
const SCRAPE_INTERVAL: Duration = Duration::from_secs(15);

/// A proxy that follows the API server.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    Cproxy,
    /// cproxy with metrics, which are scraped
    CproxyScraped,
    Iptables,
    Nftables,
}

/// The sandbox, its control plane and its servers.
pub(crate) struct Place<'s> {
    pub(crate) sandbox: &'s Sandbox,
    pub(crate) control_plane: &'s ControlPlane<'s>,
    pub(crate) writer: &'s Writer,
    pub(crate) shape: Shape,
}

/// A running peer that is ready. When it is dropped, everything of it leaves the kernel.
pub(crate) struct Running<'s> {
    sandbox: &'s Sandbox,
    process: Process,
    pub(crate) netns: Netns,
    _backends: Vec<Server>,
}

enum Process {
    Cproxy { agent: RunningAgent, is_scraped: bool },
    KubeProxy(Daemon),
}

impl Peer {
    /// Peers that are measured unless others are named.
    pub(crate) const USUAL: [Self; 3] = [Self::Cproxy, Self::Iptables, Self::Nftables];

    pub(crate) fn is_cproxy(self) -> bool {
        matches!(self, Self::Cproxy | Self::CproxyScraped)
    }

    /// Size of the peer's own program, without iptables and nftables.
    pub(crate) fn bytes_on_disk(self, place: &Place<'_>) -> Result<u64> {
        let binary: PathBuf = match self {
            Self::Cproxy | Self::CproxyScraped => cproxy_binary(),
            Self::Iptables | Self::Nftables => place.control_plane.binary("kube-proxy"),
        };
        Ok(fs::metadata(&binary).with_context(|| format!("reading {}", binary.display()))?.len())
    }

    /// Starts the peer after `changes` changes, waits until it is ready, and returns the time that took.
    pub(crate) fn start<'s>(self, place: &Place<'s>, changes: usize) -> Result<(Running<'s>, Duration)> {
        let Place { sandbox, control_plane, .. } = *place;
        let mode = match self {
            Self::Cproxy | Self::CproxyScraped => {
                let netns = sandbox.netns().clone();
                let backends = subject::serve(&netns);
                let is_scraped = self == Self::CproxyScraped;
                let metrics: &[&str] = if is_scraped { &["--metrics-bind-address", METRICS] } else { &[] };
                let agent = Agent::new(sandbox).kubeconfig(control_plane.agent_kubeconfig());
                let agent = agent.args(["--node-name", NODE]).args(metrics);
                let (agent, to_ready) = agent.start_and_time(subject::TIMEOUT);
                let process = Process::Cproxy { agent, is_scraped };
                return Ok((Running { sandbox, process, netns, _backends: backends }, to_ready));
            }
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
        };
        let netns = sandbox.neighbour(subject::BACKENDS);
        let backends = subject::serve(&netns);
        let seen = subject::look_for(&netns, subject::backend(changes));
        let started = Instant::now();
        let kubeconfig = control_plane.kubeconfig_for("system:kube-proxy");
        let daemon =
            KubeProxy { binary: control_plane.binary("kube-proxy"), kubeconfig }.spawn(sandbox, &netns, mode)?;
        let ready = seen.wait().with_context(|| format!("kube-proxy's log: {}", daemon.tail()))?;
        let process = Process::KubeProxy(daemon);
        Ok((Running { sandbox, process, netns, _backends: backends }, ready - started))
    }
}

impl Running<'_> {
    pub(crate) fn pid(&self) -> u32 {
        match &self.process {
            Process::Cproxy { agent, .. } => agent.pid(),
            Process::KubeProxy(daemon) => daemon.pid(),
        }
    }

    /// Lets an interval pass, and scrapes the peer meanwhile as Prometheus does, if it has metrics and is scraped.
    pub(crate) fn pass(&self, interval: Duration) -> Result<()> {
        let mut left = interval;
        while self.is_scraped() && left >= SCRAPE_INTERVAL {
            thread::sleep(SCRAPE_INTERVAL);
            self.scrape()?;
            left -= SCRAPE_INTERVAL;
        }
        thread::sleep(left);
        Ok(())
    }

    /// Scrapes the peer once, if it has metrics and is scraped.
    pub(crate) fn scrape(&self) -> Result<()> {
        if self.is_scraped() {
            self.netns.run(|| http::get(METRICS, "/metrics")).context("scraping the metrics")?;
        }
        Ok(())
    }

    fn is_scraped(&self) -> bool {
        matches!(self.process, Process::Cproxy { is_scraped: true, .. })
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        match &mut self.process {
            Process::Cproxy { agent, .. } => {
                agent.stop();
                cproxy(self.sandbox, &["cleanup"]);
            }
            Process::KubeProxy(daemon) => drop(daemon.stop()),
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Cproxy => "cproxy",
            Self::CproxyScraped => "cproxy, scraped each 15 s",
            Self::Iptables => "kube-proxy, iptables",
            Self::Nftables => "kube-proxy, nftables",
        })
    }
}
