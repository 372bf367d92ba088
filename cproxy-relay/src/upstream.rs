//! The API server as the source of the cache: one watch for each kind, on one connection.

use std::{
    future::pending,
    marker::PhantomData,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use cproxy_core::api::{EndpointSlice, Metadata, Node, Service};
use cproxy_relay_core::{Object, ObjectError, Relayed, Update, Upstream, parse_version};
use cproxy_wire::{
    ApiClient, ApiServer, ClientError, Configuration, Decoded, ENDPOINT_SLICES, FieldSelector, SERVICES, Selectors,
    Subscriber, Wanted, WatchEvent, configure, follow_resource,
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, sleep_until},
};

use crate::cache::{BOOKMARK_INTERVAL, Cache};

/// Time after which a list is asked for again that lacks objects which could not be read.
const UNREAD_INTERVAL: Duration = Duration::from_secs(10);

/// All Nodes: each client watches its own.
const NODES: Selectors<'static> = Selectors { labels: "", fields: FieldSelector::Any };

/// Setting of the way to the API server that is missing or wrong.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigurationError {
    /// There is neither a kubeconfig nor a ServiceAccount. The agent has more flags to name.
    #[error("no API server is known: pass --kubeconfig FILE, or run in a pod with a ServiceAccount ({0})")]
    NoServiceAccount(String),
    /// As the agent says it.
    #[error("{0}")]
    Other(ClientError),
}

/// Reads how the API server is reached.
///
/// # Errors
/// A setting is missing or wrong.
pub(crate) async fn configuration(server: &ApiServer) -> Result<Configuration, ConfigurationError> {
    configure(server).await.map_err(|error| match error {
        ClientError::NoServiceAccount(reason) => ConfigurationError::NoServiceAccount(reason.to_string()),
        error => ConfigurationError::Other(error),
    })
}

/// Follows the API server for ever.
pub(crate) async fn follow(client: &ApiClient, cache: &Arc<Cache>) {
    let mut services = CacheSubscriber::<Service>::new(cache);
    let mut slices = CacheSubscriber::<EndpointSlice>::new(cache);
    let mut nodes = CacheSubscriber::<Node>::new(cache);
    tokio::join!(
        follow_resource(client, SERVICES, &mut services),
        follow_resource(client, ENDPOINT_SLICES, &mut slices),
        follow_resource(client, NODES, &mut nodes),
    );
}

/// Subscriber that applies events to the cache.
struct CacheSubscriber<K> {
    cache: Arc<Cache>,
    wanted: Arc<Notify>,
    last_bookmark: Instant,
    kind: PhantomData<fn() -> K>,
}

impl<K: Relayed> CacheSubscriber<K> {
    fn new(cache: &Arc<Cache>) -> Self {
        let last_bookmark = Instant::now();
        Self { cache: cache.clone(), wanted: cache.wanted(K::RELAYED), last_bookmark, kind: PhantomData }
    }

    fn apply(&self, event: WatchEvent<Upstream<K>>) -> Result<(), ObjectError> {
        let is_confirmation = event.is_confirmation();
        let updates = match event {
            WatchEvent::ListStarted => vec![Update::ListStarted],
            WatchEvent::Listed(object) => self.read(object, Update::Listed, unreadable_in_list),
            WatchEvent::ListDone(version) => vec![Update::ListDone(parse_version(&version)?)],
            WatchEvent::Applied(object) => self.read(object, Update::Applied, unreadable_change),
            WatchEvent::Deleted(object) => self.read(object, Update::Deleted, unreadable_deletion),
            WatchEvent::Bookmark(version) => vec![Update::Bookmark(parse_version(&version)?)],
            WatchEvent::Accepted(_) | WatchEvent::Compared(_) | WatchEvent::Unavailable | WatchEvent::Failed(_) => {
                Vec::new()
            }
        };
        for update in updates {
            let outcome = self.cache.apply(K::RELAYED, update);
            if outcome.is_reset {
                tracing::warn!(
                    "the API server's {} are of an older state than before: clients list them anew",
                    K::PLURAL
                );
            }
        }
        if is_confirmation {
            self.cache.record_contact(K::RELAYED);
        }
        Ok(())
    }

    /// Update for an object. One that cannot be read keeps its last state.
    fn read(
        &self,
        decoded: Decoded<Upstream<K>>,
        update: fn(Object) -> Update,
        unreadable: fn(Metadata) -> Option<Update>,
    ) -> Vec<Update> {
        let (metadata, error) = match decoded {
            Decoded::Object(object) => {
                let (metadata, protobuf) = object.into_parts();
                let names = names(&metadata);
                match Object::new(K::RELAYED, metadata, protobuf.into()) {
                    Ok(object) => return vec![update(object)],
                    Err(error) => (names, error.to_string()),
                }
            }
            Decoded::Unreadable(metadata, error) => (*metadata, error),
        };
        self.cache.counts(K::RELAYED).unreadable.fetch_add(1, Ordering::Relaxed);
        let (namespace, name) = (cproxy_core::printable(&metadata.namespace), cproxy_core::printable(&metadata.name));
        tracing::warn!(
            "{} {namespace}/{name}: {error}; its last state stays, and without one it is not served",
            K::KIND
        );
        unreadable(metadata).into_iter().collect()
    }
}

fn unreadable_in_list(names: Metadata) -> Option<Update> {
    Some(Update::ListedUnreadable(names.namespace.into(), names.name.into()))
}

fn unreadable_change(names: Metadata) -> Option<Update> {
    parse_version(&names.resource_version).ok().map(Update::Bookmark)
}

fn unreadable_deletion(names: Metadata) -> Option<Update> {
    let version = parse_version(&names.resource_version).ok()?;
    Some(Update::DeletedUnreadable(names.namespace.into(), names.name.into(), version))
}

/// Names and version.
fn names(metadata: &Metadata) -> Metadata {
    Metadata {
        name: metadata.name.clone(),
        namespace: metadata.namespace.clone(),
        resource_version: metadata.resource_version.clone(),
        ..Metadata::default()
    }
}

impl<K: Relayed> Subscriber<Upstream<K>> for CacheSubscriber<K> {
    /// A relay is one client, whose own clients wait.
    const SPREADS_LISTS: bool = false;
    const LISTS_AFTER_FAILURE: bool = true;

    async fn publish(&mut self, event: WatchEvent<Upstream<K>>) {
        if let Err(error) = self.apply(event) {
            tracing::error!("{}: {error}; the relay needs versions that are numbers", K::PLURAL);
        }
    }

    async fn wanted(&mut self, is_watch: bool) -> Wanted {
        if !is_watch {
            pending::<()>().await;
        }
        let bookmark = async {
            sleep_until(self.last_bookmark + BOOKMARK_INTERVAL).await;
            self.wanted.notified().await;
        };
        // A first list that lacks objects is asked for again: a server that could not show them may have mended.
        let has_unread = self.cache.collection(K::RELAYED).unread().is_some();
        tokio::select! {
            () = bookmark => {
                self.last_bookmark = Instant::now();
                Wanted::Bookmark
            }
            () = sleep(UNREAD_INTERVAL), if has_unread => Wanted::List,
        }
    }
}
