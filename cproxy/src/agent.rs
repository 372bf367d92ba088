//! The agent: prepares, installs, then follows its source for ever. One task owns store, table and maps.

mod canary;
mod doubt;
mod error;
mod explain;
mod handover;
mod health;
mod install;
mod last_changes;
mod own_addresses;
mod readiness;
mod reconciler;
mod reload;
mod resume;
mod seed;
mod source;
mod stale_sockets;
mod tcp_places;
mod timeline;

use std::{io, path::Path, sync::Arc};

use canary::Canary;
use cproxy_core::{Event, Exclusions, NodeContext, Store, printable};
use cproxy_daemon::LogFilter;
use cproxy_datapath::bpf::{Environment, PinDir, Scope, SocketMark, excluded_cgroup, has_kept, netns_cookie};
use cproxy_network::SocketSetup;
use cproxy_wire::{self as wire, Configuration, LastContact};
pub use error::AgentError;
pub use health::walk_canary;
use health::{HealthChecker, HealthWatch};
pub use install::{EXIT_RETRY, install_programs};
use own_addresses::{AddressSource, PresentAddresses};
use readiness::Readiness;
use reconciler::{Own, Reconciler};
use reload::Reloader;
pub use reload::Reread;
pub use resume::{generation_id, is_fork};
use source::{CheckedSource, SourceStatus};
use timeline::{Phase, Timeline};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};

use crate::{
    config::{Config, ExcludeNetns, TableSettings},
    controls::Controls,
    mailbox::Mailbox,
    manifests::{self, ParseOptions},
    privileges::{self, Broker, Rights},
    run_dir::{self, RunDir},
    status_http::StatusHttp,
};

/// Maximum number of batches of events that wait: a bound on memory, not on speed. From the API server each is one
/// object, which may have a thousand endpoints.
const EVENTS_WAITING_MAX: usize = 16;

/// Runs until SIGTERM or SIGINT. The hooks and the table stay in the kernel. On SIGHUP, `reread` returns the
/// configuration as it is now, or why it is invalid.
///
/// # Errors
/// The reason why it does not run; nothing is half attached.
pub async fn run(config: Config, log: LogFilter, reread: Reread) -> Result<(), AgentError> {
    let run_dir = config.run.run_dir.clone();
    // It makes the agent's last calls, too.
    let mut broker = None;
    let outcome = run_until_stopped(config, log, reread, &mut broker).await;
    if let Err(error) = &outcome {
        run_dir::record_failure(&run_dir, error.failure(), &error.to_string());
    }
    outcome
}

