//! Source of objects: an API server or manifests.

use std::{sync::Arc, time::Duration};

use cproxy_core::Event;
use cproxy_daemon::Tasks;
use cproxy_network::SocketSetup;
use cproxy_wire::{self as wire, ApiClient, ApiServer, Configuration, LastContact, jitter};
use tokio::sync::mpsc;

use super::{
    error::AgentError,
    policy::{FeedSender, follow_relay, send_files},
};
use crate::{
    config::ObjectSource,
    manifests::{self, Files, ParseOptions, Watcher},
    report::SourceReport,
};

/// Proxy variables of the environment, which the agent does not honour.
const PROXY_VARIABLES: [&str; 4] = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"];

/// Time over which copies of a snapshot that are restored together spread their connections.
const RENEWAL_JITTER_MAX: Duration = Duration::from_millis(250);

/// State of a source that was started.
pub(super) struct SourceStatus {
    pub(super) last_contact: LastContact,
    pub(super) followed: Followed,
}

/// Source that was started.
pub(super) enum Followed {
    ApiServer(Arc<ApiClient>),
    Manifests(Vec<String>),
}

impl SourceStatus {
    /// Status of a source with this client, if it has one.
    pub(super) fn new(source: &ObjectSource, client: Option<Arc<ApiClient>>, last_contact: LastContact) -> Self {
        let paths = match source {
            ObjectSource::Manifests(paths) => paths.iter().map(|path| path.display().to_string()).collect(),
            ObjectSource::ApiServer(_) => Vec::new(),
        };
        Self { last_contact, followed: client.map_or(Followed::Manifests(paths), Followed::ApiServer) }
    }

    /// Has the client connect anew, if there is one, a moment later. Returns whether there is one.
    pub(super) fn renew(&self) -> bool {
        let Followed::ApiServer(client) = &self.followed else { return false };
        let client = client.clone();
        drop(tokio::spawn(async move { client.renew(jitter(RENEWAL_JITTER_MAX)).await }));
        true
    }

    /// API server that was used last; `None` without one.
    pub(super) fn server(&self) -> Option<Arc<str>> {
        let Followed::ApiServer(client) = &self.followed else { return None };
        Some(client.choice().0)
    }

    /// Has another server list the objects anew, if there is one.
    pub(super) fn ask_another(&self) {
        let Followed::ApiServer(client) = &self.followed else { return };
        let (client, last_contact) = (client.clone(), self.last_contact.clone());
        drop(tokio::spawn(async move {
            if client.try_fail_over().await {
                last_contact.list_anew(false);
            }
        }));
    }

    /// Has the objects listed anew at once. A server that was asked in the place of this one is given up if it has not
    /// settled the doubt.
    pub(super) fn ask_again(&self, doubted: Arc<str>) {
        let Followed::ApiServer(client) = &self.followed else { return };
        let (client, last_contact) = (client.clone(), self.last_contact.clone());
        drop(tokio::spawn(async move {
            if !doubted.starts_with(&*client.choice().0) {
                client.force_fail_over().await;
            }
            last_contact.list_anew(true);
        }));
    }

    /// Report for `cproxy check`.
    pub(super) fn report(&self) -> SourceReport {
        match &self.followed {
            Followed::Manifests(paths) => SourceReport::Manifests(paths.clone()),
            Followed::ApiServer(client) => {
                let (server, choice) = client.choice();
                let (silent_seconds, view) = (self.last_contact.silent_seconds(), self.last_contact.view());
                let failure = self.last_contact.failure();
                SourceReport::ApiServer { server: server.to_string(), choice, silent_seconds, view, failure }
            }
        }
    }
}

/// Source that was checked and has not been started.
pub(super) enum CheckedSource {
    ApiServer(ApiServer, Box<Configuration>),
    Manifests(Watcher, Box<Files>),
}

impl CheckedSource {
    /// Configuration of the API servers, if they are the source.
    pub(super) fn configuration(&self) -> Option<&Configuration> {
        match self {
            Self::ApiServer(_, configuration) => Some(configuration),
            Self::Manifests(..) => None,
        }
    }
}

/// Checks the source.
pub(super) async fn check(source: &ObjectSource, options: ParseOptions) -> Result<CheckedSource, AgentError> {
    Ok(match source {
        // Watching comes first, so that changes while the files are read are seen.
        ObjectSource::Manifests(paths) => {
            CheckedSource::Manifests(Watcher::new(paths), Box::new(Files::read(paths, options)?))
        }
        ObjectSource::ApiServer(server) => {
            CheckedSource::ApiServer(server.clone(), Box::new(wire::configure(server).await?))
        }
    })
}

/// Starts the source and returns the client, if there is one. The API server may be read before the programs are
/// installed: see `SocketMark::mark`.
pub(super) fn start(
    source: CheckedSource,
    node_name: Option<String>,
    setup: SocketSetup,
    last_contact: LastContact,
    sender: mpsc::Sender<Vec<Event>>,
    policy: Option<FeedSender>,
    tasks: &Tasks,
) -> Option<Arc<ApiClient>> {
    match source {
        CheckedSource::Manifests(watcher, files) => {
            let look = move |files: &Files| {
                if let Some(FeedSender::Manifests(sender, pod)) = &policy {
                    send_files(files, sender, pod);
                }
            };
            tasks.keep("source", manifests::watch(*files, watcher, sender, look));
            None
        }
        CheckedSource::ApiServer(server, configuration) => {
            tracing::info!(name: "following", "following the API server at {configuration}");
            if server.kubeconfig.is_none() && server.addresses.is_empty() {
                tracing::warn!(
                    "KUBERNETES_SERVICE_HOST is usually a ClusterIP, and cproxy does not use its own table: if it \
                     cannot be reached, pass --apiserver with the API server's real address"
                );
            }
            // Without this line, an API server behind a proxy just looks unreachable.
            if let Some(name) = PROXY_VARIABLES.into_iter().find(|name| std::env::var_os(name).is_some()) {
                tracing::info!("{name} is set and not used: cproxy dials the API server itself");
            }
            let client = Arc::new(ApiClient::new(server, *configuration, setup));
            let of_watch = client.clone();
            tasks.keep("source", async move { wire::watch(&*of_watch, node_name, last_contact, sender).await });
            if let Some(FeedSender::Relay(sender)) = policy {
                let of_policy = client.clone();
                tasks.keep("policy source", async move { follow_relay(&of_policy, sender).await });
            }
            Some(client)
        }
    }
}
