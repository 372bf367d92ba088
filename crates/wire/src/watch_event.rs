//! Progress of a list or watch, and the store's events for it.

use cproxy_core::{Event, object_name};

use super::{decode::Decoded, resources::WatchedResource};

/// Progress of a list or watch.
#[derive(Debug)]
pub(super) enum WatchEvent<K> {
    /// A list begins.
    ListStarted,
    /// Object of a list.
    Listed(Decoded<K>),
    /// The list is complete.
    ListDone,
    /// Object that was added or changed.
    Applied(Decoded<K>),
    /// Object that was deleted.
    Deleted(Decoded<K>),
    /// All changes so far have been sent.
    Bookmark,
    /// The resource is not available. An empty list replaces it.
    Unavailable,
}

impl<K: WatchedResource> WatchEvent<K> {
    /// True if the server has confirmed the known state: by a change, a bookmark or the end of a list.
    pub(super) fn is_confirmation(&self) -> bool {
        matches!(self, Self::ListDone | Self::Applied(_) | Self::Deleted(_) | Self::Bookmark)
    }

    /// Events for the store.
    pub(super) fn into_events(self) -> Vec<Event> {
        match self {
            Self::ListStarted => vec![Event::ListStarted(K::RESOURCE)],
            Self::ListDone => vec![Event::ListDone(K::RESOURCE)],
            Self::Listed(Decoded::Object(object)) | Self::Applied(Decoded::Object(object)) => vec![K::applied(object)],
            Self::Listed(Decoded::Unreadable(metadata, message))
            | Self::Applied(Decoded::Unreadable(metadata, message)) => {
                vec![Event::Unreadable { kind: K::RESOURCE, name: object_name(&metadata), message }]
            }
            Self::Deleted(object) => {
                object_name(object.meta()).map(|name| Event::Deleted(K::RESOURCE, name)).into_iter().collect()
            }
            Self::Bookmark => Vec::new(),
            Self::Unavailable => vec![Event::ListStarted(K::RESOURCE), Event::ListDone(K::RESOURCE)],
        }
    }
}
