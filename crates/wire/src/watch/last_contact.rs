//! Time since the last contact with the API server, the view that it shows, and comparisons with it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cproxy_core::{ResourceKind, printable, shortened};
use tokio::{sync::watch, time::Instant};

/// Last contact with the API server for each kind: the last time that it confirmed the known state, by a change, a
/// bookmark or the end of a list. A refusal does not count. Bookmarks come every minute, so after a longer silence the
/// known state may be stale.
#[derive(Clone, Debug, Default)]
pub struct LastContact {
    contacts: Arc<Mutex<Contacts>>,
    /// Number of comparisons with the API server's objects that were asked for.
    comparisons: watch::Sender<u64>,
    /// Changes when lists are wanted; true: at once, in place of lists that are under way.
    lists: watch::Sender<bool>,
    /// Notified at each contact.
    contacted: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Contacts {
    last: BTreeMap<ResourceKind, Instant>,
    /// Token of the view for kinds of which a part is shown.
    views: BTreeMap<ResourceKind, String>,
    /// Last failure of kinds of which no request was accepted since.
    failures: BTreeMap<ResourceKind, String>,
}

impl LastContact {
    fn lock(&self) -> MutexGuard<'_, Contacts> {
        self.contacts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the objects of each kind compared with the API server's, by a new watch that shows the last known version
    /// again, or else by a list. A second or more later follows [`Event::Compared`](cproxy_core::Event::Compared) with
    /// the number that this returns.
    pub fn compare(&self) -> u64 {
        self.comparisons.send_modify(|number| *number += 1);
        *self.comparisons.borrow()
    }

    /// Receiver that changes with each call of [`Self::compare`] from now on.
    pub(crate) fn comparisons(&self) -> watch::Receiver<u64> {
        self.comparisons.subscribe()
    }

    /// Has Services and EndpointSlices listed anew, `at_once` also if a list is under way.
    pub fn list_anew(&self, at_once: bool) {
        self.lists.send_replace(at_once);
    }

    /// Receiver that changes with each call of [`Self::list_anew`] from now on.
    pub(crate) fn lists(&self) -> watch::Receiver<bool> {
        self.lists.subscribe()
    }

    /// Records a contact for this kind.
    pub(crate) fn record(&self, kind: ResourceKind) {
        self.lock().last.insert(kind, Instant::now());
        self.contacted.send_replace(());
    }

    /// Records a failure of this kind's list or watch, until the server accepts a request again.
    pub(crate) fn record_failure(&self, kind: ResourceKind, message: &str) {
        self.lock().failures.insert(kind, shortened(printable(message)));
    }

    /// Last failure of a kind of which no request was accepted since.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.lock().failures.values().next().cloned()
    }

    /// Receiver that changes with each contact from now on.
    #[must_use]
    pub fn contacts(&self) -> watch::Receiver<()> {
        self.contacted.subscribe()
    }

    /// Records the view that the server shows of this kind; `None`: everything. The server has accepted a request.
    pub(crate) fn see_view(&self, kind: ResourceKind, token: Option<&str>) {
        let mut contacts = self.lock();
        contacts.failures.remove(&kind);
        match token {
            Some(token) => drop(contacts.views.insert(kind, shortened(printable(token)))),
            None => drop(contacts.views.remove(&kind)),
        }
    }

    /// Tokens of the views that the server shows, or `all`.
    #[must_use]
    pub fn view(&self) -> String {
        let contacts = self.lock();
        let mut tokens: Vec<&str> = Vec::new();
        for token in contacts.views.values() {
            if !tokens.contains(&token.as_str()) {
                tokens.push(token);
            }
        }
        if tokens.is_empty() { "all".to_owned() } else { tokens.join(", ") }
    }

    /// Seconds since the last contact for the kind that has been silent longest; `None` before the first contact.
    #[must_use]
    pub fn silent_seconds(&self) -> Option<u64> {
        self.lock().last.values().min().map(|first| first.elapsed().as_secs())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_kind_that_has_been_silent_longest_counts() {
        let contact = LastContact::default();
        assert_eq!(contact.silent_seconds(), None);
        contact.record(ResourceKind::Services);
        tokio::time::sleep(Duration::from_secs(30)).await;
        contact.record(ResourceKind::EndpointSlices);
        assert_eq!(contact.silent_seconds(), Some(30));
        contact.record(ResourceKind::Services);
        assert_eq!(contact.silent_seconds(), Some(0));
    }

    #[test]
    fn a_failure_lasts_until_a_request_of_its_kind_is_accepted() {
        let contact = LastContact::default();
        contact.record_failure(ResourceKind::Services, "no\nroute");
        contact.see_view(ResourceKind::EndpointSlices, None);
        assert_eq!(contact.failure().as_deref(), Some("no\u{fffd}route"));
        contact.see_view(ResourceKind::Services, None);
        assert_eq!(contact.failure(), None);
    }

    #[test]
    fn a_view_that_all_kinds_share_is_shown_once() {
        let contact = LastContact::default();
        assert_eq!(contact.view(), "all");
        for kind in [ResourceKind::Services, ResourceKind::EndpointSlices] {
            contact.see_view(kind, Some("b"));
        }
        assert_eq!(contact.view(), "b");
        contact.see_view(ResourceKind::Services, Some("a\n"));
        assert_eq!(contact.view(), "a\u{fffd}, b");
        contact.see_view(ResourceKind::EndpointSlices, None);
        contact.see_view(ResourceKind::Services, None);
        assert_eq!(contact.view(), "all");
    }
}
