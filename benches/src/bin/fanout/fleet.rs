//! Many clients of one API server, all of one kind, each in its own place as in a microVM of its own.

use std::{
    fmt, fs, io,
    net::IpAddr,
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use cproxy_benches::{
    kube_proxy::KubeProxy,
    subject::{self, Seen, TIMEOUT, VIP},
};
use cproxy_tests::{
    control_plane::{ControlPlane, NODE},
    echo::Server,
    process::{Agent, Daemon, RunningAgent, cproxy_binary},
    sandbox::{Netns, Sandbox},
    usage::cpu_time,
};

use crate::table::Table;

/// Shortest pause between two polls of all tables; it is longer if a poll takes long.
const PAUSE: Duration = Duration::from_micros(200);
const PAUSE_FACTOR: u32 = 4;

/// Pause between two polls for clients that are ready.
const READY_POLL: Duration = Duration::from_millis(1);

/// Number of fleets so far, so that one fleet does not meet the remains of another.
static FLEET: AtomicU32 = AtomicU32::new(0);

/// Client of the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Cproxy,
    KubeProxy,
}

impl Kind {
    pub(crate) const ALL: [Self; 2] = [Self::Cproxy, Self::KubeProxy];
}

/// Running clients. When they are dropped, everything of them leaves the kernel.
pub(crate) struct Fleet {
    clients: Clients,
    /// Network namespaces; agents share one.
    netns: Vec<Netns>,
}

enum Clients {
    Agents { agents: Vec<OneAgent>, tables: Arc<Vec<Table>> },
    KubeProxies { daemons: Vec<Daemon>, _backends: Vec<Server> },
}

struct OneAgent {
    process: RunningAgent,
    cgroup: PathBuf,
    pin_dir: PathBuf,
}

impl Fleet {
    /// Starts `count` clients at the same time after `changes` changes of the Service, waits until all are ready, and
    /// returns the time of each from the first one's start.
    pub(crate) fn start(
        kind: Kind,
        count: u32,
        sandbox: &Sandbox,
        control_plane: &ControlPlane<'_>,
        changes: usize,
    ) -> Result<(Self, Vec<Duration>)> {
        match kind {
            Kind::Cproxy => start_agents(count, sandbox, control_plane),
            Kind::KubeProxy => start_kube_proxies(count, sandbox, control_plane, changes),
        }
    }

    /// Process IDs of the clients.
    pub(crate) fn pids(&self) -> Vec<u32> {
        match &self.clients {
            Clients::Agents { agents, .. } => agents.iter().map(|agent| agent.process.pid()).collect(),
            Clients::KubeProxies { daemons, .. } => daemons.iter().map(Daemon::pid).collect(),
        }
    }

    /// CPU time of all clients together.
    pub(crate) fn cpu(&self) -> Duration {
        self.pids().into_iter().map(cpu_time).sum()
    }

    /// Bytes received over their links, headers included.
    pub(crate) fn received_bytes(&self) -> Result<u64> {
        let received = self.netns.iter().map(|netns| netns.run(link_received_bytes));
        received.sum::<io::Result<u64>>().context("reading a link's counters")
    }

    /// Starts to look for a backend at once, for each client.
    pub(crate) fn look_for(&self, backend: IpAddr) -> Looking {
        match &self.clients {
            Clients::Agents { tables, .. } => {
                let tables = tables.clone();
                Looking::InMaps(thread::spawn(move || wait_for(&tables, backend)))
            }
            Clients::KubeProxies { .. } => {
                Looking::Outside(self.netns.iter().map(|netns| subject::look_for(netns, backend)).collect())
            }
        }
    }
}

impl Drop for Fleet {
    /// An orderly end has no use here.
    fn drop(&mut self) {
        match &mut self.clients {
            Clients::KubeProxies { daemons, .. } => daemons.iter_mut().for_each(|daemon| {
                daemon.kill();
            }),
            Clients::Agents { agents, .. } => agents.iter_mut().for_each(OneAgent::end),
        }
    }
}

impl OneAgent {
    fn end(&mut self) {
        self.process.kill();
        // Programs and maps go with their pins. The rest goes with the sandbox.
        for removed in [fs::remove_dir_all(&self.pin_dir), fs::remove_dir(&self.cgroup)] {
            if let Err(error) = removed {
                eprintln!("fanout: {} or its cgroup stays: {error}", self.pin_dir.display());
            }
        }
    }
}

/// Pending observation of the moments at which clients follow a change.
pub(crate) enum Looking {
    InMaps(JoinHandle<Result<Vec<Instant>>>),
    Outside(Vec<Seen>),
}

impl Looking {
    pub(crate) fn wait(self) -> Result<Vec<Instant>> {
        match self {
            Self::InMaps(thread) => thread.join().map_err(|_| anyhow!("the thread that looks has panicked"))?,
            Self::Outside(seen) => seen.into_iter().map(Seen::wait).collect(),
        }
    }
}

