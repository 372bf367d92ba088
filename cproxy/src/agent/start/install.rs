//! Second phase: the source is started, a child attaches the programs, and the table is opened.

use std::{io, sync::Arc};

use cproxy_core::{Event, Store, printable};
use cproxy_daemon::{Tasks, unix_socket::SocketFile};
use cproxy_datapath::bpf::{Environment, PinLock, Scope};
use cproxy_wire::{ApiClient, Configuration, LastContact};
use tokio::{net::UnixListener, sync::mpsc};

use super::check::{Checked, Input};
use crate::{
    agent::{
        canary::Canary,
        early_events::EarlyEvents,
        error::AgentError,
        install::{install_in_child, load_policy_in_child},
        own_sockets::socket_setup,
        policy::{Feed, FeedSender, PolicyTask, warn_of_leftover},
        readiness::Readiness,
        receive::{self, ReceiveTask},
        reconciler::{Reconciler, Shared},
        source::{self, CheckedSource, SourceStatus},
        tasks::{
            health::{CheckRequests, ProgramHealth},
            own_addresses::{AddressSource, PresentAddresses},
            resume::KernelLog,
        },
        timeline::Phase,
    },
    config::{Config, ObjectSource, PolicyMode},
    mailbox::{Mailbox, Message},
    privileges::Broker,
    run_dir::RunDir,
    status_http::StatusHttp,
};

/// Maximum number of batches of events that wait: a bound on memory, not on speed. From the API server each is one
/// object, which may have a thousand endpoints.
const EVENTS_WAITING_MAX: usize = 16;

/// Agent whose programs are attached and whose table is open. Its system calls are not filtered.
pub(in crate::agent) struct Installed {
    pub(super) config: Config,
    pub(super) kernel_log: Option<KernelLog>,
    pub(super) environment: Environment,
    pub(super) lock: PinLock,
    pub(super) listener: UnixListener,
    pub(super) socket: Arc<SocketFile>,
    pub(super) status_http: StatusHttp,
    /// Broker that gets ready, unless an exec plugin may need any system call.
    pub(super) broker: Option<io::Result<Broker>>,
    pub(super) reconciler: Reconciler,
    pub(super) source: StartedSource,
    /// Enforcement of the pod's policy, if it is on, and the way from its source.
    pub(super) policy: Option<(PolicyTask, Feed)>,
    /// Traffic from outside, if it is received.
    pub(super) receive: Option<ReceiveTask>,
    pub(super) mailbox: Mailbox,
    pub(super) messages: mpsc::Receiver<Message>,
    pub(super) addresses: AddressSource,
    pub(super) check_requests: CheckRequests,
    pub(super) tasks: Tasks,
}

/// Source that delivers.
pub(super) struct StartedSource {
    pub(super) events: mpsc::Receiver<Vec<Event>>,
    /// Events that were received before, and are the loop's.
    pub(super) early: Vec<Event>,
    /// Way for further events. The source alone keeps the channel open, so that its end is noticed.
    pub(super) sender: mpsc::WeakSender<Vec<Event>>,
    /// Client of the API servers, if they are the source.
    pub(super) client: Option<Arc<ApiClient>>,
    pub(super) configuration: Option<Configuration>,
    pub(super) last_contact: LastContact,
}

impl StartedSource {
    /// Starts the source, which may deliver while the programs are attached.
    fn start(
        source: CheckedSource,
        node_name: Option<String>,
        lock: &PinLock,
        policy: Option<FeedSender>,
        tasks: &Tasks,
    ) -> Self {
        let configuration = source.configuration().cloned();
        let last_contact = LastContact::default();
        let (sender, events) = mpsc::channel(EVENTS_WAITING_MAX);
        let weak_sender = sender.downgrade();
        let setup = socket_setup(lock.pins());
        let client = source::start(source, node_name, setup, last_contact.clone(), sender, policy, tasks);
        Self { events, early: Vec::new(), sender: weak_sender, client, configuration, last_contact }
    }

    pub(super) fn has_exec_plugin(&self) -> bool {
        self.configuration.as_ref().is_some_and(Configuration::has_exec_plugin)
    }
}

