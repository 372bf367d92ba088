//! Watches of Services, EndpointSlices and, if its name is known, this Node, as one stream of events.
//!
//! Lists come from the server's cache, and are never a quorum read from etcd. Objects are decoded and published one by one, so the memory that a list
//! takes is bounded by its longest object.
//!
//! The agent can do without the Node. If the server forbids to read it, or has no Nodes, an empty list is published
//! instead. If the server cannot be reached, the agent waits, as for the other resources.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use cproxy_core::{
    Event,
    api::{EndpointSlice, Node, Service},
};
use cproxy_network::NetworkChanges;
use tokio::sync::{Notify, mpsc};

use super::{
    failure::{ApiError, Operation},
    follow::{ApiSource, follow},
    last_contact::LastContact,
    message::ListMetadata,
    message_reader::MessageReader,
    resources::WatchedResource,
    response::Response,
    selectors::{FieldSelector, Selectors},
    step::{Input, Log, Pause, Request},
    transport::Transport,
    watch_event::WatchEvent,
};

/// Shortest pause while the network keeps changing.
const PAUSE_MIN: Duration = Duration::from_millis(200);

/// Follows the API server until the receiver of `events` is closed. Without a node name, no Node is watched.
pub async fn watch(
    transport: &impl Transport,
    node_name: Option<String>,
    last_contact: LastContact,
    events: mpsc::Sender<Vec<Event>>,
) {
    let watcher = ApiWatcher {
        transport,
        last_contact,
        events,
        list_done: Notify::new(),
        accepts_protobuf: AtomicBool::new(true),
    };
    // The selectors of kube-proxy 1.36 (cmd/kube-proxy/app/server.go), and one against Services of type ExternalName.
    // These and headless Services have no frontends anyway, and Kubernetes before 1.31 cannot leave them out.
    let services = Selectors {
        labels: "!service.kubernetes.io/service-proxy-name",
        fields: FieldSelector::Optional("spec.clusterIP!=None,spec.type!=ExternalName"),
    };
    let slices = Selectors { labels: "!service.kubernetes.io/headless", fields: FieldSelector::Any };
    let node = async {
        let Some(name) = node_name else { return };
        // A server that is just starting refuses every request. Only after it has served another list does a refusal
        // mean that the agent may not read Nodes.
        watcher.list_done.notified().await;
        let own_node = Selectors { labels: "", fields: FieldSelector::Required(&format!("metadata.name={name}")) };
        watcher.follow::<Node>(own_node).await;
    };
    let (services, slices) = (watcher.follow::<Service>(services), watcher.follow::<EndpointSlice>(slices));
    tokio::select! {
        _ = async { tokio::join!(services, slices, node) } => {}
        () = watcher.events.closed() => {}
    }
}

/// Way to the API servers, shared by the watches of all resources.
struct ApiWatcher<'a, T> {
    transport: &'a T,
    last_contact: LastContact,
    events: mpsc::Sender<Vec<Event>>,
    /// Notified when a list is complete.
    list_done: Notify,
    /// The server has not yet refused protobuf.
    accepts_protobuf: AtomicBool,
}

impl<T: Transport> ApiWatcher<'_, T> {
    async fn follow<K: WatchedResource>(&self, selectors: Selectors<'_>) {
        let mut source = HttpSource { watcher: self, reader: None };
        follow::<K>(&mut source, selectors).await;
    }

    /// Reports a server that accepts requests or connections, but sends nothing.
    async fn report_silence<R>(&self, result: Result<R, ApiError>) -> Result<R, ApiError> {
        if matches!(result, Err(ApiError::Silent(_))) {
            self.transport.report_failure().await;
        }
        result
    }

    /// Sends a request. If the server, or a proxy in front of it, refuses protobuf, JSON alone is asked for from then
    /// on.
    async fn send(&self, request: &Request) -> Result<Response, ApiError> {
        let get = |accepts| Response::get(self.transport, request, accepts);
        let accepts_protobuf = self.accepts_protobuf.load(Ordering::Relaxed);
        match get(accepts_protobuf).await {
            Err(ApiError::Refused(status)) if accepts_protobuf && matches!(status.code, 406 | 415) => {
                if self.accepts_protobuf.swap(false, Ordering::Relaxed) {
                    let server = self.transport.server();
                    tracing::info!("the API server at {server} does not send protobuf: asking for JSON");
                }
                get(false).await
            }
            response => response,
        }
    }
}

/// API server as the source of one resource.
struct HttpSource<'a, T> {
    watcher: &'a ApiWatcher<'a, T>,
    /// Reader of the last response.
    reader: Option<MessageReader>,
}

impl<K: WatchedResource, T: Transport> ApiSource<K> for HttpSource<'_, T> {
    async fn request(&mut self, request: Request) -> Result<(), ApiError> {
        // An unfinished response is dropped first, which ends it.
        self.reader = None;
        let response = self.watcher.send(&request).await;
        let response = self.watcher.report_silence(response).await?;
        self.reader = Some(MessageReader::new(request.operation, response)?);
        Ok(())
    }

    async fn receive(&mut self, operation: Operation) -> Result<Input<K>, ApiError> {
        let Some(reader) = &mut self.reader else { return Err(ApiError::Incomplete) };
        let mut link = reader.link().clone();
        tokio::select! {
            biased;
            input = reader.next(operation.silence_max()) => self.watcher.report_silence(input).await,
            // A watch moves to a better connection. A list that is under way ends where it is.
            () = link.superseded(), if operation == Operation::Watch => Ok(Input::Ended(ListMetadata::default())),
        }
    }

    /// Ignores a closed receiver, which ends [`watch`].
    async fn publish(&mut self, event: WatchEvent<K>) {
        if event.is_confirmation() {
            self.watcher.last_contact.record(K::RESOURCE);
        }
        if matches!(event, WatchEvent::ListDone) {
            self.watcher.list_done.notify_one();
        }
        let events = event.into_events();
        if !events.is_empty() {
            self.watcher.events.send(events).await.ok();
        }
    }

    async fn pause(&mut self, pause: Pause) {
        // An unfinished response does not go on during the pause.
        self.reader = None;
        if pause.ends_on_network_change {
            tokio::select! {
                () = pause_unless_network_changes(pause.duration) => {}
                () = self.watcher.transport.replaced() => {}
            }
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

    fn server(&self) -> Arc<str> {
        self.watcher.transport.server()
    }
}

async fn pause_unless_network_changes(pause: Duration) {
    let changes = NetworkChanges::open();
    let least = pause.min(PAUSE_MIN);
    tokio::time::sleep(least).await;
    let changed = async {
        match changes {
            Ok(changes) if changes.wait().await.is_ok() => {}
            // If changes cannot be followed, the pause takes its full time.
            _ => std::future::pending().await,
        }
    };
    tokio::time::timeout(pause.saturating_sub(least), changed).await.ok();
}
