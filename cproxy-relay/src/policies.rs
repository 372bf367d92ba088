//! Network policies: from the API server, or another relay, to the policies of pods that clients ask for.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::pending,
    marker::PhantomData,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant as StdInstant},
};

use bytes::Bytes;
use cproxy_core::{Problem, api::Metadata, printable};
use cproxy_policy::{api, served};
use cproxy_relay_core::{
    Policies, PolicyChange, PolicyInput, PolicyKind, PolicyObject, PolicyUpdate, Status, parse_version,
    policy_deletion, policy_object_name,
};
use cproxy_wire::{ApiClient, Decoded, FieldSelector, Selectors, Subscriber, Wanted, WatchEvent, follow_resource};
use http::{Request, header::ACCEPT};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, sleep_until, timeout},
};

use crate::{
    cache::{BOOKMARK_INTERVAL, Cache, WAIT_MAX, too_large},
    config::PolicySource,
    jitter::process_number,
};

/// Time in which changes are gathered after a publication: what changes twice is sent once, and pods that come together
/// are one event of a slice.
const GATHERING: Duration = Duration::from_millis(50);

/// All objects.
const ALL: Selectors<'static> = Selectors { labels: "", fields: FieldSelector::Any };

/// Network policies as they are followed and published.
pub(crate) struct PolicyService {
    pub(crate) policies: Arc<Policies>,
    source: PolicySource,
    /// Notified when something is to be published.
    changed: Notify,
    /// Revision up to which all is known.
    known: watch::Sender<Option<u64>>,
    /// Changes when a client waits for a version.
    wanted: watch::Sender<u64>,
    pub(crate) counts: PolicyCounts,
    /// Times at which the source has last confirmed what is known of each kind.
    contacts: Mutex<BTreeMap<&'static str, StdInstant>>,
}

/// Numbers of what has happened.
#[derive(Debug, Default)]
pub(crate) struct PolicyCounts {
    /// Updates that were applied.
    pub(crate) updates: AtomicU64,
    /// Time in which they were applied and published.
    pub(crate) resolve_ns: AtomicU64,
    /// Policies of pods and slices that were published as changed.
    pub(crate) published: AtomicU64,
    /// Objects that could not be read.
    pub(crate) unreadable: AtomicU64,
    /// Mistakes in objects.
    pub(crate) mistakes: AtomicU64,
}

impl PolicyService {
    /// Policies of a source, whose slices are in the cache.
    pub(crate) fn new(source: PolicySource, cache: &Cache) -> Self {
        let slices = cache.collection(cproxy_relay_core::Kind::AddressSlices).clone();
        let epoch = process_number();
        let policies = match source {
            PolicySource::Resolve => Policies::resolved(slices, epoch),
            PolicySource::Follow => Policies::followed(slices, epoch),
        };
        Self {
            policies: Arc::new(policies),
            source,
            changed: Notify::new(),
            known: watch::Sender::new(None),
            wanted: watch::Sender::new(0),
            counts: PolicyCounts::default(),
            contacts: Mutex::default(),
        }
    }

    /// Follows the source for ever.
    pub(crate) async fn follow(self: &Arc<Self>, client: &ApiClient) {
        match self.source {
            PolicySource::Resolve => {
                tokio::join!(
                    self.follow_kind::<api::Pod>(client),
                    self.follow_kind::<api::Namespace>(client),
                    self.follow_kind::<api::NetworkPolicy>(client),
                );
            }
            PolicySource::Follow => {
                tokio::join!(
                    self.follow_kind::<served::PodPolicy>(client),
                    self.follow_kind::<served::AddressSlice>(client),
                );
            }
        }
    }

    async fn follow_kind<K: PolicyKind>(self: &Arc<Self>, client: &ApiClient) {
        let mut subscriber = PolicySubscriber::<K> {
            service: self.clone(),
            client,
            wanted: self.wanted.subscribe(),
            is_wanted: false,
            last_bookmark: Instant::now(),
            kind: PhantomData,
        };
        follow_resource(client, ALL, &mut subscriber).await;
    }