async fn run_until_stopped(
    config: Config,
    log: LogFilter,
    reread: Reread,
    broker: &mut Option<Arc<Broker>>,
) -> Result<(), AgentError> {
    // From now on the signal does not end the agent. It is looked at once the agent follows its source.
    let hangups = signal(SignalKind::hangup()).map_err(AgentError::Signal)?;
    let mut timeline = Timeline::start();
    // Opening the kernel's log takes a capability that nothing else needs.
    let kernel_log = resume::open_kernel_log();
    // While there is one thread.
    if let Err(error) = privileges::give_up_capabilities(&config) {
        tracing::warn!("not all capabilities can be given up: {error}");
    }
    // All input is checked before anything is attached.
    let mut node = config.node_context();
    let options = ParseOptions { node_name: node.node_name.clone(), whole_service: None };
    let bootstrap =
        config.bootstrap.bootstrap.as_deref().map(|path| read_bootstrap(path, &node, &options)).transpose()?;
    let settings = table_settings(&config)?;
    let source = source::check(&config.source.source(), options).await?;
    if let CheckedSource::Manifests(_, files) = &source
        && let Some(problem) = files.missing_node()
    {
        tracing::warn!("{problem}");
    }
    let environment = Environment::prepare(config.cgroup.cgroup.as_deref(), &config.pins.pin_dir, &config.run.run_dir)?;
    // Held until the end: the only agent on these pins. The run directory has a lock of its own.
    let lock = PinDir::new(&environment.pin_dir).lock()?;
    let run_dir = RunDir::claim(&config.run.run_dir)?;
    let (listener, socket) = run_dir.listen()?;
    let status_http = StatusHttp::open(
        config.monitoring.metrics_bind_address.as_ref(),
        config.monitoring.healthz_bind_address.as_ref(),
    )?;
    timeline.end(Phase::Prepare);
    let last_contact = LastContact::default();
    let configuration = source.configuration().cloned();
    let (sender, events) = mpsc::channel(EVENTS_WAITING_MAX);
    // The source alone keeps the channel open, so that its end is noticed.
    let weak_sender = sender.downgrade();
    let client = source::start(source, node.node_name.clone(), socket_setup(lock.pins()), last_contact.clone(), sender);
    let source = SourceStatus::new(&config.source.source(), client.clone(), last_contact.clone());
    let has_exec_plugin = configuration.as_ref().is_some_and(Configuration::has_exec_plugin);
    // It gets ready while the programs are loaded.
    let starting = (!has_exec_plugin).then(|| {
        let files = status_http.files().chain([&**socket.path()]);
        Broker::start(&config.run.run_dir, &environment.pin_dir, files)
    });
    install::install_in_child(&environment, &lock, config.counters.service_counters, None).await?;
    report_scope(&environment, &run_dir)?;
    timeline.end(Phase::Install);
    // Nothing is derived before the addresses are known.
    let (mailbox, messages) = Mailbox::new();
    let mut addresses = AddressSource::new(socket_setup(lock.pins()), weak_sender.clone(), mailbox.clone());
    let PresentAddresses { pod_ips, own: own_addresses } = addresses.start(&node.pod_ips, configuration.as_ref());
    node.pod_ips = pod_ips;
    let (store, readiness) = (Store::new(node.clone()), Readiness::new(run_dir, timeline));
    let (health_watch, demands) = HealthWatch::new();
    let own = Own { canary: Canary::new(&config.monitoring.canary_address), health_watch: health_watch.clone() };
    let mut reconciler = Reconciler::open(&lock, store, readiness, source, config.traffic.terminate_sockets, own)?;
    reconciler.configure(settings)?;
    reconciler.set_own_addresses(own_addresses)?;
    reconciler.reseed()?;
    if let Some(mut store) = bootstrap {
        store.apply(Event::PodIps(node.pod_ips));
        reconciler.bootstrap(&store)?;
    }
    reconciler.end_phase(Phase::Open);
    let entrance = health::entrance(&environment.cgroup);
    *broker = filter_system_calls(starting).map(Arc::new);
    drop(tokio::spawn(reconciler.socket_terminator().run()));
    if has_kept(lock.pins()) {
        drop(tokio::spawn(handover::end(lock.pins().clone())));
    }
    if !status_http.is_empty() {
        reconciler.measure();
    }
    let _files = status_http.start(mailbox.clone(), lock.pins().clone()).map_err(AgentError::StatusHttpThread)?;
    let controls = Controls::new(log, &config);
    drop(tokio::spawn(run_dir::serve(listener, socket, mailbox.clone(), controls.clone())));
    drop(tokio::spawn(reconciler.place_sweeper(mailbox.clone()).run()));
    drop(tokio::spawn(resume::watch(kernel_log, mailbox.clone(), client.clone(), health_watch.clone())));
    let health_checker = HealthChecker {
        broker: broker.clone(),
        entrance,
        cgroup_changes: health::cgroup_changes(),
        watch: health_watch,
        demands,
        last_contact,
        mailbox: mailbox.clone(),
        environment,
        cgroup: config.cgroup.cgroup.clone(),
        service_counters: config.counters.service_counters,
        run_dir: config.run.run_dir.clone(),
        lock,
    };
    drop(tokio::spawn(health_checker.run()));
    let reloader =
        Reloader { reread, config, controls, client, has_exec_plugin, addresses, events: weak_sender, mailbox };
    drop(tokio::spawn(reloader.run(hangups)));
    tokio::select! {
        result = reconciler.run(events, messages) => result,
        error = broker_ended(broker.as_deref()) => Err(error),
        signal = stop_signal() => {
            tracing::info!(
                name: "stopping",
                "{signal}: stopping; the hooks and the table stay in force (`cproxy cleanup` removes them)"
            );
            Ok(())
        }
    }
}

