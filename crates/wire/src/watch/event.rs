//! Progress of a list or watch, and the store's events for it.

use cproxy_core::{Event, object_name};

use crate::codec::{decode::Decoded, resource::StoredResource};

/// Progress of a list or watch.
#[derive(Debug)]
pub enum WatchEvent<K> {
    /// A list begins.
    ListStarted,
    /// Object of a list.
    Listed(Decoded<K>),
    /// The list is complete, at this version.
    ListDone(String),
    /// Object that was added or changed.
    Applied(Decoded<K>),
    /// Object that was deleted.
    Deleted(Decoded<K>),
    /// All changes up to this version have been sent.
    Bookmark(String),
    /// The resource is not available. An empty list replaces it.
    Unavailable,
}

impl<K> WatchEvent<K> {
    /// True if the server has confirmed the known state: by a change, a bookmark or the end of a list.
    #[must_use]
    pub fn is_confirmation(&self) -> bool {
        matches!(self, Self::ListDone(_) | Self::Applied(_) | Self::Deleted(_) | Self::Bookmark(_))
    }
}

impl<K> WatchEvent<K> {
    /// True if the server has sent all changes until now: by a bookmark or the end of a list.
    pub(crate) fn is_comparison(&self) -> bool {
        matches!(self, Self::ListDone(_) | Self::Bookmark(_))
    }
}

impl<K: StoredResource> WatchEvent<K> {
    /// Version of a confirmation.
    pub(crate) fn version(&self) -> Option<&str> {
        match self {
            Self::ListDone(version) | Self::Bookmark(version) => Some(version),
            Self::Applied(object) | Self::Deleted(object) => Some(&object.meta().resource_version),
            Self::ListStarted | Self::Listed(_) | Self::Unavailable => None,
        }
    }

    /// Events for the store.
    pub(crate) fn into_events(self) -> Vec<Event> {
        match self {
            Self::ListStarted => vec![Event::ListStarted(K::RESOURCE)],
            Self::ListDone(_) => vec![Event::ListDone(K::RESOURCE)],
            Self::Listed(Decoded::Object(object)) | Self::Applied(Decoded::Object(object)) => vec![K::applied(object)],
            Self::Listed(Decoded::Unreadable(metadata, message))
            | Self::Applied(Decoded::Unreadable(metadata, message)) => {
                vec![Event::Unreadable { kind: K::RESOURCE, name: object_name(&metadata), message }]
            }
            Self::Deleted(object) => {
                object_name(object.meta()).map(|name| Event::Deleted(K::RESOURCE, name)).into_iter().collect()
            }
            Self::Bookmark(_) => Vec::new(),
            Self::Unavailable => vec![Event::ListStarted(K::RESOURCE), Event::ListDone(K::RESOURCE)],
        }
    }
}