    /// Publishes changes for ever.
    pub(crate) async fn publish(&self, cache: &Cache) {
        let mut reported = BTreeSet::new();
        loop {
            self.changed.notified().await;
            let began = StdInstant::now();
            let (updates, published) = self.policies.publish(began);
            let spent_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            let PolicyCounts { resolve_ns, updates: all, published: changed, .. } = &self.counts;
            for (count, number) in [(resolve_ns, spent_ns), (all, updates as u64), (changed, published as u64)] {
                count.fetch_add(number, Ordering::Relaxed);
            }
            let problems = self.policies.problems();
            problems.difference(&reported).for_each(|problem| tracing::warn!("{problem}"));
            reported = problems;
            self.known.send_replace(self.policies.known_revision());
            cache.bound_and_wake();
            sleep(GATHERING).await;
        }
    }

    /// Waits until all changes up to a version are published; 0: until the first lists are complete. The version may
    /// be another replica's.
    ///
    /// # Errors
    /// They are not, after some seconds.
    pub(crate) async fn wait_for(&self, version: u64) -> Result<(), Status> {
        let mut known = self.known.subscribe();
        let revision = Policies::revision(version);
        let is_there = |known: &Option<u64>| known.is_some_and(|known| known >= revision);
        if is_there(&known.borrow()) || self.policies.has_published(version) {
            return Ok(());
        }
        self.wanted.send_modify(|number| *number += 1);
        if timeout(WAIT_MAX, known.wait_for(is_there)).await.is_ok_and(|waited| waited.is_ok()) {
            return Ok(());
        }
        let is_synced = known.borrow().is_some();
        Err(if is_synced { too_large(version, self.policies.known_version()) } else { not_synced() })
    }

    /// Seconds since the source has last confirmed what is known of each kind.
    pub(crate) fn silent_seconds(&self) -> Vec<(&'static str, f64)> {
        let contacts = self.contacts.lock().unwrap_or_else(PoisonError::into_inner);
        contacts.iter().map(|(kind, contact)| (*kind, contact.elapsed().as_secs_f64())).collect()
    }

    /// Reason for which clients cannot be served yet.
    pub(crate) fn pending(&self) -> Option<String> {
        let inputs = match self.source {
            PolicySource::Resolve => "pods, namespaces or networkpolicies",
            PolicySource::Follow => "podpolicies or addressslices",
        };
        self.policies.summary().is_none().then(|| inputs.to_owned())
    }

    fn apply<K: PolicyKind>(&self, update: PolicyUpdate) {
        self.policies.add(K::INPUT, update);
        self.changed.notify_one();
    }
}

/// Error of a relay whose first lists are not complete.
pub(crate) fn not_synced() -> Status {
    let message = "the relay has not resolved the network policies yet";
    Status { retry_after_seconds: 1, ..Status::new(503, "ServiceUnavailable", message) }
}

/// Subscriber that applies the objects of a kind to the policies.
struct PolicySubscriber<'c, K> {
    service: Arc<PolicyService>,
    client: &'c ApiClient,
    wanted: watch::Receiver<u64>,
    /// A client waits for a version, and the API server has not been asked since.
    is_wanted: bool,
    last_bookmark: Instant,
    kind: PhantomData<fn() -> K>,
}

