//! Watches of Services, EndpointSlices and, if its name is known, this Node, as one stream of events.
//!
//! Lists come from the server's cache, and are never a quorum read from etcd. Objects are decoded and published one by
//! one, so the memory that a list takes is bounded by its longest object.
//!
//! The agent can do without the Node. If the server forbids to read it, or has no Nodes, an empty list is published
//! instead. If the server cannot be reached, the agent waits, as for the other resources.

use std::{future::pending, time::Duration};

use cproxy_core::{
    Event,
    api::{EndpointSlice, Node, Service},
};
use tokio::{
    sync::{Notify, mpsc, watch::Receiver},
    time::Instant,
};

use super::{
    last_contact::LastContact,
    resources::StoredResource,
    selectors::{FieldSelector, Selectors},
    source::{BOOKMARK_WATCH_TIME, Requester, Subscriber},
    transport::Transport,
    watch_event::WatchEvent,
};

/// Selectors of Services. They are those of kube-proxy 1.36 (cmd/kube-proxy/app/server.go), and one against Services of
/// type ExternalName. These and headless Services have no frontends anyway, and Kubernetes before 1.31 cannot leave
/// them out.
pub const SERVICES: Selectors<'static> = Selectors {
    labels: "!service.kubernetes.io/service-proxy-name",
    fields: FieldSelector::Optional("spec.clusterIP!=None,spec.type!=ExternalName"),
};

/// Selectors of EndpointSlices, as kube-proxy 1.36 has them.
pub const ENDPOINT_SLICES: Selectors<'static> =
    Selectors { labels: "!service.kubernetes.io/headless", fields: FieldSelector::Any };

/// Follows the API server until the receiver of `events` is closed. Without a node name, no Node is watched.
pub async fn watch(
    transport: &impl Transport,
    node_name: Option<String>,
    last_contact: LastContact,
    events: mpsc::Sender<Vec<Event>>,
) {
    let (requester, list_done) = (Requester::new(transport), Notify::new());
    let subscriber = || StoreSubscriber::new(&last_contact, &events, &list_done);
    let (mut of_services, mut of_slices, mut of_node) = (subscriber(), subscriber(), subscriber());
    let node = async {
        let Some(name) = node_name else { return };
        // A server that is just starting refuses every request. Only after it has served another list does a refusal
        // mean that the agent may not read Nodes.
        list_done.notified().await;
        let own_node = Selectors { labels: "", fields: FieldSelector::Required(&format!("metadata.name={name}")) };
        requester.follow::<Node, _>(own_node, &mut of_node).await;
    };
    let services = requester.follow::<Service, _>(SERVICES, &mut of_services);
    let slices = requester.follow::<EndpointSlice, _>(ENDPOINT_SLICES, &mut of_slices);
    tokio::select! {
        _ = async { tokio::join!(services, slices, node) } => {}
        () = events.closed() => {}
    }
}

/// Subscriber that passes events on to the agent's store.
struct StoreSubscriber<'a> {
    last_contact: &'a LastContact,
    events: &'a mpsc::Sender<Vec<Event>>,
    /// Notified when a list is complete.
    list_done: &'a Notify,
    /// Changes when a comparison with the server is wanted.
    comparisons: Receiver<()>,
    comparison: Comparison,
}

/// Progress of a comparison with the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    /// None is wanted.
    Idle,
    /// A watch has to be opened for it.
    Wanted,
    /// The server has not accepted that watch yet. Until then, the objects come from the time before.
    Requested,
    /// A response that was accepted at this time completes it: a list by its end, a watch by a bookmark. An API
    /// server sends no bookmark of the version from which the watch began, so its orderly end without any event does,
    /// too.
    UnderWay { since: Instant, has_changed: bool },
}

/// Shortest time of a watch whose end shows that there was no event. A server that goes away ends watches earlier.
const COMPARISON_MIN: Duration = BOOKMARK_WATCH_TIME.saturating_sub(Duration::from_secs(1));

impl<'a> StoreSubscriber<'a> {
    fn new(last_contact: &'a LastContact, events: &'a mpsc::Sender<Vec<Event>>, list_done: &'a Notify) -> Self {
        let comparisons = last_contact.comparisons();
        Self { last_contact, events, list_done, comparisons, comparison: Comparison::Idle }
    }
}

