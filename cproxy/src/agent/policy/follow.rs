//! Sources of the pod's policy: a relay, and manifests.

use std::{future::pending, marker::PhantomData};

use cproxy_core::{ObjectName, printable};
use cproxy_policy::{AddressSlice, PodPolicy, Resolver, SliceName, served};
use cproxy_wire::{ApiClient, Decoded, FieldSelector, Selectors, Subscriber, Wanted, WatchEvent, WatchedResource};
use tokio::sync::{mpsc, watch};

use super::{
    contact::SourceContact,
    of_relay::OfRelay,
    replica::{Change, Update},
};
use crate::manifests::Files;

/// All objects that the source shows to this client.
const ALL: Selectors<'static> = Selectors { labels: "", fields: FieldSelector::Any };

/// Text of an API server at paths of a group that it does not have (net/http of Go, `NotFound`). A relay has another.
const NO_SUCH_GROUP: &str = "404 page not found";

/// Updates that wait for the task that enforces, at most.
const WAITING_MAX: usize = 16;

/// Way from a source to the task that enforces the policy.
pub(in crate::agent) enum Feed {
    /// Updates of a relay, each with the number of lists that were wanted before it.
    Relay(mpsc::Receiver<(u64, Update)>, watch::Sender<u64>, SourceContact),
    Manifests(watch::Receiver<Option<Vec<Update>>>),
}

/// The other end of the way.
pub(in crate::agent) enum FeedSender {
    Relay(RelaySender),
    Manifests(watch::Sender<Option<Vec<Update>>>, ObjectName),
}

/// Sender of a relay's updates.
#[derive(Clone)]
pub(in crate::agent) struct RelaySender {
    updates: mpsc::Sender<(u64, Update)>,
    /// Number of lists that were wanted.
    wanted: watch::Receiver<u64>,
    contact: SourceContact,
}

impl Feed {
    /// A way from a relay.
    pub(in crate::agent) fn of_relay() -> (FeedSender, Self) {
        let (updates, receiver) = mpsc::channel(WAITING_MAX);
        let (lists, wanted) = watch::channel(0);
        let contact = SourceContact::default();
        let sender = RelaySender { updates, wanted, contact: contact.clone() };
        (FeedSender::Relay(sender), Self::Relay(receiver, lists, contact))
    }

    /// A way from manifests, of which the policy of a pod counts.
    pub(in crate::agent) fn of_manifests(pod: ObjectName) -> (FeedSender, Self) {
        let (sender, receiver) = watch::channel(None);
        (FeedSender::Manifests(sender, pod), Self::Manifests(receiver))
    }

    /// Last confirmations of the source.
    pub(in crate::agent) fn contact(&self) -> SourceContact {
        match self {
            Self::Relay(_, _, contact) => contact.clone(),
            Self::Manifests(_) => SourceContact::default(),
        }
    }

    /// Has a relay list all objects anew, and leaves out what it has sent before. Returns whether there is one.
    pub(super) fn list_anew(&self) -> bool {
        match self {
            Self::Relay(_, lists, _) => {
                lists.send_modify(|number| *number += 1);
                true
            }
            Self::Manifests(_) => false,
        }
    }

    /// The next updates; `None` at the end of the source.
    pub(super) async fn next(&mut self) -> Option<Vec<Update>> {
        match self {
            Self::Relay(updates, lists, _) => {
                let mut batch = vec![updates.recv().await?];
                while let Ok(update) = updates.try_recv() {
                    batch.push(update);
                }
                // Those from before the last list that was wanted may be another pod's.
                let number = *lists.borrow();
                Some(batch.into_iter().filter(|(of, _)| *of == number).map(|(_, update)| update).collect())
            }
            Self::Manifests(state) => {
                state.changed().await.ok()?;
                state.borrow_and_update().clone()
            }
        }
    }
}

/// Follows the policies and slices that a relay shows, for ever.
pub(in crate::agent) async fn follow_relay(client: &ApiClient, sender: RelaySender) {
    let mut policies = PolicySubscriber::<OfRelay<served::PodPolicy>>::new(sender.clone());
    let mut slices = PolicySubscriber::<OfRelay<served::AddressSlice>>::new(sender);
    tokio::join!(
        cproxy_wire::follow_resource(client, ALL, &mut policies),
        cproxy_wire::follow_resource(client, ALL, &mut slices),
    );
}

