//! Watches of Services, EndpointSlices and, if its name is known, this Node, as one stream of events.
//!
//! Lists come from the server's cache, and are never a quorum read from etcd. Objects are decoded and published one by
//! one, so the memory that a list takes is bounded by its longest object.
//!
//! The agent can do without the Node. If the server forbids to read it, or has no Nodes, an empty list is published
//! instead. If the server cannot be reached, the agent waits, as for the other resources.

use std::future::pending;

use cproxy_core::{
    Event, ListSource, ResourceKind,
    api::{EndpointSlice, Node, Service},
    object_name,
};
use tokio::{
    sync::{
        Notify, mpsc,
        watch::{Receiver, error::RecvError},
    },
    time::Instant,
};

use crate::{
    codec::{decode::Decoded, resource::WatchedResource},
    transport::link::Transport,
    watch::{
        driver::follow,
        event::{ResponseOrigin, WatchEvent},
        last_contact::LastContact,
        requester::Requester,
        selectors::{FieldSelector, Selectors},
        subscriber::{Subscriber, Wanted},
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
        follow::<Node, _>(&requester, own_node, &mut of_node).await;
    };
    let services = follow::<Service, _>(&requester, SERVICES, &mut of_services);
    let slices = follow::<EndpointSlice, _>(&requester, ENDPOINT_SLICES, &mut of_slices);
    tokio::select! {
        _ = async { tokio::join!(services, slices, node) } => {}
        () = events.closed() => {}
    }
}

/// Waits until a receiver has a new value for which this holds.
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

/// Resource that the agent's store keeps.
trait StoredResource: WatchedResource {
    /// Kind in the store.
    const RESOURCE: ResourceKind;

    /// Event of an object that was added or changed.
    fn applied(object: Box<Self>) -> Event;
}

impl StoredResource for Service {
    const RESOURCE: ResourceKind = ResourceKind::Services;

    fn applied(object: Box<Self>) -> Event {
        Event::Service(object)
    }
}

impl StoredResource for EndpointSlice {
    const RESOURCE: ResourceKind = ResourceKind::EndpointSlices;

    fn applied(object: Box<Self>) -> Event {
        Event::EndpointSlice(object)
    }
}

impl StoredResource for Node {
    const RESOURCE: ResourceKind = ResourceKind::Nodes;

    fn applied(object: Box<Self>) -> Event {
        Event::Node(object)
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
    /// Origin of the last response; its end is that of the list.
    source: Option<ListSource>,
}

impl<'a> StoreSubscriber<'a> {
    fn new(last_contact: &'a LastContact, events: &'a mpsc::Sender<Vec<Event>>, list_done: &'a Notify) -> Self {
        let (comparisons, lists) = (last_contact.comparisons(), last_contact.lists());
        Self { last_contact, events, list_done, comparisons, lists, source: None }
    }

    /// Events of the store for an event of the watch.
    fn translate<K: StoredResource>(&mut self, event: WatchEvent<K>) -> Vec<Event> {
        match event {
            WatchEvent::Accepted(origin) => {
                self.source = Some(list_source(&origin));
                Vec::new()
            }
            WatchEvent::ListStarted => vec![Event::ListStarted(K::RESOURCE)],
            WatchEvent::Listed(object) | WatchEvent::Applied(object) => vec![match object {
                Decoded::Object(object) => K::applied(object),
                Decoded::Unreadable(metadata, message) => {
                    Event::Unreadable { kind: K::RESOURCE, name: object_name(&metadata), message }
                }
            }],
            WatchEvent::Deleted(object) => {
                object_name(object.meta()).map(|name| Event::Deleted(K::RESOURCE, name)).into_iter().collect()
            }
            WatchEvent::ListDone(_) => {
                let source = self.source.take();
                let source = source.map(|source| ListSource { ended: Instant::now().into_std(), ..source });
                let from = source.map(|source| Event::ListFrom(K::RESOURCE, source));
                from.into_iter().chain([Event::ListDone(K::RESOURCE)]).collect()
            }
            WatchEvent::Compared(number) => vec![Event::Compared(K::RESOURCE, number)],
            WatchEvent::Unavailable => vec![Event::ListStarted(K::RESOURCE), Event::ListDone(K::RESOURCE)],
            WatchEvent::Bookmark(_) | WatchEvent::Failed(_) => Vec::new(),
        }
    }
}

fn list_source(origin: &ResponseOrigin) -> ListSource {
    let (view, requested) = (origin.view.token().map(Into::into), origin.requested.into_std());
    ListSource { server: origin.server.clone(), view, requested, ended: requested }
}

impl<K: StoredResource> Subscriber<K> for StoreSubscriber<'_> {
    const SPREADS_LISTS: bool = true;
    const LISTS_AFTER_FAILURE: bool = false;

    /// A closed receiver is not an error: [`watch`](watch()) ends by itself.
    async fn publish(&mut self, event: WatchEvent<K>) {
        match &event {
            WatchEvent::Accepted(origin) => self.last_contact.see_view(K::RESOURCE, origin.view.token()),
            WatchEvent::Failed(message) => self.last_contact.record_failure(K::RESOURCE, message),
            event if event.is_confirmation() => self.last_contact.record(K::RESOURCE),
            _ => {}
        }
        if let WatchEvent::ListDone(_) = event {
            self.list_done.notify_one();
        }
        let events = self.translate(event);
        if !events.is_empty() {
            self.events.send(events).await.ok();
        }
    }

