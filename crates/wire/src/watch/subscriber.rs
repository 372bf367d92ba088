//! Subscriber of a resource: takes its events, and says what it wants of the server.

use std::future::pending;

use crate::watch::event::WatchEvent;

/// Receiver of a resource's events.
pub trait Subscriber<K>: Send {
    /// Many clients like this one may list at once.
    const SPREADS_LISTS: bool;
    /// A watch that broke is not resumed: the objects are listed anew. The server's data may come from a backup
    /// meanwhile, with other changes at the same versions, and only a list shows that.
    const LISTS_AFTER_FAILURE: bool;
    /// Watches expire in the ordinary course of things, and what is listed then is little: no pause grows before it.
    const EXPIRES_OFTEN: bool = false;

    /// Takes an event. The response waits meanwhile.
    fn publish(&mut self, event: WatchEvent<K>) -> impl Future<Output = ()> + Send;

    /// Waits until something is wanted of the server soon; while a list is under way, only another list that is wanted
    /// at once. Dropped and called again at will.
    fn wanted(&mut self, _is_watch: bool) -> impl Future<Output = Wanted> + Send {
        pending()
    }
}

/// Response that a subscriber wants soon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// A bookmark.
    Bookmark,
    /// A comparison of the known objects with the server's, with this number. [`WatchEvent::Compared`] ends it.
    Comparison(u64),
    /// A list.
    List,
}
