//! Watches of Services, EndpointSlices and, if its name is known, this Node, as one stream of events.
//!
//! Lists come from the server's cache, and are never a quorum read from etcd. Objects are decoded and published one by
//! one, so the memory that a list takes is bounded by its longest object.
//!
//! The agent can do without the Node. If the server forbids to read it, or has no Nodes, an empty list is published
//! instead. If the server cannot be reached, the agent waits, as for the other resources.

use std::{future::pending, sync::Arc, time::Duration};

use cproxy_core::{
    Event, ListSource,
    api::{EndpointSlice, Node, Service},
};
use tokio::{
    sync::{
        Notify, mpsc,
        watch::{Receiver, error::RecvError},
    },
    time::Instant,
};

use crate::{
    codec::resource::StoredResource,
    transport::link::Transport,
    watch::{
        event::WatchEvent,
        http::{BOOKMARK_WATCH_TIME, Requester, Subscriber, Wanted},
        last_contact::LastContact,
        selectors::{FieldSelector, Selectors},
    },
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

/// Waits until a receiver has a new value for which this holds. Others are seen, too.
async fn changed_to<T>(receiver: &mut Receiver<T>, is_due: impl Fn(&T) -> bool) -> Result<(), RecvError> {
    loop {
        // A value that is not due stays a change for a later call.
        if receiver.has_changed()? && is_due(&receiver.borrow()) {
            receiver.mark_unchanged();
            return Ok(());
        }
        let mut later = receiver.clone();
        later.mark_unchanged();
        later.changed().await?;
    }
}

/// Subscriber that passes events on to the agent's store.
struct StoreSubscriber<'a> {
    last_contact: &'a LastContact,
    events: &'a mpsc::Sender<Vec<Event>>,
    /// Notified when a list is complete.
    list_done: &'a Notify,
    /// Changes when a comparison with the server is wanted.
    comparisons: Receiver<u64>,
    /// Changes when a list is wanted.
    lists: Receiver<bool>,
    comparison: Comparison,
    /// Number of the comparison, or of the last one.
    number: u64,
    /// Last version that the server has confirmed.
    version: String,
    /// Origin of the last response; its end is that of the list.
    source: Option<ListSource>,
}

/// Progress of a comparison with the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    /// None is wanted.
    Idle,
    /// A watch has to be opened for it.
    Wanted,
    /// The server has not accepted that watch, or a list in its place, yet. Until then, the objects come from the time
    /// before.
    Requested,
    /// A response that was accepted at this time completes it: a list by its end, a watch by a bookmark. The watch
    /// begins before the last version. If a change has brought that, the API server shows the change and no bookmark of
    /// the same version: then the watch's orderly end without another event completes it, too. A watch that shows
    /// nothing does not: the server may have gone back to an older state, whose watches from later versions are silent.
    UnderWay { since: Instant, shown: Shown },
}

/// Events that a watch has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Nothing,
    /// The last version that was known before, and nothing else.
    LastVersion,
    /// Changes after it. Others may follow.
    Changes,
}

impl Comparison {
    /// Start with a response that was accepted now.
    fn begin() -> Self {
        Self::UnderWay { since: Instant::now(), shown: Shown::Nothing }
    }
}

/// Shortest time of a watch whose end shows that no event is left. A server that goes away ends watches earlier.
const COMPARISON_MIN: Duration = BOOKMARK_WATCH_TIME.saturating_sub(Duration::from_secs(1));

impl<'a> StoreSubscriber<'a> {
    fn new(last_contact: &'a LastContact, events: &'a mpsc::Sender<Vec<Event>>, list_done: &'a Notify) -> Self {
        let (comparisons, lists) = (last_contact.comparisons(), last_contact.lists());
        let (comparison, number, version) = (Comparison::Idle, 0, String::new());
        Self { last_contact, events, list_done, comparisons, lists, comparison, number, version, source: None }
    }
}