    async fn wanted(&mut self, is_watch: bool) -> Wanted {
        let is_due = |at_once: &bool| is_watch || *at_once;
        // The senders live as long as `last_contact`.
        tokio::select! {
            biased;
            Ok(()) = changed_to(&mut self.lists, is_due), if K::LOST_WITHOUT.is_none() => Wanted::List,
            Ok(()) = self.comparisons.changed(), if is_watch => {
                Wanted::Comparison(*self.comparisons.borrow_and_update())
            }
            else => pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::watch::view_token::ViewToken;

    type Of = Service;

    /// Response that the subscriber wants without waiting.
    fn wanted_now(subscriber: &mut StoreSubscriber<'_>, is_watch: bool) -> Option<Wanted> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let wanted = std::pin::pin!(Subscriber::<Of>::wanted(subscriber, is_watch));
        match wanted.poll(&mut context) {
            std::task::Poll::Ready(wanted) => Some(wanted),
            std::task::Poll::Pending => None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_list_names_its_origin_and_wakes_the_watch_of_the_node() {
        let (last_contact, list_done) = (LastContact::default(), Notify::new());
        let (sender, mut events) = mpsc::channel(4);
        let mut subscriber = StoreSubscriber::new(&last_contact, &sender, &list_done);
        let accepted = |view| {
            let (server, requested) = ("a".into(), Instant::now());
            WatchEvent::<Of>::Accepted(ResponseOrigin { server, view, requested })
        };
        subscriber.publish(WatchEvent::<Of>::Failed("no route".to_owned())).await;
        assert_eq!(last_contact.failure().as_deref(), Some("no route"));
        // Of a list that broke off.
        subscriber.publish(accepted(ViewToken::default())).await;
        subscriber.publish(accepted(ViewToken::named("x"))).await;
        assert_eq!((last_contact.failure(), last_contact.view()), (None, "x".to_owned()), "it is shown at once");
        subscriber.publish(WatchEvent::<Of>::ListStarted).await;
        assert!(matches!(events.try_recv().as_deref(), Ok([Event::ListStarted(ResourceKind::Services)])));
        assert_eq!(last_contact.silent_seconds(), None);
        subscriber.publish(WatchEvent::<Of>::ListDone("5".to_owned())).await;
        let done = events.try_recv().unwrap();
        let [Event::ListFrom(_, source), Event::ListDone(ResourceKind::Services)] = &done[..] else {
            panic!("{done:?}")
        };
        assert_eq!((&*source.server, source.view.as_deref()), ("a", Some("x")));
        assert_eq!(last_contact.silent_seconds(), Some(0));
        timeout(Duration::from_secs(1), list_done.notified()).await.unwrap();
        subscriber.publish(WatchEvent::<Of>::Compared(3)).await;
        assert!(matches!(events.try_recv().as_deref(), Ok([Event::Compared(ResourceKind::Services, 3)])));
        subscriber.publish(WatchEvent::<Of>::Bookmark("6".to_owned())).await;
        assert!(events.try_recv().is_err(), "the store needs no bookmark");
    }

    #[tokio::test(start_paused = true)]
    async fn of_two_comparisons_and_a_list_the_list_comes_first_and_then_the_later_comparison() {
        let (last_contact, list_done) = (LastContact::default(), Notify::new());
        let (sender, _events) = mpsc::channel(4);
        let mut subscriber = StoreSubscriber::new(&last_contact, &sender, &list_done);
        let first = last_contact.compare();
        assert_eq!(wanted_now(&mut subscriber, true), Some(Wanted::Comparison(first)));
        last_contact.compare();
        let later = last_contact.compare();
        last_contact.list_anew(false);
        assert_eq!(wanted_now(&mut subscriber, true), Some(Wanted::List));
        assert_eq!(wanted_now(&mut subscriber, true), Some(Wanted::Comparison(later)));
        assert_eq!(wanted_now(&mut subscriber, true), None);
    }

    #[tokio::test(start_paused = true)]
    async fn services_and_slices_are_listed_anew_when_lists_are_wanted() {
        let (last_contact, list_done) = (LastContact::default(), Notify::new());
        let (sender, _events) = mpsc::channel(4);
        let mut subscriber = StoreSubscriber::new(&last_contact, &sender, &list_done);
        last_contact.list_anew(false);
        assert_eq!(Subscriber::<Of>::wanted(&mut subscriber, true).await, Wanted::List);
        assert_eq!(wanted_now(&mut subscriber, true), None);
        last_contact.list_anew(false);
        let of_node = timeout(Duration::from_secs(1), Subscriber::<Node>::wanted(&mut subscriber, true));
        assert!(of_node.await.is_err());
        // While a list is under way, one is wanted at once or not at all.
        assert_eq!(wanted_now(&mut subscriber, false), None);
        last_contact.list_anew(true);
        assert_eq!(wanted_now(&mut subscriber, false), Some(Wanted::List));
        let number = last_contact.compare();
        assert_eq!(wanted_now(&mut subscriber, false), None);
        assert_eq!(Subscriber::<Node>::wanted(&mut subscriber, true).await, Wanted::Comparison(number));
    }
}
