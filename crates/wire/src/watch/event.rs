//! Progress of a list or watch, as its subscriber gets it.

use std::sync::Arc;

use tokio::time::Instant;

use crate::{codec::decode::Decoded, watch::view_token::ViewToken};

/// Progress of a list or watch.
#[derive(Debug)]
pub enum WatchEvent<K> {
    /// The server has accepted a request.
    Accepted(ResponseOrigin),
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
    /// The comparison with this number is complete.
    Compared(u64),
    /// The resource is not available. An empty list replaces it.
    Unavailable,
    /// A request or response has failed, or an optional resource has no object, with this message. A pause may follow.
    Failed(String),
}

/// Origin of a list or watch.
#[derive(Clone, Debug)]
pub struct ResponseOrigin {
    /// Server, with the address that was reached.
    pub(crate) server: Arc<str>,
    /// View that it shows.
    pub(crate) view: ViewToken,
    /// Time of the request.
    pub(crate) requested: Instant,
}

impl<K> WatchEvent<K> {
    /// True if the server has confirmed the known state: by a change, a bookmark or the end of a list.
    #[must_use]
    pub fn is_confirmation(&self) -> bool {
        matches!(self, Self::ListDone(_) | Self::Applied(_) | Self::Deleted(_) | Self::Bookmark(_))
    }
}