/// Reports, in the log and to `cproxy wait`, that the programs are attached below the cgroup root.
fn report_scope(environment: &Environment, run_dir: &RunDir) -> Result<(), AgentError> {
    let Some(caveat) = environment.scope.caveat() else { return Ok(()) };
    let line = format!("attached to {}, {caveat}", printable(&environment.cgroup.display().to_string()));
    match environment.scope {
        Scope::Confined => tracing::warn!("{line}"),
        Scope::Machine | Scope::Requested => tracing::info!("{line}"),
    }
    if let Some(lost) = Environment::lost_sockets(environment.scope) {
        tracing::warn!("{lost}");
    }
    Ok(run_dir.set_limited(&line)?)
}

/// Filters system calls from now on, and says which rights the agent keeps. Without a filter it runs all the same.
/// There is no broker if system calls are not to be filtered.
fn filter_system_calls(broker: Option<io::Result<Broker>>) -> Option<Broker> {
    let Some(started) = broker else {
        tracing::info!("system calls are not filtered: the exec plugin of the kubeconfig may need any");
        return log_rights(None);
    };
    wire::refuse_exec_plugins();
    let broker = started.map_err(|error| error.to_string()).and_then(Broker::take_calls);
    if let Err(error) = privileges::filter_system_calls(broker.is_ok()) {
        tracing::warn!("system calls are not filtered: {error}");
    } else if let Err(error) = &broker {
        tracing::warn!("no broker makes the calls that change names of files: {error}");
    }
    log_rights(broker.ok())
}

fn log_rights(broker: Option<Broker>) -> Option<Broker> {
    if let Ok(rights) = Rights::of(rustix::process::getpid()) {
        tracing::info!("the agent keeps {rights}");
    }
    broker
}

/// Waits for the end of the broker; for ever if there is none.
async fn broker_ended(broker: Option<&Broker>) -> AgentError {
    match broker {
        Some(broker) => AgentError::BrokerEnded(broker.ended().await),
        None => std::future::pending().await,
    }
}

/// Settings of the table. Fails if an excluded cgroup does not exist.
fn table_settings(config: &Config) -> Result<TableSettings, AgentError> {
    let traffic = &config.traffic;
    let cgroups = traffic.exclude_cgroup.iter().map(|dir| excluded_cgroup(dir)).collect::<Result<_, _>>()?;
    let has_netns = traffic.exclude_netns == ExcludeNetns::Others;
    let netns_others_than = has_netns.then(netns_cookie).transpose().map_err(AgentError::ExcludeNetns)?;
    let (uids, ports) = (traffic.exclude_uid.clone(), traffic.exclude_port.clone());
    let exclusions = Exclusions { cgroups, uids, ports, netns_others_than };
    Ok(TableSettings { exclusions, balance: traffic.balance, terminate_sockets: traffic.terminate_sockets })
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
#[must_use]
pub(crate) fn socket_setup(pins: &PinDir) -> SocketSetup {
    let mark = SocketMark::new(pins);
    SocketSetup::new(move |socket| mark.mark(socket))
}

async fn stop_signal() -> &'static str {
    let [Ok(mut terminate), Ok(mut interrupt)] = [SignalKind::terminate(), SignalKind::interrupt()].map(signal) else {
        // Without handlers the signals end the process, which is their purpose.
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}