impl<K: PolicyKind> PolicySubscriber<'_, K> {
    fn update(&self, event: WatchEvent<PolicyObject<K>>) -> Result<Option<PolicyUpdate>, String> {
        Ok(match event {
            WatchEvent::ListStarted => Some(PolicyUpdate::ListStarted),
            WatchEvent::Listed(object) => match self.read(&object) {
                Some(change) => Some(PolicyUpdate::Listed(change)),
                None => Some(PolicyUpdate::ListedUnreadable(policy_object_name(object.meta()))),
            },
            WatchEvent::ListDone(version) => Some(PolicyUpdate::ListDone(self.revision(&version)?)),
            WatchEvent::Applied(object) => {
                let revision = self.revision(&object.meta().resource_version)?;
                Some(match self.read(&object) {
                    Some(change) => PolicyUpdate::Applied(change, revision),
                    None => PolicyUpdate::Known(revision),
                })
            }
            WatchEvent::Deleted(object) => {
                let revision = self.revision(&object.meta().resource_version)?;
                Some(PolicyUpdate::Applied(policy_deletion::<K>(object.meta()), revision))
            }
            WatchEvent::Bookmark(version) => Some(PolicyUpdate::Known(self.revision(&version)?)),
            WatchEvent::Accepted(_) | WatchEvent::Compared(_) | WatchEvent::Unavailable | WatchEvent::Failed(_) => None,
        })
    }

    /// Has the API server look how far the kind has got. Its cache learns nothing of revisions that changed other
    /// kinds, and its bookmarks tell none, until somebody wants the latest list (apiserver/pkg/storage/cacher/ready.go
    /// and delegator.go 1.36). Before Kubernetes 1.31, etcd tells it every few seconds, where it is set up so.
    async fn ask_for_progress(&self) {
        let group = if K::GROUP.is_empty() { "api".to_owned() } else { format!("apis/{}", K::GROUP) };
        let path = format!("/{group}/{}/{}?limit=1", K::VERSION, K::PLURAL);
        let names = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
        let Ok(request) = Request::get(path).header(ACCEPT, names).body(Bytes::new()) else { return };
        if let Ok(Err(error)) = timeout(WAIT_MAX, self.client.call(request)).await {
            tracing::debug!("{}: {error}", K::PLURAL);
        }
    }

    /// Revision of the API server that a version is about.
    fn revision(&self, version: &str) -> Result<u64, String> {
        let version = parse_version(version).map_err(|error| error.to_string())?;
        Ok(match self.service.source {
            PolicySource::Resolve => version,
            PolicySource::Follow => Policies::revision(version),
        })
    }

    /// The object as a change; `None` if it cannot be read: its last state stays.
    fn read(&self, decoded: &Decoded<PolicyObject<K>>) -> Option<PolicyChange> {
        let error = match decoded {
            Decoded::Object(object) => match object.change() {
                Ok((change, problems)) => {
                    self.report(&problems);
                    return Some(change);
                }
                Err(error) => error,
            },
            Decoded::Unreadable(_, error) => error.clone(),
        };
        let Metadata { namespace, name, .. } = decoded.meta();
        self.service.counts.unreadable.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(
            "{} {}/{}: {error}; its last state stays, and without one it is as if it were not there",
            K::KIND,
            printable(namespace),
            printable(name)
        );
        None
    }

    fn report(&self, problems: &[Problem]) {
        self.service.counts.mistakes.fetch_add(problems.len() as u64, Ordering::Relaxed);
        for problem in problems {
            // Pods are many, and their mistakes their owners'.
            if K::INPUT == PolicyInput::NetworkPolicies {
                tracing::warn!("{problem}");
            } else {
                tracing::debug!("{problem}");
            }
        }
    }
}

impl<K: PolicyKind> Subscriber<PolicyObject<K>> for PolicySubscriber<'_, K> {
    const SPREADS_LISTS: bool = false;
    const LISTS_AFTER_FAILURE: bool = true;
    /// A root relay ends the watch of slices whenever the policies of the node name other sets.
    const EXPIRES_OFTEN: bool = matches!(K::INPUT, PolicyInput::AddressSlices);

    async fn publish(&mut self, event: WatchEvent<PolicyObject<K>>) {
        if event.is_confirmation() {
            let mut contacts = self.service.contacts.lock().unwrap_or_else(PoisonError::into_inner);
            contacts.insert(K::PLURAL, StdInstant::now());
        }
        match self.update(event) {
            Ok(Some(update)) => self.service.apply::<K>(update),
            Ok(None) => {}
            Err(error) => tracing::error!("{}: {error}; the relay needs versions that are numbers", K::PLURAL),
        }
    }

    async fn wanted(&mut self, is_watch: bool) -> Wanted {
        if !is_watch {
            pending::<()>().await;
        }
        sleep_until(self.last_bookmark + BOOKMARK_INTERVAL).await;
        if !self.is_wanted && self.wanted.changed().await.is_err() {
            pending::<()>().await;
        }
        self.is_wanted = true;
        if self.service.source == PolicySource::Resolve {
            self.ask_for_progress().await;
        }
        self.is_wanted = false;
        self.last_bookmark = Instant::now();
        Wanted::Bookmark
    }
}
