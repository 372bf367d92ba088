//! Watches of Services, EndpointSlices and, where its name is known, the agent's own Node, as one stream of events.
//!
//! Lists are streamed where the server can: as the events with which a watch begins. Otherwise they come from the
//! server's cache, never as a quorum read from etcd. Either way each object is decoded and handed on by itself, so the
//! longest object bounds the memory that a list takes.
//!
//! The agent can do without the Node: where the server forbids to read it, or has no Nodes, an empty list stands for
//! it. A server that cannot be reached decides nothing of the kind: then the agent waits, as for the other resources.

use std::time::Duration;

use cproxy_core::{
    Event,
    api::{EndpointSlice, Node, Service},
};
use http::Uri;
use kube::Client;
use tokio::sync::{Notify, mpsc};

use super::{
    failure::Cause,
    follow::{ApiSource, follow},
    last_heard::LastHeard,
    message_reader::MessageReader,
    network_changes::NetworkChanges,
    resources::WatchedResource,
    response::Response,
    selectors::{Fields, Selectors},
    watch_state::{Collection, Input, Log, Pause, Request, WatchEvent},
};

/// Minimum retry interval while the network keeps changing.
const PAUSE_MIN: Duration = Duration::from_millis(200);

/// Follows the API server for ever, with back-off; ends when the receiver of `events` is closed. Without a node name,
/// no Node is watched.
pub async fn watch(
    client: Client,
    url: Uri,
    node_name: Option<String>,
    heard: LastHeard,
    events: mpsc::Sender<Vec<Event>>,
) {
    let watcher = ApiWatcher { client, url, heard, events, is_served: Notify::new() };
    // The selectors of kube-proxy 1.36 (cmd/kube-proxy/app/server.go). Headless Services have no frontends anyway, and
    // Kubernetes before 1.31 cannot leave them out.
    let services = Selectors {
        labels: "!service.kubernetes.io/service-proxy-name",
        fields: Fields::Optional("spec.clusterIP!=None"),
    };
    let slices = Selectors { labels: "!service.kubernetes.io/headless", fields: Fields::Any };
    let node = async {
        let Some(name) = node_name else { return };
        // A server that is just starting refuses everything. Only a refusal after another list was served means that
        // the agent may not read Nodes.
        watcher.is_served.notified().await;
        let own = Selectors { labels: "", fields: Fields::Required(&format!("metadata.name={name}")) };
        watcher.follow::<Node>(own).await;
    };
    tokio::select! {
        _ = async { tokio::join!(watcher.follow::<Service>(services), watcher.follow::<EndpointSlice>(slices), node) } => {}
        () = watcher.events.closed() => {}
    }
}

/// Connection to one API server, shared by the watches of all resources.
struct ApiWatcher {
    client: Client,
    url: Uri,
    heard: LastHeard,
    events: mpsc::Sender<Vec<Event>>,
    /// Notified whenever a list is complete.
    is_served: Notify,
}

impl ApiWatcher {
    async fn follow<K: WatchedResource>(&self, selectors: Selectors<'_>) {
        let mut source = HttpSource { watcher: self, reader: None };
        follow::<K>(&mut source, Collection { url: &self.url, selectors }).await;
    }
}

/// API server as the source of one resource's watch.
struct HttpSource<'a> {
    watcher: &'a ApiWatcher,
    /// Reader of the last response.
    reader: Option<MessageReader>,
}

impl<K: WatchedResource> ApiSource<K> for HttpSource<'_> {
    async fn request(&mut self, request: Request) -> Result<(), Cause> {
        // A connection whose response is given up is closed before the next request.
        self.reader = None;
        let response = Response::get(&self.watcher.client, &request.target, request.silence_max).await?;
        self.reader = Some(MessageReader::new(request.operation, response));
        Ok(())
    }

    async fn receive(&mut self, silence_max: Duration) -> Result<Input<K>, Cause> {
        let Some(reader) = &mut self.reader else { return Err(Cause::Incomplete) };
        reader.next(silence_max).await
    }

    /// Without a receiver, [`watch`] ends by itself.
    async fn publish(&mut self, event: WatchEvent<K>) {
        if event.is_confirmation() {
            self.watcher.heard.record(K::RESOURCE);
        }
        if matches!(event, WatchEvent::ListDone) {
            self.watcher.is_served.notify_one();
        }
        let events = event.into_events();
        if !events.is_empty() {
            self.watcher.events.send(events).await.ok();
        }
    }

    async fn pause(&mut self, pause: Pause) {
        // The connection is not kept open meanwhile.
        self.reader = None;
        if pause.ends_on_network_change {
            pause_unless_network_changes(pause.duration).await;
        } else {
            tokio::time::sleep(pause.duration).await;
        }
    }

    fn log(&mut self, log: Log) {
        match log {
            Log::Debug(message) => tracing::debug!("{message}"),
            Log::Info(message) => tracing::info!("{message}"),
            Log::Warn(message) => tracing::warn!("{message}"),
        }
    }
}

async fn pause_unless_network_changes(pause: Duration) {
    let changes = NetworkChanges::open();
    let least = pause.min(PAUSE_MIN);
    tokio::time::sleep(least).await;
    let changed = async {
        match changes {
            Ok(changes) if changes.wait().await.is_ok() => {}
            // Without news of changes, the pause takes its full time.
            _ => std::future::pending().await,
        }
    };
    tokio::time::timeout(pause.saturating_sub(least), changed).await.ok();
}
