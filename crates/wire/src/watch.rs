//! Watches of Services, EndpointSlices and, if its name is known, this Node, as one stream of events.
//!
//! Lists come from the server's cache, and are never a quorum read from etcd. Objects are decoded and published one by
//! one, so the memory that a list takes is bounded by its longest object.
//!
//! The agent can do without the Node. If the server forbids to read it, or has no Nodes, an empty list is published
//! instead. If the server cannot be reached, the agent waits, as for the other resources.

use cproxy_core::{
    Event,
    api::{EndpointSlice, Node, Service},
};
use tokio::sync::{Notify, mpsc};

use super::{
    last_contact::LastContact,
    resources::StoredResource,
    selectors::{FieldSelector, Selectors},
    source::{Requester, Subscriber},
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
    let subscriber = || StoreSubscriber { last_contact: &last_contact, events: &events, list_done: &list_done };
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
}

impl<K: StoredResource> Subscriber<K> for StoreSubscriber<'_> {
    const SPREADS_LISTS: bool = true;
    const LISTS_AFTER_FAILURE: bool = false;

    fn see_view(&mut self, token: Option<&str>) {
        self.last_contact.see_view(K::RESOURCE, token);
    }

    async fn publish(&mut self, event: WatchEvent<K>) {
        if event.is_confirmation() {
            self.last_contact.record(K::RESOURCE);
        }
        if matches!(event, WatchEvent::ListDone(_)) {
            self.list_done.notify_one();
        }
        let events = event.into_events();
        if !events.is_empty() {
            self.events.send(events).await.ok();
        }
    }
}
