//! The agent: prepares, installs, then follows its source for ever. One task owns store, table and maps.

mod follow;
mod notify;
mod run_dir;
mod stale;
mod timeline;

use std::{
    io,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    thread,
};

use cproxy_core::{Event, Exclusions, NodeContext, Store};
use cproxy_datapath::bpf::{
    self, CgroupError, Environment, EnvironmentError, PinDir, PinError, PinLock, Scope, SocketMark, TableError,
    excluded_cgroup,
};
use cproxy_wire::{self as wire, ClientError, LastContact, SocketSetup};
use follow::Follower;
use http::Uri;
use run_dir::RunDir;
use timeline::{Phase, Timeline};
use tokio::{
    net::UnixListener,
    sync::{mpsc, oneshot},
};

use crate::{
    admin,
    config::{Config, Exclude, ObjectSource},
    manifests::{self, Files, ManifestError, Wanted, Watcher},
    own_address::OwnAddresses,
    wait::{FAILED, UNUSABLE},
};

/// Proxy variables of the environment, which the agent does not honour.
const PROXY_VARIABLES: [&str; 4] = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"];

/// Maximum number of batches of events that wait: a bound on memory, not on speed. From the API server each is one
/// object, which may have a thousand endpoints.
const EVENTS_WAITING_MAX: usize = 16;

