//! Many clients of one API server, all of one kind, each in its own place as in a microVM of its own.

use std::{
    fmt, fs, io,
    net::IpAddr,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
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
    rest,
    subject::{self, Seen, TIMEOUT, VIP},
};
use cproxy_tests::{
    control_plane::{NODE, PORT},
    echo::Server,
    process::{Agent, Daemon, RunningAgent, cproxy_binary},
    sandbox::{Netns, Sandbox},
    usage::cpu_time,
};
use rustix::{
    fs::{CWD, FileType, Mode},
    process::Pid,
};

use crate::{place::Place, table::Table};

/// Shortest pause between two polls of all tables; it is longer if a poll takes long.
const PAUSE: Duration = Duration::from_micros(200);
const PAUSE_FACTOR: u32 = 4;

/// Shortest pause between two polls for clients that are ready.
const READY_POLL: Duration = Duration::from_millis(1);

/// Time without CPU use after which agents count as waiting at their gate.
const AT_GATE: Duration = Duration::from_millis(200);

/// Niceness of the clients. In a cluster the API server does not share its CPUs with them.
const NICENESS: i32 = 10;

/// State of an established connection in `/proc/net/tcp`.
const ESTABLISHED: &str = "01";

/// Number of fleets so far, so that one fleet does not meet the remains of another.
static FLEET: AtomicU32 = AtomicU32::new(0);

/// Client of the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Cproxy,
    /// The agent of `--beside`.
    Before,
    KubeProxy,
}

