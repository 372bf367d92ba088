//! The agent: prepares, installs, then follows its source for ever. One task owns store, table and maps.

mod canary;
mod early_events;
mod error;
mod first_lists;
mod install;
mod last_changes;
mod list_doubts;
mod loop_settings;
mod own_sockets;
mod policy;
mod problem_times;
mod queries;
mod readiness;
mod receive;
mod reconciler;
mod seed;
mod service_report;
mod source;
mod start;
mod table;
mod tasks;
mod timeline;

use std::sync::Arc;

use cproxy_daemon::LogFilter;
use tokio::signal::unix::{Signal, SignalKind, signal};

use self::start::Checked;
pub use self::{
    error::AgentError,
    install::{EXIT_RETRY, install_programs},
    policy::policy_child,
    receive::remove_routes,
    tasks::{
        health::walk_canary,
        reload::Reread,
        resume::{generation_id, is_fork},
    },
};
pub(crate) use self::{loop_settings::settings_error, own_sockets::socket_setup};
use crate::{config::Config, privileges::Broker, run_dir};

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
    let installed = Checked::new(config).await?.install().await?;
    // Before the agent says that it is ready: from then on a signal ends it in order.
    let stop = StopSignals::new();
    let mut running = installed.run(log, reread, hangups, broker)?;
    tokio::select! {
        result = running.follow() => result,
        error = broker_ended(broker.as_deref()) => Err(error),
        signal = stop.received() => {
            let (what, remedy) = if running.leaves_policy() {
                ("the hooks, the table and the network policy", "`cproxy cleanup --policy-too`")
            } else {
                ("the hooks and the table", "`cproxy cleanup`")
            };
            tracing::info!(name: "stopping", "{signal}: stopping; {what} stay in force ({remedy} removes them)");
            Ok(())
        }
    }
}

/// Waits for the end of the broker; for ever if there is none.
async fn broker_ended(broker: Option<&Broker>) -> AgentError {
    match broker {
        Some(broker) => AgentError::BrokerEnded(broker.ended().await),
        None => std::future::pending().await,
    }
}

/// SIGTERM and SIGINT, which end the agent. `None`: without handlers the signals end the process, which is their
/// purpose.
struct StopSignals(Option<[Signal; 2]>);

impl StopSignals {
    fn new() -> Self {
        let [Ok(terminate), Ok(interrupt)] = [SignalKind::terminate(), SignalKind::interrupt()].map(signal) else {
            return Self(None);
        };
        Self(Some([terminate, interrupt]))
    }

    /// Waits for one of them.
    async fn received(self) -> &'static str {
        let Some([mut terminate, mut interrupt]) = self.0 else { return std::future::pending().await };
        tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        }
    }
}
