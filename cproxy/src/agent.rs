//! The agent: prepares, installs, then follows its source for ever. One task owns store, table and maps.

mod error;
mod install;
mod notify;
mod own_addresses;
mod readiness;
mod reconciler;
mod source;
mod stale_sockets;
mod timeline;

use std::path::Path;

use cproxy_core::{Event, Exclusions, NodeContext, Store};
use cproxy_datapath::bpf::{CgroupError, Environment, PinDir, Scope, SocketMark, excluded_cgroup};
use cproxy_network::{OwnAddresses, SocketSetup};
use cproxy_wire::LastContact;
pub use error::AgentError;
pub use install::{EXIT_RETRY, install_programs};
use readiness::Readiness;
use reconciler::Reconciler;
use source::CheckedSource;
use timeline::{Phase, Timeline};
use tokio::{net::UnixListener, sync::mpsc};

use crate::{
    config::{Config, Exclude},
    manifests::{self, ParseOptions},
    run_dir::{self, RunDir},
};

/// Maximum number of batches of events that wait: a bound on memory, not on speed. From the API server each is one
/// object, which may have a thousand endpoints.
const EVENTS_WAITING_MAX: usize = 16;

/// Runs until SIGTERM, SIGINT or SIGHUP. The hooks and the table stay in the kernel.
///
/// # Errors
/// The reason why it does not run; nothing is half attached.
pub async fn run(config: Config) -> Result<(), AgentError> {
    let run_dir = config.run_dir.clone();
    let outcome = run_until_stopped(config).await;
    if let Err(error) = &outcome {
        run_dir::record_failure(&run_dir, error.failure(), &error.to_string());
    }
    outcome
}

async fn run_until_stopped(config: Config) -> Result<(), AgentError> {
    let mut timeline = Timeline::start();
    // All input is checked before anything is attached.
    let mut node = config.node;
    let options = ParseOptions { node_name: node.node_name.clone(), whole_service: None };
    let bootstrap = config.bootstrap.as_deref().map(|path| read_bootstrap(path, &node, &options)).transpose()?;
    let exclusions = exclusions(&config.exclude)?;
    let source = source::check(&config.source, options).await?;
    if let CheckedSource::Manifests(_, files) = &source
        && let Some(problem) = files.missing_node()
    {
        tracing::warn!("{problem}");
    }
    let environment = Environment::prepare(config.cgroup.as_deref(), &config.pin_dir, &config.run_dir)?;
    // Held until the end: the only agent on these pins. The run directory has a lock of its own.
    let lock = PinDir::new(&environment.pin_dir).lock()?;
    let run_dir = RunDir::claim(&config.run_dir)?;
    let listener = run_dir.listen()?;
    timeline.end(Phase::Prepare);
    let last_contact = LastContact::default();
    let known_addresses = source.known_addresses();
    let (sender, events) = mpsc::channel(EVENTS_WAITING_MAX);
    // The source alone keeps the channel open, so that its end is noticed.
    let weak_sender = sender.downgrade();
    source::start(source, node.node_name.clone(), socket_setup(lock.pins()), last_contact.clone(), sender)?;
    install::install_in_child(&environment, &lock).await?;
    report_scope(&environment, &run_dir)?;
    timeline.end(Phase::Install);
    // Nothing is derived before the addresses are known.
    if node.pod_ips.is_empty() {
        let addresses = OwnAddresses::detect(socket_setup(lock.pins()), known_addresses);
        own_addresses::report("own addresses", addresses.detected());
        node.pod_ips = own_addresses::pod_ips(addresses.detected());
        drop(tokio::spawn(own_addresses::follow(addresses, weak_sender)));
    }
    let (store, readiness) = (Store::new(node.clone()), Readiness::new(run_dir, timeline));
    let mut reconciler = Reconciler::open(&lock, store, readiness, last_contact, config.terminate_sockets)?;
    reconciler.configure(exclusions, config.balance)?;
    if let Some(mut store) = bootstrap {
        store.apply(Event::PodIps(node.pod_ips));
        reconciler.bootstrap(&store)?;
    }
    reconciler.end_phase(Phase::Open);
    drop(tokio::spawn(reconciler.socket_terminator().run()));
    reconcile_until_stopped(reconciler, events, listener).await
}

/// Reports, in the log and to `cproxy wait`, that the programs are attached below the cgroup root.
fn report_scope(environment: &Environment, run_dir: &RunDir) -> Result<(), AgentError> {
    let Some(caveat) = environment.scope.caveat() else { return Ok(()) };
    let line = format!("attached to {}, {caveat}", environment.cgroup.display());
    match environment.scope {
        Scope::Confined => tracing::warn!("{line}"),
        Scope::Machine | Scope::Requested => tracing::info!("{line}"),
    }
    Ok(run_dir.set_limited(&line)?)
}

fn exclusions(exclude: &Exclude) -> Result<Exclusions, CgroupError> {
    let cgroups = exclude.cgroups.iter().map(|dir| excluded_cgroup(dir)).collect::<Result<_, _>>()?;
    Ok(Exclusions { cgroups, uids: exclude.uids.clone(), ports: exclude.ports.clone() })
}

fn read_bootstrap(path: &Path, node: &NodeContext, options: &ParseOptions) -> Result<Store, AgentError> {
    let failed = |message: String| AgentError::Bootstrap(path.to_owned(), message);
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let contents = manifests::parse(&path.display().to_string(), &text, options).map_err(failed)?;
    let mut store = Store::new(node.clone());
    let problems: Vec<_> = contents.events().flat_map(|event| store.apply(event)).collect();
    contents.problems().chain(&problems).for_each(|problem| tracing::warn!("bootstrap: {problem}"));
    Ok(store)
}

/// Marks the agent's own sockets, which never use its table.
fn socket_setup(pins: &PinDir) -> SocketSetup {
    let mark = SocketMark::new(pins);
    SocketSetup::new(move |socket| mark.mark(socket))
}

async fn reconcile_until_stopped(
    mut reconciler: Reconciler,
    events: mpsc::Receiver<Vec<Event>>,
    listener: UnixListener,
) -> Result<(), AgentError> {
    let (sender, requests) = mpsc::channel(1);
    drop(tokio::spawn(run_dir::serve(listener, sender)));
    tokio::select! {
        result = reconciler.run(events, requests) => result,
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