/// Polls all tables that have not yet changed until all have.
fn wait_for(tables: &[Table], backend: IpAddr) -> Result<Vec<Instant>> {
    let started = Instant::now();
    let mut waiting = tables.iter().collect::<Vec<_>>();
    let mut seen = Vec::with_capacity(tables.len());
    loop {
        let look = Instant::now();
        let mut still = Vec::with_capacity(waiting.len());
        for table in waiting {
            if table.backend().context("reading an agent's maps")? == Some(backend) {
                seen.push(Instant::now());
            } else {
                still.push(table);
            }
        }
        if still.is_empty() {
            return Ok(seen);
        }
        ensure!(started.elapsed() < TIMEOUT, "{} agents do not follow a change within {TIMEOUT:?}", still.len());
        waiting = still;
        thread::sleep(PAUSE.max(look.elapsed() * PAUSE_FACTOR));
    }
}

fn start_agents(count: u32, sandbox: &Sandbox, control_plane: &ControlPlane<'_>) -> Result<(Fleet, Vec<Duration>)> {
    let netns = sandbox.neighbour::<IpAddr>([]);
    let launcher = launcher(sandbox, &netns)?;
    let kubeconfig = control_plane.agent_kubeconfig();
    let fleet = FLEET.fetch_add(1, Ordering::Relaxed);
    let started = Instant::now();
    let mut agents = Vec::new();
    for number in 0..count {
        let name = format!("fleet-{fleet}-{number}");
        let (cgroup, run_dir) = (sandbox.cgroup().join(&name), sandbox.run_dir().join(&name));
        let pin_dir = sandbox.dir().join("bpf").join(&name);
        fs::create_dir(&cgroup).and_then(|()| fs::create_dir(&run_dir)).context("making an agent's directories")?;
        let agent = Agent::new(sandbox).binary(&launcher).kubeconfig(&kubeconfig).args(["--node-name", NODE]);
        let process = agent.cgroup(&cgroup).pin_dir(&pin_dir).run_dir(run_dir).start();
        agents.push(OneAgent { process, cgroup, pin_dir });
    }
    let ready = wait_ready(&mut agents, started)?;
    let tables = agents.iter().map(|agent| Table::open(&agent.pin_dir, VIP)).collect::<io::Result<_>>();
    let tables = Arc::new(tables.context("opening an agent's maps")?);
    Ok((Fleet { clients: Clients::Agents { agents, tables }, netns: vec![netns] }, ready))
}

fn wait_ready(agents: &mut [OneAgent], started: Instant) -> Result<Vec<Duration>> {
    let mut ready = vec![None; agents.len()];
    while ready.iter().any(Option::is_none) {
        for (agent, ready) in agents.iter_mut().zip(&mut ready).filter(|(_, ready)| ready.is_none()) {
            if agent.process.is_ready() {
                *ready = Some(started.elapsed());
            } else if agent.process.exit_status().is_some() {
                bail!("an agent has ended: {}", agent.process.tail());
            }
        }
        ensure!(started.elapsed() < TIMEOUT, "not all agents are ready within {TIMEOUT:?}");
        thread::sleep(READY_POLL);
    }
    Ok(ready.into_iter().flatten().collect())
}

/// Writes a script that runs the agent in the namespace with the script's arguments.
fn launcher(sandbox: &Sandbox, netns: &Netns) -> Result<PathBuf> {
    let path = sandbox.dir().join("agent-in-netns");
    let (netns, agent) = (netns.path(), cproxy_binary());
    let script = format!("#!/bin/sh\nexec nsenter '--net={}' '{}' \"$@\"\n", netns.display(), agent.display());
    fs::write(&path, script)
        .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))
        .context("writing into the sandbox")?;
    Ok(path)
}

fn start_kube_proxies(
    count: u32,
    sandbox: &Sandbox,
    control_plane: &ControlPlane<'_>,
    changes: usize,
) -> Result<(Fleet, Vec<Duration>)> {
    let netns = (0..count).map(|_| sandbox.neighbour(subject::BACKENDS)).collect::<Vec<_>>();
    let backends = netns.iter().flat_map(subject::serve).collect();
    let started = Instant::now();
    let seen = netns.iter().map(|netns| subject::look_for(netns, subject::backend(changes))).collect();
    let kubeconfig = control_plane.kubeconfig_for("system:kube-proxy");
    let kube_proxy = KubeProxy { binary: control_plane.binary("kube-proxy"), kubeconfig };
    let daemons = netns.iter().map(|netns| kube_proxy.spawn(sandbox, netns, "nftables")).collect::<Result<Vec<_>>>()?;
    let ready = Looking::Outside(seen).wait()?.into_iter().map(|seen| seen - started).collect();
    Ok((Fleet { clients: Clients::KubeProxies { daemons, _backends: backends }, netns }, ready))
}

/// Received bytes of the calling thread's namespace, without its loopback interface.
fn link_received_bytes() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/thread-self/net/dev")?;
    Ok(received_bytes(&text))
}

/// Sums `name: bytes packets ...` after two heading lines.
fn received_bytes(net_dev: &str) -> u64 {
    let links = net_dev.lines().filter_map(|line| line.split_once(':')).filter(|(name, _)| name.trim() != "lo");
    links.filter_map(|(_, numbers)| numbers.split_whitespace().next()?.parse::<u64>().ok()).sum()
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Cproxy => "cproxy",
            Self::KubeProxy => "kube-proxy, nftables",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn received_bytes_are_the_first_number_of_a_link() {
        let text =
            "Inter-|   Receive  |  Transmit\n face |bytes    packets|bytes\n    lo:    7  1 0\n   far: 1234  10 0\n";
        assert_eq!(received_bytes(text), 1234);
    }
}
