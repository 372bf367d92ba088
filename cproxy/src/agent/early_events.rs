//! Objects that arrive while the programs are installed: they wait in the store's lists, which the loop completes.

use std::{pin::pin, slice};

use cproxy_core::{Event, Store};
use tokio::sync::mpsc;

use crate::state::Measures;

/// Events of the source before the table is open.
pub(super) struct EarlyEvents {
    pub(super) store: Store,
    /// Measures for `status_http`, if it serves.
    pub(super) measures: Option<Box<Measures>>,
    /// Events for the loop: the first one that does more than begin or continue a list, and all after it.
    pub(super) rest: Vec<Event>,
}

impl EarlyEvents {
    /// No events so far.
    pub(super) fn new(store: Store, measures: Option<Box<Measures>>) -> Self {
        Self { store, measures, rest: Vec::new() }
    }

    /// Waits for `work`, and receives events meanwhile until one is the loop's.
    pub(super) async fn receive<R>(
        &mut self,
        events: &mut mpsc::Receiver<Vec<Event>>,
        work: impl Future<Output = R>,
    ) -> R {
        let mut work = pin!(work);
        while self.rest.is_empty() {
            tokio::select! {
                biased;
                result = &mut work => return result,
                Some(batch) = events.recv() => batch.into_iter().for_each(|event| self.add(event)),
            }
        }
        work.await
    }

    fn add(&mut self, event: Event) {
        if !self.rest.is_empty() || !self.store.is_of_pending_list(&event) {
            self.rest.push(event);
            return;
        }
        if let Some(measures) = &mut self.measures {
            measures.queue(slice::from_ref(&event));
        }
        for problem in self.store.apply(event) {
            tracing::warn!(name: "problem", "{problem}");
        }
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::{NodeContext, ResourceKind};

    use super::*;

    const SERVICES: ResourceKind = ResourceKind::Services;

    #[tokio::test]
    async fn events_from_the_end_of_a_list_on_are_the_loops() {
        let (sender, mut events) = mpsc::channel(4);
        let object = |name: &str| Event::Unreadable {
            kind: SERVICES,
            name: Some(cproxy_core::ObjectName::new("default", name)),
            message: "no".to_owned(),
        };
        let batch = vec![Event::ListStarted(SERVICES), object("a"), Event::ListDone(SERVICES), object("b")];
        sender.send(batch).await.unwrap();
        sender.send(vec![object("c")]).await.unwrap();
        let mut early = EarlyEvents::new(Store::new(NodeContext::default()), Some(Box::default()));
        assert_eq!(early.receive(&mut events, async { 5 }).await, 5, "what is done already waits for nothing");
        assert!(early.rest.is_empty());
        early.receive(&mut events, tokio::task::yield_now()).await;
        assert!(matches!(&early.rest[..], [Event::ListDone(SERVICES), Event::Unreadable { .. }]), "{:?}", early.rest);
        assert_eq!(early.store.problems().count(), 0, "the list is not complete");
        early.receive(&mut events, tokio::task::yield_now()).await;
        assert!(events.try_recv().is_ok(), "what comes after them stays in the channel");
        early.rest.into_iter().for_each(|event| drop(early.store.apply(event)));
        assert_eq!(early.store.problems().count(), 2);
    }

    #[tokio::test]
    async fn the_end_of_the_source_is_left_to_the_loop() {
        let (sender, mut events) = mpsc::channel(1);
        drop(sender);
        let mut early = EarlyEvents::new(Store::new(NodeContext::default()), None);
        early.receive(&mut events, tokio::task::yield_now()).await;
        assert!(early.rest.is_empty() && events.recv().await.is_none());
    }
}