/// Reason why the agent does not run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The machine lacks a requirement.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// An excluded cgroup does not exist.
    #[error(transparent)]
    Exclude(#[from] CgroupError),
    /// The pin directory cannot be used.
    #[error(transparent)]
    Pins(#[from] PinError),
    /// The programs could not be installed: the child's message, and whether the failure is permanent.
    #[error("{0}")]
    Install(String, bool),
    /// The child that installs was killed, for example for lack of memory.
    #[error("the child that installs the programs was ended: {0}")]
    InstallEnded(ExitStatus),
    /// The child could not be started.
    #[error("cannot start {0}: {1}")]
    Child(PathBuf, io::Error),
    /// The maps cannot be used.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The API server's configuration cannot be used.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The manifests cannot be used.
    #[error(transparent)]
    Manifests(#[from] ManifestError),
    /// The bootstrap manifest cannot be used.
    #[error("--bootstrap {0}: {1}")]
    Bootstrap(PathBuf, String),
    /// The run directory cannot be used.
    #[error("--run-dir {0}: {1}")]
    RunDir(PathBuf, io::Error),
    /// The source has ended, which it never should.
    #[error("the source of events has ended: {0}")]
    SourceEnded(String),
}

impl AgentError {
    /// Whether another attempt on this machine would fail in the same way.
    fn is_lasting(&self) -> bool {
        match self {
            Self::Environment(error) => !matches!(error, EnvironmentError::Io(..)),
            Self::Install(_, is_lasting) => *is_lasting,
            _ => false,
        }
    }
}

/// Runs until SIGTERM, SIGINT or SIGHUP. The hooks and the table stay in the kernel.
///
/// # Errors
/// The reason why it does not run; nothing is half attached.
pub async fn run(config: Config) -> Result<(), AgentError> {
    let run_dir = config.run_dir.clone();
    let outcome = run_here(config).await;
    if let Err(error) = &outcome {
        let name = if error.is_lasting() { UNUSABLE } else { FAILED };
        run_dir::leave_word(&run_dir, name, &error.to_string());
    }
    outcome
}

/// Records in the run directory why an agent could not start with its settings, for `cproxy wait`.
pub fn leave_word(run_dir: &Path, reason: &str) {
    run_dir::leave_word(run_dir, FAILED, reason);
}

async fn run_here(config: Config) -> Result<(), AgentError> {
    let mut timeline = Timeline::start();
    // All input is checked before anything is attached.
    let mut own = config.own;
    let wanted = Wanted { node: own.node_name.clone(), whole: None };
    let bootstrap = config.bootstrap.as_deref().map(|path| read_bootstrap(path, &own, &wanted)).transpose()?;
    let exclusions = exclusions(&config.exclude)?;
    let source = prepare(&config.source, wanted).await?;
    if let Prepared::Manifests(_, files) = &source
        && let Some(problem) = files.missing_node()
    {
        tracing::warn!("{problem}");
    }
    let environment = Environment::prepare(config.cgroup.as_deref(), &config.pin_dir, &config.run_dir)?;
    // Held until the end: the only agent on these pins. The run directory has a lock of its own.
    let lock = PinDir::new(&environment.pin_dir).lock()?;
    let run_dir = RunDir::create(&config.run_dir)?;
    let listener = run_dir.listen()?;
    timeline.end(Phase::Prepare);
    let last_contact = LastContact::default();
    let api_server = source.api_server();
    let (sender, events) = mpsc::channel(EVENTS_WAITING_MAX);
    // The source alone keeps the channel open, so that its end is noticed.
    let others = sender.downgrade();
    start(source, own.node_name.clone(), lock.pins(), last_contact.clone(), sender)?;
    install(&environment, &lock).await?;
    tell_scope(&environment, &run_dir)?;
    timeline.end(Phase::Install);
    // Nothing is derived before the addresses are known.
    if own.pod_ips.is_empty() {
        let found = OwnAddresses::find(SocketMark::new(lock.pins()), api_server);
        own.pod_ips = found.addresses();
        drop(tokio::spawn(found.follow(others)));
    }
    let mut follower =
        Follower::open(&lock, Store::new(own.clone()), run_dir, timeline, last_contact, config.terminate_sockets)?;
    follower.configure(exclusions, config.balance)?;
    if let Some(mut store) = bootstrap {
        store.apply(Event::PodIps(own.pod_ips.clone()));
        follower.bootstrap(&store)?;
    }
    follower.opened();
    drop(tokio::spawn(follower.terminator().run()));
    follow_until_stopped(follower, events, listener).await
}

/// Source that was checked and has not been started.
enum Prepared {
    ApiServer(Box<wire::Config>),
    Manifests(Watcher, Box<Files>),
}

impl Prepared {
    fn api_server(&self) -> Option<Uri> {
        match self {
            Self::ApiServer(config) => Some(config.cluster_url.clone()),
            Self::Manifests(..) => None,
        }
    }
}

async fn prepare(source: &ObjectSource, wanted: Wanted) -> Result<Prepared, AgentError> {
    Ok(match source {
        // Watching comes first, so that changes while the files are read are seen.
        ObjectSource::Manifests(paths) => {
            Prepared::Manifests(Watcher::new(paths)?, Box::new(Files::read(paths, wanted)?))
        }
        ObjectSource::ApiServer(server) => Prepared::ApiServer(Box::new(wire::configure(server).await?)),
    })
}

/// Loads and attaches the programs in a child, whose memory is freed when it ends. Meanwhile the source may deliver.
async fn install(environment: &Environment, lock: &PinLock) -> Result<(), AgentError> {
    let path = PathBuf::from("/proc/self/exe");
    let failed = |error| AgentError::Child(path.clone(), error);
    let mut command = Command::new(&path);
    // The child shares the lock: if it outlives the agent, the next agent must not start beside it.
    command.stdin(lock.share().map_err(failed)?);
    command.arg("install").arg("--cgroup").arg(&environment.cgroup).arg("--pin-dir").arg(&environment.pin_dir);
    let (sender, ended) = oneshot::channel();
    let wait = move || drop(sender.send(command.output()));
    thread::Builder::new().name("install".to_owned()).spawn(wait).map_err(failed)?;
    let output = ended.await.map_err(io::Error::other).flatten().map_err(failed)?;
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() {
        tracing::info!("attached to {}: {}", environment.cgroup.display(), stdout.trim().replace('\n', ", "));
        return Ok(());
    }
    let mut lines: Vec<_> = stderr.lines().collect();
    let Some(last) = lines.pop().filter(|_| output.status.code().is_some()) else {
        return Err(AgentError::InstallEnded(output.status));
    };
    // The verifier's log, if there is one, precedes the message.
    lines.iter().for_each(|line| eprintln!("{line}"));
    let is_lasting = output.status.code() != Some(INSTALL_AGAIN.into());
    Err(AgentError::Install(last.trim_start_matches("cproxy: ").to_owned(), is_lasting))
}

/// Reports, in the log and to `cproxy wait`, that the programs are attached below the cgroup root.
fn tell_scope(environment: &Environment, run_dir: &RunDir) -> Result<(), AgentError> {
    let Some(caveat) = environment.scope.caveat() else { return Ok(()) };
    let line = format!("attached to {}, {caveat}", environment.cgroup.display());
    match environment.scope {
        Scope::Confined => tracing::warn!("{line}"),
        Scope::Machine | Scope::Requested => tracing::info!("{line}"),
    }
    run_dir.set_limited(&line)
}

fn exclusions(exclude: &Exclude) -> Result<Exclusions, CgroupError> {
    let cgroups = exclude.cgroups.iter().map(|dir| excluded_cgroup(dir)).collect::<Result<_, _>>()?;
    Ok(Exclusions { cgroups, uids: exclude.uids.clone(), ports: exclude.ports.clone() })
}

fn read_bootstrap(path: &Path, own: &NodeContext, wanted: &Wanted) -> Result<Store, AgentError> {
    let failed = |message: String| AgentError::Bootstrap(path.to_owned(), message);
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let contents = manifests::parse(&path.display().to_string(), &text, wanted).map_err(failed)?;
    let mut store = Store::new(own.clone());
    let problems: Vec<_> = contents.events().flat_map(|event| store.apply(event)).collect();
    contents.problems().chain(&problems).for_each(|problem| tracing::warn!("bootstrap: {problem}"));
    Ok(store)
}

/// Starts the source. The API server may be read before the programs are installed: see [`SocketMark::mark`].
fn start(
    source: Prepared,
    node_name: Option<String>,
    pins: &PinDir,
    last_contact: LastContact,
    sender: mpsc::Sender<Vec<Event>>,
) -> Result<(), AgentError> {
    match source {
        Prepared::Manifests(watcher, files) => drop(tokio::spawn(async move {
            if let Err(error) = manifests::watch(*files, watcher, sender).await {
                tracing::error!("inotify: {error}; changes of manifests are no longer seen");
            }
        })),
        Prepared::ApiServer(config) => {
            let client = wire::client(&config, socket_setup(pins))?;
            tracing::info!("following the API server at {}", config.cluster_url);
            // Without this line, an API server behind a proxy just looks unreachable.
            if let Some(name) = PROXY_VARIABLES.into_iter().find(|name| std::env::var_os(name).is_some()) {
                tracing::info!("{name} is set and not used: cproxy dials the API server itself");
            }
            drop(tokio::spawn(wire::watch(client, config.cluster_url, node_name, last_contact, sender)));
        }
    }
    Ok(())
}

/// Marks the agent's own sockets, which never use its table.
fn socket_setup(pins: &PinDir) -> SocketSetup {
    let mark = SocketMark::new(pins);
    SocketSetup::new(move |socket| mark.mark(socket))
}

async fn follow_until_stopped(
    mut follower: Follower,
    events: mpsc::Receiver<Vec<Event>>,
    listener: UnixListener,
) -> Result<(), AgentError> {
    let (questions, asked) = mpsc::channel(1);
    drop(tokio::spawn(admin::serve(listener, questions)));
    tokio::select! {
        result = follower.follow(events, asked) => result,
        signal = stop_signal() => {
            tracing::info!("{signal}: stopping; the hooks and the table stay in force (`cproxy cleanup` removes them)");
            Ok(())
        }
    }
}

async fn stop_signal() -> &'static str {
    use tokio::signal::unix::{SignalKind, signal};
    let [Ok(mut terminate), Ok(mut interrupt), Ok(mut hangup)] =
        [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal)
    else {
        // Without handlers the signals end the process, which is their purpose.
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
        _ = hangup.recv() => "SIGHUP",
    }
}

/// Removes the files of a dead agent from its run directory.
///
/// # Errors
/// An agent is alive there, or a file cannot be removed.
pub fn clear_run_dir(dir: &Path) -> Result<(), AgentError> {
    run_dir::clear_unused(dir)
}

/// Exit code of `cproxy install` if another attempt may succeed (sysexits.h, EX_TEMPFAIL).
pub const INSTALL_AGAIN: u8 = 75;

/// Implementation of `cproxy install`, the child that [`run`] starts.
///
/// # Errors
/// As [`bpf::install`].
pub fn install_here(pin_dir: &Path, cgroup: &Path) -> Result<String, bpf::InstallError> {
    // Without its agent, the child could not report anything. The next agent repairs an interrupted installation.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).ok();
    // If that fails, everything works, and the maps' memory counts as the agent's.
    bpf::leave_memory_cgroup().ok();
    // If that fails, the installation takes longer.
    bpf::hide_kernel_btf().ok();
    let programs = bpf::install(&PinDir::new(pin_dir), cgroup, bpf::Features::probe())?;
    let line = |(program, count): &(bpf::Program, u32)| format!("{} ({count} instructions verified)", program.name);
    Ok(programs.iter().map(line).collect::<Vec<_>>().join("\n"))
}
