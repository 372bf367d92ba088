//! Third phase: system calls are filtered, and all tasks run.

use std::{io, sync::Arc};

use cproxy_core::Event;
use cproxy_daemon::LogFilter;
use cproxy_datapath::bpf::{PinDir, PolicyReader, has_kept};
use cproxy_wire as wire;
use tokio::{signal::unix::Signal, sync::mpsc};

use super::install::{Installed, StartedSource};
use crate::{
    agent::{
        error::AgentError,
        receive::ReceiveTask,
        reconciler::{Reconciler, Shared},
        tasks::{
            health::{self, HealthChecker},
            reload::{Reloader, Reread},
            resume,
            stale_sockets::SocketTerminator,
            takeover,
            tcp_places::TcpPlaceSweeper,
        },
    },
    controls::Controls,
    mailbox::Message,
    privileges::{self, Broker, Rights},
    run_dir,
    status_http::StatusHttpFiles,
};

/// Agent that runs.
pub(in crate::agent) struct Running {
    reconciler: Reconciler,
    /// Events that were received before.
    early: Vec<Event>,
    events: mpsc::Receiver<Vec<Event>>,
    messages: mpsc::Receiver<Message>,
    pins: PinDir,
    /// Files of the sockets of metrics and health checks, which are removed at the end.
    _files: StatusHttpFiles,
}

impl Installed {
    /// Filters system calls, leaves the broker, if there is one, in `broker`, and starts the background tasks.
    pub(in crate::agent) fn run(
        self,
        log: LogFilter,
        reread: Reread,
        hangups: Signal,
        broker: &mut Option<Arc<Broker>>,
    ) -> Result<Running, AgentError> {
        let Self { config, lock, environment, mailbox, tasks, reconciler, .. } = self;
        let has_exec_plugin = self.source.has_exec_plugin();
        let StartedSource { events, early, sender, client, last_contact, .. } = self.source;
        *broker = filter_system_calls(self.broker).map(Arc::new);
        let policy_orders = self.policy.as_ref().map(|(policy, _)| policy.orders());
        if let Some((mut policy, feed)) = self.policy {
            policy.confine(broker.clone());
            if let Some(existing) = policy.existing() {
                tasks.keep("connections that stand", existing.run());
            }
            tasks.keep("policy", policy.run(feed));
        }
        let receive_state = self.receive.as_ref().map(ReceiveTask::state);
        if let Some(receive) = self.receive {
            tasks.keep("received addresses", receive.run());
        }
        let pins = &lock.pins().clone();
        let Shared { retired_queue, socket_gauges, place_watch, health } = reconciler.shared();
        let health = health.clone();
        let terminator = SocketTerminator::new(pins.clone(), retired_queue.clone(), socket_gauges.clone());
        tasks.keep("stale sockets", terminator.run());
        let sweeper = TcpPlaceSweeper::new(pins.clone(), place_watch.clone(), mailbox.clone());
        tasks.keep("TCP places", sweeper.run());
        if has_kept(pins) {
            // It ends once the last socket of the older layout is closed.
            drop(tokio::spawn(takeover::end(pins.clone())));
        }
        let started = self.status_http.start(mailbox.clone(), pins.clone(), tasks.clone());
        let _files = started.map_err(AgentError::StatusHttpThread)?;
        let controls = Controls::new(log, &config);
        tasks.keep("run directory", run_dir::serve(self.listener, self.socket, mailbox.clone(), controls.clone()));
        let signs = resume::watch(self.kernel_log, mailbox.clone(), client.clone(), health.clone());
        tasks.keep("restores", signs);
        let health_checker = HealthChecker {
            broker: broker.clone(),
            cgroup_changes: health::cgroup_changes(),
            health,
            requests: self.check_requests,
            last_contact,
            mailbox: mailbox.clone(),
            attachments: health::record(pins, &environment.cgroup),
            environment,
            cgroup: config.cgroup.cgroup.clone(),
            service_counters: config.counters.service_counters,
            policy: policy_orders,
            receive: receive_state,
            run_dir: config.run.run_dir.clone(),
            lock,
            tasks: tasks.clone(),
        };
        tasks.keep("programs", health_checker.run());
        let addresses = self.addresses;
        let reloader =
            Reloader { reread, config, controls, client, has_exec_plugin, addresses, events: sender, mailbox };
        tasks.keep("reload", reloader.run(hangups));
        Ok(Running { reconciler, early, events, messages: self.messages, pins: pins.clone(), _files })
    }
}

impl Running {
    /// Whether a network policy stays in force when the agent ends.
    pub(in crate::agent) fn leaves_policy(&self) -> bool {
        PolicyReader::isolating(&self.pins).is_some()
    }

    /// Follows the source for ever.
    pub(in crate::agent) async fn follow(&mut self) -> Result<(), AgentError> {
        self.reconciler.run(std::mem::take(&mut self.early), &mut self.events, &mut self.messages).await
    }
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