impl Checked {
    /// Starts the source, has a child attach the programs, and opens the table.
    pub(in crate::agent) async fn install(self) -> Result<Installed, AgentError> {
        let Self { config, input, kernel_log, environment, lock, run_dir, listener, socket, status_http, .. } = self;
        let Input { node, bootstrap, settings, source } = input;
        let (mut timeline, tasks) = (self.timeline, Tasks::default());
        let (feed_sender, feed) = policy_feed(&config).unzip();
        let mut source = StartedSource::start(source, node.node_name.clone(), &lock, feed_sender, &tasks);
        // It gets ready while the programs are loaded.
        let broker = (!source.has_exec_plugin()).then(|| {
            let files = status_http.files().chain([&**socket.path()]);
            Broker::start(&config.run.run_dir, &environment.pin_dir, files)
        });
        let measures = (!status_http.is_empty()).then(Box::default);
        let mut early = EarlyEvents::new(Store::new(node.clone()), measures);
        let installed = install_in_child(&environment, &lock, config.counters.service_counters, None);
        early.receive(&mut source.events, installed).await?;
        let receives = !config.receive.receive.is_empty();
        if receives || feed.is_some() {
            load_policy_in_child(&environment, &lock, None, receives).await?;
        }
        if feed.is_none() {
            warn_of_leftover(lock.pins());
        }
        if !receives {
            receive::forget(lock.pins(), &environment.cgroup, feed.is_some())?;
        }
        source.early = early.rest;
        report_scope(&environment, &run_dir)?;
        timeline.end(Phase::Install);

        let (mailbox, messages) = Mailbox::new();
        // Nothing is derived before the addresses are known.
        let setup = socket_setup(lock.pins());
        let mut addresses = AddressSource::new(setup, source.sender.clone(), mailbox.clone(), tasks.clone());
        let PresentAddresses { pod_ips, own } = addresses.start(&node.pod_ips, source.configuration.as_ref());
        let mut store = early.store;
        store.apply(Event::PodIps(pod_ips.clone()));
        let canary = Canary::new(&config.monitoring.canary_address);
        let status = SourceStatus::new(&config.source.source(), source.client.clone(), source.last_contact.clone());
        let (health, check_requests) = ProgramHealth::new();
        let shared = Shared::new(settings.terminate_sockets, health);
        let policy = match feed {
            Some(feed) => {
                let retired = shared.retired_queue.clone();
                let opened = PolicyTask::open(&config, lock.pins(), &environment.cgroup, own.clone(), retired);
                Some((opened.await?, feed))
            }
            None => None,
        };
        let readiness = Readiness::new(run_dir, timeline);
        let mut reconciler = Reconciler::open(&lock, (store, canary), status, readiness, shared, tasks.clone())?;
        reconciler.measure(early.measures);
        if let Some((policy, feed)) = &policy {
            reconciler.follow_policy(policy.handle(feed.contact()))?;
        }
        let receive = receives.then(|| ReceiveTask::open(lock.pins())).transpose()?;
        if let Some(receive) = &receive {
            reconciler.follow_receive(receive.handle(), config.receive.receive.clone());
        }
        reconciler.configure(&settings)?;
        reconciler.set_own_addresses(own)?;
        reconciler.reseed()?;
        if let Some(mut store) = bootstrap {
            store.apply(Event::PodIps(pod_ips));
            reconciler.bootstrap(&store)?;
        }
        reconciler.end_phase(Phase::Open);
        Ok(Installed {
            config,
            kernel_log,
            environment,
            lock,
            listener,
            socket,
            status_http,
            broker,
            reconciler,
            source,
            policy,
            receive,
            mailbox,
            messages,
            addresses,
            check_requests,
            tasks,
        })
    }
}

/// Way of the pod's policy from the source, if it is enforced.
fn policy_feed(config: &Config) -> Option<(FeedSender, Feed)> {
    if config.policy.policy == PolicyMode::Off {
        return None;
    }
    Some(match (&config.source.source(), &config.policy.policy_pod) {
        (ObjectSource::Manifests(_), Some(pod)) => Feed::of_manifests(pod.clone()),
        _ => Feed::of_relay(),
    })
}

/// Reports in the log where the programs are attached; to `cproxy wait`, too, if that is below the cgroup root.
fn report_scope(environment: &Environment, run_dir: &RunDir) -> Result<(), AgentError> {
    let mut line = format!("attached to {}", printable(&environment.cgroup.display().to_string()));
    let caveat = environment.scope.caveat();
    caveat.into_iter().for_each(|caveat| line += &format!(", {caveat}"));
    match environment.scope {
        Scope::Confined => tracing::warn!(name: "attached", "{line}"),
        Scope::Machine | Scope::Requested => tracing::info!(name: "attached", "{line}"),
    }
    if caveat.is_none() {
        return Ok(());
    }
    if let Some(lost) = Environment::lost_sockets(environment.scope) {
        tracing::warn!("{lost}");
    }
    Ok(run_dir.set_limited(&line)?)
}