impl<K: StoredResource> Subscriber<K> for StoreSubscriber<'_> {
    const SPREADS_LISTS: bool = true;
    const LISTS_AFTER_FAILURE: bool = false;

    fn see_response(&mut self, server: &Arc<str>, view: Option<&str>, requested: Instant) {
        self.last_contact.see_view(K::RESOURCE, view);
        let (view, requested) = (view.map(Into::into), requested.into_std());
        self.source = Some(ListSource { server: server.clone(), view, requested, ended: requested });
        self.comparison = match self.comparison {
            Comparison::Requested => Comparison::begin(),
            // The watch has ended too early.
            Comparison::UnderWay { .. } => Comparison::Wanted,
            other => other,
        };
    }

    fn see_failure(&mut self, message: &str) {
        self.last_contact.record_failure(K::RESOURCE, message);
    }

    async fn publish(&mut self, event: WatchEvent<K>) {
        match event {
            // A list that was accepted after the comparison was asked for is one.
            WatchEvent::ListStarted if self.comparison != Comparison::Idle => self.comparison = Comparison::begin(),
            WatchEvent::ListDone(_) => self.list_done.notify_one(),
            _ => {}
        }
        let is_under_way = matches!(self.comparison, Comparison::UnderWay { .. });
        let is_compared = event.is_comparison() && is_under_way;
        if let Some(version) = event.version() {
            self.last_contact.record(K::RESOURCE);
            if let Comparison::UnderWay { shown, .. } = &mut self.comparison {
                let is_last = *shown != Shown::Changes && *version == self.version;
                *shown = if is_last { Shown::LastVersion } else { Shown::Changes };
            }
            version.clone_into(&mut self.version);
        }
        let is_end = matches!(event, WatchEvent::ListDone(_));
        let mut events = event.into_events();
        if is_end && let Some(source) = self.source.take() {
            let source = ListSource { ended: Instant::now().into_std(), ..source };
            events.insert(0, Event::ListFrom(K::RESOURCE, source));
        }
        if is_compared {
            self.comparison = Comparison::Idle;
            events.push(Event::Compared(K::RESOURCE, self.number));
        }
        if !events.is_empty() {
            self.events.send(events).await.ok();
        }
    }

    fn repeats_last_version(&self) -> bool {
        self.comparison == Comparison::Requested
    }

    async fn end_watch(&mut self) -> bool {
        let Comparison::UnderWay { since, shown } = self.comparison else { return false };
        match shown {
            _ if since.elapsed() < COMPARISON_MIN => false,
            Shown::Nothing => {
                self.comparison = Comparison::Requested;
                true
            }
            Shown::LastVersion => {
                self.comparison = Comparison::Idle;
                self.events.send(vec![Event::Compared(K::RESOURCE, self.number)]).await.ok();
                false
            }
            Shown::Changes => false,
        }
    }

    async fn wanted(&mut self, is_watch: bool) -> Wanted {
        let is_due = |at_once: &bool| is_watch || *at_once;
        if self.comparison != Comparison::Wanted || !is_watch {
            // The senders live as long as `last_contact`.
            let is_list = tokio::select! {
                Ok(()) = changed_to(&mut self.lists, is_due), if K::LOST_WITHOUT.is_none() => true,
                Ok(()) = self.comparisons.changed(), if is_watch => false,
                else => pending().await,
            };
            if is_list {
                return Wanted::List;
            }
            self.number = *self.comparisons.borrow_and_update();
        }
        self.comparison = Comparison::Requested;
        Wanted::Bookmark
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::ResourceKind;
    use tokio::time::{advance, timeout};

    use super::*;
    use crate::codec::decode::Decoded;

    type Of = Service;

    /// Output of a future that waits for nothing.
    fn futures_now<F: Future>(future: F) -> Option<F::Output> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::pin!(future).poll(&mut context) {
            std::task::Poll::Ready(output) => Some(output),
            std::task::Poll::Pending => None,
        }
    }

    /// The server accepts a request.
    fn see(subscriber: &mut StoreSubscriber<'_>) {
        Subscriber::<Of>::see_response(subscriber, &"a".into(), None, Instant::now());
    }

    /// Whether the subscriber wants a watch for its bookmark now.
    async fn wants_bookmark(subscriber: &mut StoreSubscriber<'_>) -> bool {
        timeout(Duration::from_millis(1), Subscriber::<Of>::wanted(subscriber, true)).await == Ok(Wanted::Bookmark)
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_bookmark_of_a_watch_that_was_accepted_later_is_a_comparison() {
        let (last_contact, list_done) = (LastContact::default(), Notify::new());
        let (sender, mut events) = mpsc::channel(4);
        let mut subscriber = StoreSubscriber::new(&last_contact, &sender, &list_done);
        let bookmark = || WatchEvent::<Of>::Bookmark("5".to_owned());
        let mut is_compared =
            || matches!(events.try_recv().as_deref(), Ok([.., Event::Compared(ResourceKind::Services, _)]));
        see(&mut subscriber);
        assert!(!wants_bookmark(&mut subscriber).await);
        last_contact.compare();
        // It was on its way already.
        subscriber.publish(bookmark()).await;
        assert!(wants_bookmark(&mut subscriber).await);
        subscriber.publish(bookmark()).await;
        assert!(!wants_bookmark(&mut subscriber).await && !is_compared());

        see(&mut subscriber);
        assert!(!wants_bookmark(&mut subscriber).await);
        // The watch ended without a bookmark, and the next one was not opened for it.
        see(&mut subscriber);
        subscriber.publish(bookmark()).await;
        assert!(wants_bookmark(&mut subscriber).await && !is_compared());
        see(&mut subscriber);
        subscriber.publish(bookmark()).await;
        assert!(is_compared());
        subscriber.publish(bookmark()).await;
        assert!(!wants_bookmark(&mut subscriber).await && !is_compared());

        last_contact.compare();
        assert!(wants_bookmark(&mut subscriber).await);
        see(&mut subscriber);
        subscriber.publish(WatchEvent::<Of>::ListDone("6".to_owned())).await;
        assert!(is_compared(), "a list is a comparison, too");
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_ends_in_time_is_a_comparison_if_it_has_shown_the_last_version_alone() {
        let (last_contact, list_done) = (LastContact::default(), Notify::new());
        let (sender, mut events) = mpsc::channel(4);
        let mut subscriber = StoreSubscriber::new(&last_contact, &sender, &list_done);
        let deleted = |version: &str| {
            let mut service = Box::<Service>::default();
            version.clone_into(&mut service.metadata.resource_version);
            WatchEvent::<Of>::Deleted(Decoded::Object(service))
        };
        subscriber.publish(deleted("5")).await;
        events.try_recv().ok();
        for (time, versions, is_comparison) in [
            (BOOKMARK_WATCH_TIME, &["5"][..], true),
            (Duration::from_secs(1), &["5"], false),
            (BOOKMARK_WATCH_TIME, &["6"], false),
            (BOOKMARK_WATCH_TIME, &["6", "7"], false),
            (BOOKMARK_WATCH_TIME, &["7"], true),
        ] {
            last_contact.compare();
            assert!(wants_bookmark(&mut subscriber).await && Subscriber::<Of>::repeats_last_version(&subscriber));
            see(&mut subscriber);
            for version in versions {
                subscriber.publish(deleted(version)).await;
                events.try_recv().ok();
            }
            advance(time).await;
            assert!(!Subscriber::<Of>::end_watch(&mut subscriber).await);
            let is_compared = matches!(events.try_recv().as_deref(), Ok([Event::Compared(ResourceKind::Services, _)]));
            assert_eq!(is_compared, is_comparison, "{versions:?} in {time:?}");
            see(&mut subscriber);
            assert_eq!(wants_bookmark(&mut subscriber).await, !is_comparison);
            subscriber.comparison = Comparison::Idle;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_comparison_that_was_asked_for_meanwhile_is_another_one() {
        let (last_contact, list_done) = (LastContact::default(), Notify::new());
        let (sender, mut events) = mpsc::channel(4);
        let mut subscriber = StoreSubscriber::new(&last_contact, &sender, &list_done);
        let first = last_contact.compare();
        assert!(wants_bookmark(&mut subscriber).await);
        let second = last_contact.compare();
        // The server may have accepted this watch before the second comparison was asked for.
        for number in [first, second] {
            see(&mut subscriber);
            subscriber.publish(WatchEvent::<Of>::Bookmark("5".to_owned())).await;
            let compared = events.try_recv();
            assert!(matches!(compared.as_deref(), Ok([Event::Compared(_, of)]) if *of == number), "{compared:?}");
            assert_eq!(wants_bookmark(&mut subscriber).await, number == first);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn services_and_slices_are_listed_anew_when_lists_are_wanted() {
        let (last_contact, list_done) = (LastContact::default(), Notify::new());
        let (sender, _events) = mpsc::channel(4);
        let mut subscriber = StoreSubscriber::new(&last_contact, &sender, &list_done);
        last_contact.list_anew(false);
        assert_eq!(Subscriber::<Of>::wanted(&mut subscriber, true).await, Wanted::List);
        assert!(!wants_bookmark(&mut subscriber).await);
        last_contact.list_anew(false);
        let of_node = timeout(Duration::from_secs(1), Subscriber::<Node>::wanted(&mut subscriber, true));
        assert!(of_node.await.is_err());
        // While a list is under way, one is wanted at once or not at all.
        let during = |subscriber: &mut StoreSubscriber<'_>| {
            let wanted = Subscriber::<Of>::wanted(subscriber, false);
            futures_now(wanted)
        };
        assert_eq!(during(&mut subscriber), None);
        last_contact.list_anew(true);
        assert_eq!(during(&mut subscriber), Some(Wanted::List));
        last_contact.compare();
        assert_eq!(Subscriber::<Node>::wanted(&mut subscriber, true).await, Wanted::Bookmark);
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_watch_that_shows_nothing_a_list_is_the_comparison() {
        let (last_contact, list_done) = (LastContact::default(), Notify::new());
        let (sender, mut events) = mpsc::channel(4);
        let mut subscriber = StoreSubscriber::new(&last_contact, &sender, &list_done);
        last_contact.compare();
        assert!(wants_bookmark(&mut subscriber).await);
        see(&mut subscriber);
        advance(BOOKMARK_WATCH_TIME).await;
        assert!(Subscriber::<Of>::end_watch(&mut subscriber).await);
        // The first one breaks off.
        for _ in 0..2 {
            see(&mut subscriber);
            subscriber.publish(WatchEvent::<Of>::ListStarted).await;
            assert!(matches!(events.try_recv().as_deref(), Ok([Event::ListStarted(_)])));
        }
        subscriber.publish(WatchEvent::<Of>::ListDone("4".to_owned())).await;
        assert!(matches!(
            events.try_recv().as_deref(),
            Ok([Event::ListFrom(..), Event::ListDone(_), Event::Compared(..)])
        ));
        assert!(!wants_bookmark(&mut subscriber).await);
    }
}