impl<K: StoredResource> Subscriber<K> for StoreSubscriber<'_> {
    const SPREADS_LISTS: bool = true;
    const LISTS_AFTER_FAILURE: bool = false;

    fn see_view(&mut self, token: Option<&str>) {
        self.last_contact.see_view(K::RESOURCE, token);
        self.comparison = match self.comparison {
            Comparison::Requested => Comparison::UnderWay { since: Instant::now(), has_changed: false },
            // The watch has ended too early.
            Comparison::UnderWay { .. } => Comparison::Wanted,
            other => other,
        };
    }

    async fn publish(&mut self, event: WatchEvent<K>) {
        if event.is_confirmation() {
            self.last_contact.record(K::RESOURCE);
        }
        if matches!(event, WatchEvent::ListDone(_)) {
            self.list_done.notify_one();
        }
        let is_under_way = matches!(self.comparison, Comparison::UnderWay { .. });
        let is_compared = event.is_comparison() && is_under_way;
        if let (Comparison::UnderWay { has_changed, .. }, true) = (&mut self.comparison, event.is_confirmation()) {
            *has_changed = true;
        }
        let mut events = event.into_events();
        if is_compared {
            self.comparison = Comparison::Idle;
            events.push(Event::Compared(K::RESOURCE));
        }
        if !events.is_empty() {
            self.events.send(events).await.ok();
        }
    }

    async fn end_watch(&mut self) {
        if let Comparison::UnderWay { since, has_changed: false } = self.comparison
            && since.elapsed() >= COMPARISON_MIN
        {
            self.comparison = Comparison::Idle;
            self.events.send(vec![Event::Compared(K::RESOURCE)]).await.ok();
        }
    }

    async fn bookmark_wanted(&mut self) {
        // The sender lives as long as `last_contact`.
        if self.comparison == Comparison::Wanted || self.comparisons.changed().await.is_ok() {
            self.comparison = Comparison::Requested;
        } else {
            pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::ResourceKind;
    use tokio::time::{advance, timeout};

    use super::*;

    type Of = Service;

    /// Whether the subscriber wants a watch for its bookmark now.
    async fn wants_bookmark(subscriber: &mut StoreSubscriber<'_>) -> bool {
        timeout(Duration::from_millis(1), Subscriber::<Of>::bookmark_wanted(subscriber)).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_bookmark_of_a_watch_that_was_accepted_later_is_a_comparison() {
        let (last_contact, list_done) = (LastContact::default(), Notify::new());
        let (sender, mut events) = mpsc::channel(4);
        let mut subscriber = StoreSubscriber::new(&last_contact, &sender, &list_done);
        let bookmark = || WatchEvent::<Of>::Bookmark("5".to_owned());
        let mut is_compared =
            || matches!(events.try_recv().as_deref(), Ok([.., Event::Compared(ResourceKind::Services)]));
        Subscriber::<Of>::see_view(&mut subscriber, None);
        assert!(!wants_bookmark(&mut subscriber).await);
        last_contact.compare();
        // It was on its way already.
        subscriber.publish(bookmark()).await;
        assert!(wants_bookmark(&mut subscriber).await);
        subscriber.publish(bookmark()).await;
        assert!(!wants_bookmark(&mut subscriber).await && !is_compared());

        Subscriber::<Of>::see_view(&mut subscriber, None);
        assert!(!wants_bookmark(&mut subscriber).await);
        // The watch ended without a bookmark, and the next one was not opened for it.
        Subscriber::<Of>::see_view(&mut subscriber, None);
        subscriber.publish(bookmark()).await;
        assert!(wants_bookmark(&mut subscriber).await && !is_compared());
        Subscriber::<Of>::see_view(&mut subscriber, None);
        subscriber.publish(bookmark()).await;
        assert!(is_compared());
        subscriber.publish(bookmark()).await;
        assert!(!wants_bookmark(&mut subscriber).await && !is_compared());

        last_contact.compare();
        assert!(wants_bookmark(&mut subscriber).await);
        Subscriber::<Of>::see_view(&mut subscriber, None);
        subscriber.publish(WatchEvent::<Of>::ListDone("6".to_owned())).await;
        assert!(is_compared(), "a list is a comparison, too");
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_ends_in_time_without_an_event_is_a_comparison() {
        let (last_contact, list_done) = (LastContact::default(), Notify::new());
        let (sender, mut events) = mpsc::channel(4);
        let mut subscriber = StoreSubscriber::new(&last_contact, &sender, &list_done);
        let deleted = || WatchEvent::<Of>::Deleted(crate::decode::Decoded::Object(Box::default()));
        for (time, event, is_comparison) in [
            (BOOKMARK_WATCH_TIME, None, true),
            (Duration::from_secs(1), None, false),
            (BOOKMARK_WATCH_TIME, Some(deleted()), false),
        ] {
            last_contact.compare();
            assert!(wants_bookmark(&mut subscriber).await);
            Subscriber::<Of>::see_view(&mut subscriber, None);
            if let Some(event) = event {
                subscriber.publish(event).await;
            }
            advance(time).await;
            Subscriber::<Of>::end_watch(&mut subscriber).await;
            let is_compared = matches!(events.try_recv().as_deref(), Ok([Event::Compared(ResourceKind::Services)]));
            assert_eq!(is_compared, is_comparison, "{time:?}");
            Subscriber::<Of>::see_view(&mut subscriber, None);
            assert_eq!(wants_bookmark(&mut subscriber).await, !is_comparison);
        }
    }
}
