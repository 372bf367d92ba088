//! Source of objects: an API server or manifests.

use std::net::IpAddr;

use cproxy_core::Event;
use cproxy_network::SocketSetup;
use cproxy_wire::{self as wire, ApiClient, ApiServer, Configuration, LastContact};
use tokio::sync::mpsc;

use super::error::AgentError;
use crate::{
    config::ObjectSource,
    manifests::{self, Files, ParseOptions, Watcher},
};

/// Proxy variables of the environment, which the agent does not honour.
const PROXY_VARIABLES: [&str; 4] = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"];

/// Source that was checked and has not been started.
pub(super) enum CheckedSource {
    ApiServer(ApiServer, Box<Configuration>),
    Manifests(Watcher, Box<Files>),
}

impl CheckedSource {
    /// Addresses of the API servers, if they are the source, as far as they are known without a nameserver.
    pub(super) fn known_addresses(&self) -> impl Fn() -> Vec<IpAddr> + use<> {
        let configuration = match self {
            Self::ApiServer(_, configuration) => Some(configuration.clone()),
            Self::Manifests(..) => None,
        };
        move || configuration.as_ref().map(|configuration| configuration.known_addresses()).unwrap_or_default()
    }
}

/// Checks the source.
pub(super) async fn check(source: &ObjectSource, options: ParseOptions) -> Result<CheckedSource, AgentError> {
    Ok(match source {
        // Watching comes first, so that changes while the files are read are seen.
        ObjectSource::Manifests(paths) => {
            CheckedSource::Manifests(Watcher::new(paths)?, Box::new(Files::read(paths, options)?))
        }
        ObjectSource::ApiServer(server) => {
            CheckedSource::ApiServer(server.clone(), Box::new(wire::configure(server).await?))
        }
    })
}

/// Starts the source. The API server may be read before the programs are installed: see `SocketMark::mark`.
pub(super) fn start(
    source: CheckedSource,
    node_name: Option<String>,
    setup: SocketSetup,
    last_contact: LastContact,
    sender: mpsc::Sender<Vec<Event>>,
) -> Result<(), AgentError> {
    match source {
        CheckedSource::Manifests(watcher, files) => drop(tokio::spawn(async move {
            if let Err(error) = manifests::watch(*files, watcher, sender).await {
                tracing::error!("inotify: {error}; changes of manifests are no longer seen");
            }
        })),
        CheckedSource::ApiServer(server, configuration) => {
            tracing::info!("following the API server at {configuration}");
            // Without this line, an API server behind a proxy just looks unreachable.
            if let Some(name) = PROXY_VARIABLES.into_iter().find(|name| std::env::var_os(name).is_some()) {
                tracing::info!("{name} is set and not used: cproxy dials the API server itself");
            }
            let client = ApiClient::new(server, *configuration, setup);
            drop(tokio::spawn(async move { wire::watch(&client, node_name, last_contact, sender).await }));
        }
    }
    Ok(())
}
