//! Source of objects: an API server or manifests.

use cproxy_core::Event;
use cproxy_network::SocketSetup;
use cproxy_wire::{self as wire, LastContact};
use http::Uri;
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
    ApiServer(Box<wire::Config>),
    Manifests(Watcher, Box<Files>),
}

impl CheckedSource {
    /// URL of the API server, if that is the source.
    pub(super) fn api_server(&self) -> Option<Uri> {
        match self {
            Self::ApiServer(config) => Some(config.cluster_url.clone()),
            Self::Manifests(..) => None,
        }
    }
}

/// Checks the source.
pub(super) async fn check(source: &ObjectSource, options: ParseOptions) -> Result<CheckedSource, AgentError> {
    Ok(match source {
        // Watching comes first, so that changes while the files are read are seen.
        ObjectSource::Manifests(paths) => {
            CheckedSource::Manifests(Watcher::new(paths)?, Box::new(Files::read(paths, options)?))
        }
        ObjectSource::ApiServer(server) => CheckedSource::ApiServer(Box::new(wire::configure(server).await?)),
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
        CheckedSource::ApiServer(config) => {
            let client = wire::client(&config, setup)?;
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