/// Sends what files say of a pod.
pub(in crate::agent) fn send_files(files: &Files, sender: &watch::Sender<Option<Vec<Update>>>, pod: &ObjectName) {
    let objects = files.policy_objects();
    let unread: Vec<_> = objects.unread_of(&pod.namespace).collect();
    if !unread.is_empty() || files.has_unread_file() {
        // It might isolate the pod.
        let what = if unread.is_empty() { "a file".to_owned() } else { unread.join(", ") };
        sender.send_replace(Some(vec![Update::Unusable(format!("the manifests cannot be used as a whole: {what}"))]));
        return;
    }
    let resolver: Resolver = objects.events().collect();
    let mut updates = vec![Update::Policies(Change::ListStarted), Update::Slices(Change::ListStarted)];
    if let Some(policy) = resolver.pod_policy(pod) {
        let slices = policy.sets.iter().flat_map(|set| set.slice_names()).filter_map(|name| resolver.slice(name));
        updates.extend(slices.map(|slice| Update::Slices(Change::Listed(slice.name, slice))));
        updates.push(Update::Policies(Change::Listed(pod.clone(), policy)));
    }
    updates.extend([Update::Slices(Change::ListDone), Update::Policies(Change::ListDone)]);
    sender.send_replace(Some(updates));
}

/// Object of a relay.
trait Served: WatchedResource {
    type Name: Send;
    type Object: Send;

    /// Position of the kind among those of [`SourceContact`].
    const CONTACT: usize;

    fn name(&self) -> Result<Self::Name, String>;
    fn read(&self) -> Result<(Self::Name, Self::Object), String>;
    fn update(change: Change<Self::Name, Self::Object>) -> Update;
}

impl Served for OfRelay<served::PodPolicy> {
    type Name = ObjectName;
    type Object = PodPolicy;

    const CONTACT: usize = 0;

    fn name(&self) -> Result<ObjectName, String> {
        Ok(ObjectName::new(&self.0.metadata.namespace, &*self.0.metadata.name))
    }

    fn read(&self) -> Result<(ObjectName, PodPolicy), String> {
        let policy = self.0.read().map_err(|error| error.to_string())?;
        Ok((policy.name.clone(), policy))
    }

    fn update(change: Change<ObjectName, PodPolicy>) -> Update {
        Update::Policies(change)
    }
}

impl Served for OfRelay<served::AddressSlice> {
    type Name = SliceName;
    type Object = AddressSlice;

    const CONTACT: usize = 1;

    fn name(&self) -> Result<SliceName, String> {
        SliceName::parse(&self.0.metadata.name).ok_or_else(|| "it has no slice's name".to_owned())
    }

    fn read(&self) -> Result<(SliceName, AddressSlice), String> {
        let slice = self.0.read().map_err(|error| error.to_string())?;
        Ok((slice.name, slice))
    }

    fn update(change: Change<SliceName, AddressSlice>) -> Update {
        Update::Slices(change)
    }
}

/// Subscriber that passes a kind on.
struct PolicySubscriber<K> {
    sender: RelaySender,
    /// Number of lists that were wanted when the present list or watch began.
    number: u64,
    kind: PhantomData<fn() -> K>,
}

impl<K: Served> PolicySubscriber<K> {
    fn new(sender: RelaySender) -> Self {
        Self { sender, number: 0, kind: PhantomData }
    }

    /// Update for an event. An object that cannot be read is as if it had not come: the policy is incomplete then.
    fn update(event: WatchEvent<K>) -> Option<Update> {
        let read = |decoded: Decoded<K>| {
            let metadata = decoded.meta().clone();
            let read = match &decoded {
                Decoded::Object(object) => object.read(),
                Decoded::Unreadable(_, error) => Err(error.clone()),
            };
            let warn = |error| tracing::warn!("{} {}: {error}; it is not used", K::KIND, printable(&metadata.name));
            read.map_err(warn).ok()
        };
        let change = match event {
            WatchEvent::ListStarted => Change::ListStarted,
            WatchEvent::Listed(object) => read(object).map(|(name, object)| Change::Listed(name, object))?,
            WatchEvent::ListDone(_) => Change::ListDone,
            WatchEvent::Applied(object) => read(object).map(|(name, object)| Change::Applied(name, object))?,
            WatchEvent::Deleted(Decoded::Object(object)) => Change::Deleted(object.name().ok()?),
            WatchEvent::Failed(reason) if reason.contains(NO_SUCH_GROUP) => return Some(Update::NoRelay(reason)),
            WatchEvent::Failed(reason) => return Some(Update::Failed(reason)),
            _ => return None,
        };
        Some(K::update(change))
    }
}

impl<K: Served> Subscriber<K> for PolicySubscriber<K> {
    const SPREADS_LISTS: bool = true;
    const LISTS_AFTER_FAILURE: bool = false;
    /// A relay ends the watch of slices whenever the policy names other sets.
    const EXPIRES_OFTEN: bool = true;

    async fn publish(&mut self, event: WatchEvent<K>) {
        if event.is_confirmation() {
            self.sender.contact.record(K::CONTACT);
        }
        if let Some(update) = Self::update(event) {
            // Without a receiver, the agent ends.
            self.sender.updates.send((self.number, update)).await.ok();
        }
    }

    async fn wanted(&mut self, _is_watch: bool) -> Wanted {
        if self.sender.wanted.wait_for(|number| *number != self.number).await.is_err() {
            pending::<()>().await;
        }
        self.number = *self.sender.wanted.borrow();
        Wanted::List
    }
}