/// Running clients. When they are dropped, everything of them leaves the kernel.
pub(crate) struct Fleet {
    clients: Clients,
    /// Moment of the first client's start.
    pub(crate) started: Instant,
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
    /// Starts `count` clients at the same time, waits until all are ready, and returns the time of each from the first
    /// one's start.
    pub(crate) fn start(kind: Kind, count: u32, place: &Place<'_>) -> Result<(Self, Vec<Duration>)> {
        match kind {
            Kind::Cproxy => start_agents(&cproxy_binary(), count, place),
            Kind::Before => start_agents(place.before.as_deref().context("--beside is not given")?, count, place),
            Kind::KubeProxy => start_kube_proxies(count, place),
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

    /// Connections to the API server that are open now.
    pub(crate) fn open_connections(&self) -> Result<u64> {
        let open = self
            .netns
            .iter()
            .map(|netns| netns.run(|| Ok(open_to(PORT, &fs::read_to_string("/proc/thread-self/net/tcp")?))));
        open.sum::<io::Result<u64>>().context("reading the connections of a network namespace")
    }

    /// Starts to look for a backend at once, for each client.
    pub(crate) fn look_for(&self, backend: IpAddr) -> Looking {
        match &self.clients {
            Clients::Agents { tables, .. } => {
                let tables = tables.clone();
                Looking::InMaps(thread::spawn(move || wait_for(&tables, backend)))
            }
            Clients::KubeProxies { .. } => Looking::Outside(look_for_each(&self.netns, backend)),
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

fn look_for_each(netns: &[Netns], backend: IpAddr) -> Vec<Seen> {
    let clients = netns.len() as u32;
    netns.iter().map(|netns| subject::look_for_one_of(clients, netns, backend)).collect()
}

/// Starts agents that wait at a gate, and opens it.
fn start_agents(binary: &Path, count: u32, place: &Place<'_>) -> Result<(Fleet, Vec<Duration>)> {
    let sandbox = place.sandbox;
    let netns = sandbox.neighbour::<IpAddr>([]);
    let fleet = format!("fleet-{}", FLEET.fetch_add(1, Ordering::Relaxed));
    let gate = sandbox.dir().join(format!("{fleet}-gate"));
    rustix::fs::mknodat(CWD, &gate, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).context("making a gate")?;
    let launcher = launcher(&sandbox.dir().join(&fleet), &gate, &netns, binary)?;
    let kubeconfig = place.control_plane.agent_kubeconfig();
    let start = |number| start_agent(sandbox, &format!("{fleet}-{number}"), &launcher, &kubeconfig);
    let mut agents = (0..count).map(start).collect::<Result<Vec<_>>>()?;
    rest::wait(1, AT_GATE, TIMEOUT, || agents.iter().map(|agent| cpu_time(agent.process.pid())).sum())?;
    let _open = fs::File::options().read(true).write(true).open(&gate).context("opening the gate")?;
    let started = Instant::now();
    let ready = wait_ready(&mut agents, started)?;
    let tables = agents.iter().map(|agent| Table::open(&agent.pin_dir, VIP)).collect::<io::Result<_>>();
    let tables = Arc::new(tables.context("opening an agent's maps")?);
    Ok((Fleet { clients: Clients::Agents { agents, tables }, started, netns: vec![netns] }, ready))
}

fn start_agent(sandbox: &Sandbox, name: &str, launcher: &Path, kubeconfig: &Path) -> Result<OneAgent> {
    let (cgroup, run_dir) = (sandbox.cgroup().join(name), sandbox.run_dir().join(name));
    let pin_dir = sandbox.dir().join("bpf").join(name);
    fs::create_dir(&cgroup).and_then(|()| fs::create_dir(&run_dir)).context("making an agent's directories")?;
    let agent = Agent::new(sandbox).binary(launcher).kubeconfig(kubeconfig).args(["--node-name", NODE]);
    let process = agent.cgroup(&cgroup).pin_dir(&pin_dir).run_dir(run_dir).spawn();
    lower_priority(process.pid())?;
    Ok(OneAgent { process, cgroup, pin_dir })
}

/// Lowers the priority of a process that has just started, and thereby of all its later threads.
fn lower_priority(pid: u32) -> Result<()> {
    rustix::process::setpriority_process(Pid::from_raw(pid as i32), NICENESS).context("lowering a client's priority")
}

fn wait_ready(agents: &mut [OneAgent], started: Instant) -> Result<Vec<Duration>> {
    let mut ready = vec![None; agents.len()];
    while ready.iter().any(Option::is_none) {
        let look = Instant::now();
        for (agent, ready) in agents.iter_mut().zip(&mut ready).filter(|(_, ready)| ready.is_none()) {
            if agent.process.is_ready() {
                *ready = Some(started.elapsed());
            } else if agent.process.exit_status().is_some() {
                bail!("an agent has ended: {}", agent.process.tail());
            }
        }
        ensure!(started.elapsed() < TIMEOUT, "not all agents are ready within {TIMEOUT:?}");
        thread::sleep(READY_POLL.max(look.elapsed() * PAUSE_FACTOR));
    }
    Ok(ready.into_iter().flatten().collect())
}

/// Writes a script that waits for the gate in the namespace and then runs the agent with the script's arguments.
fn launcher(path: &Path, gate: &Path, netns: &Netns, agent: &Path) -> Result<PathBuf> {
    let (gate, netns, agent) = (gate.display(), netns.path(), agent.display());
    let at_gate = format!(r#": < "{gate}"; exec "{agent}" "$@""#);
    let script = format!("#!/bin/sh\nexec nsenter '--net={}' sh -c '{at_gate}' sh \"$@\"\n", netns.display());
    fs::write(path, script)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o755)))
        .context("writing into the sandbox")?;
    Ok(path.to_owned())
}

fn start_kube_proxies(count: u32, place: &Place<'_>) -> Result<(Fleet, Vec<Duration>)> {
    let sandbox = place.sandbox;
    let netns = (0..count).map(|_| sandbox.neighbour(subject::BACKENDS)).collect::<Vec<_>>();
    let backends = netns.iter().flat_map(subject::serve).collect();
    let started = Instant::now();
    let seen = look_for_each(&netns, place.backend());
    let kubeconfig = place.control_plane.kubeconfig_for("system:kube-proxy");
    let kube_proxy = KubeProxy { binary: place.control_plane.binary("kube-proxy"), kubeconfig };
    let mut daemons = Vec::new();
    for netns in &netns {
        let daemon = kube_proxy.spawn(sandbox, netns, "nftables")?;
        lower_priority(daemon.pid())?;
        daemons.push(daemon);
    }
    let ready = Looking::Outside(seen).wait()?.into_iter().map(|seen| seen - started).collect();
    Ok((Fleet { clients: Clients::KubeProxies { daemons, _backends: backends }, started, netns }, ready))
}

/// Number of established connections to `port` of other hosts in a file `/proc/net/tcp`: the third and fourth column
/// are the remote address with its port, and the state.
fn open_to(port: u16, net_tcp: &str) -> u64 {
    let remote = format!(":{port:04X}");
    let is_open = |line: &&str| {
        let mut columns = line.split_whitespace().skip(2);
        columns.next().is_some_and(|column| column.ends_with(&remote)) && columns.next() == Some(ESTABLISHED)
    };
    net_tcp.lines().filter(is_open).count() as u64
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
            Self::Before => "cproxy before",
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

    #[test]
    fn only_established_connections_to_the_port_are_open() {
        let text = "  sl  local_address rem_address   st tx_queue\n   0: 0100007F:192B 00000000:0000 0A 0\n   \
                    1: 026412C6:8001 010200C0:192B 01 0\n   2: 026412C6:8002 010200C0:192B 06 0\n   \
                    3: 026412C6:192B 010200C0:0050 01 0\n";
        assert_eq!(open_to(6443, text), 1);
        assert_eq!(open_to(80, text), 1);
    }
}
