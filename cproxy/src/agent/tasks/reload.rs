//! SIGHUP: settings and credentials are read again, and what has changed is applied while the agent runs.

use std::{sync::Arc, time::Duration};

use cproxy_core::Event;
use cproxy_wire::{self as wire, ApiClient, ApiServer, Configuration, ServerAddress};
use tokio::{signal::unix::Signal, sync::mpsc, time::sleep};

use super::own_addresses::{AddressSource, PresentAddresses};
use crate::{
    agent::{error::AgentError, loop_settings::loop_settings},
    config::{Change, Config, LoopSettings, ObjectSource},
    controls::Controls,
    mailbox::{Command, Mailbox},
    privileges,
};

/// Reads the configuration again; the error says why it is invalid.
pub type Reread = fn() -> Result<Config, String>;

/// Shortest time between two reloads.
const INTERVAL_MIN: Duration = Duration::from_millis(500);

/// Task that applies changed settings.
pub(in crate::agent) struct Reloader {
    pub(in crate::agent) reread: Reread,
    /// Configuration in force.
    pub(in crate::agent) config: Config,
    pub(in crate::agent) controls: Controls,
    /// Client of the API servers, if they are the source.
    pub(in crate::agent) client: Option<Arc<ApiClient>>,
    /// Whether the agent started with an exec plugin, so that its system calls are not filtered.
    pub(in crate::agent) has_exec_plugin: bool,
    pub(in crate::agent) addresses: AddressSource,
    pub(in crate::agent) events: mpsc::WeakSender<Vec<Event>>,
    /// Way to the task that owns the table.
    pub(in crate::agent) mailbox: Mailbox,
}

/// Configuration that was read again, with all that had to be checked.
struct Checked {
    config: Config,
    applied: Vec<Change>,
    loop_settings: LoopSettings,
    api_server: Option<(ApiServer, Configuration)>,
}

impl Reloader {
    /// Runs for ever.
    pub(in crate::agent) async fn run(mut self, mut hangups: Signal) {
        while hangups.recv().await.is_some() {
            match self.check().await {
                Ok(checked) => self.apply(checked).await,
                Err(error) => {
                    tracing::warn!(name: "settings_invalid", "SIGHUP: {error}; all settings stay as they are");
                }
            }
            // Signals that arrive meanwhile count as one. Each makes a new connection.
            sleep(INTERVAL_MIN).await;
        }
    }

    /// Reads and checks the whole configuration. Changes nothing.
    async fn check(&self) -> Result<Checked, String> {
        let (config, changes) = self.config.replaced_by((self.reread)()?);
        let text = |error: AgentError| error.to_string();
        let loop_settings = loop_settings(&config).map_err(text)?;
        let api_server = match config.source.source() {
            ObjectSource::ApiServer(server) => {
                self.check_sockets(&server)?;
                let configuration = wire::configure(&server).await.map_err(|error| text(error.into()))?;
                if configuration.has_exec_plugin() && !self.has_exec_plugin {
                    return Err("credentials from an exec plugin take another start of the agent".to_owned());
                }
                Some((server, configuration))
            }
            ObjectSource::Manifests(_) => None,
        };
        changes.deferred.iter().for_each(|change| {
            tracing::warn!(name: "settings_deferred", "SIGHUP: {change}: takes effect when the agent starts again");
        });
        Ok(Checked { config, applied: changes.applied, loop_settings, api_server })
    }

    /// Checks that the agent may connect to each Unix socket that it did not have before. Those in force may be away.
    fn check_sockets(&self, server: &ApiServer) -> Result<(), String> {
        let before = &self.config.source.apiserver;
        for address in server.addresses.iter().filter(|address| !before.contains(address)) {
            let ServerAddress::Unix(path) = address else { continue };
            privileges::check_unix_socket(path).map_err(|error| {
                format!(
                    "--apiserver {address}: the agent cannot write to this socket ({error}) without CAP_DAC_OVERRIDE, \
                     which it has given up: that takes another start of the agent"
                )
            })?;
        }
        Ok(())
    }

    async fn apply(&mut self, checked: Checked) {
        let Checked { config, applied, loop_settings, api_server } = checked;
        let command = |sender| Command::Configure(loop_settings, sender);
        if let Ok(Err(error)) = self.mailbox.order(command).await {
            tracing::error!("SIGHUP: {error}");
        }
        let configuration = api_server.as_ref().map(|(_, configuration)| configuration);
        let PresentAddresses { pod_ips, own } = self.addresses.start(&config.node.pod_ip, configuration);
        self.mailbox.tell(Command::SetOwnAddresses(own)).await.ok();
        if let Some(events) = self.events.upgrade() {
            let node = &config.node;
            let events_now = vec![
                Event::NodeIps(node.node_ip.clone()),
                Event::PodIps(pod_ips),
                Event::ExternalIps(node.external_ips),
            ];
            events.send(events_now).await.ok();
        }
        // The level that shows more counts for this line.
        self.controls.show(self.config.log.log_level.max(config.log.log_level));
        let changes = applied.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        let changes = if changes.is_empty() { "no setting has changed".to_owned() } else { changes };
        tracing::info!(name: "settings_read", "SIGHUP: settings were read again: {changes}");
        self.controls.configure(&config);
        self.config = config;
        if let (Some(client), Some((server, configuration))) = (self.client.clone(), api_server) {
            // A server that does not respond delays no later signal.
            drop(tokio::spawn(async move { client.reconfigure(server, configuration).await }));
        }
    }
}
