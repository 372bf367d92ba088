//! Input and output of one step of a watch ([`WatchState::step`](super::watch_state::WatchState::step)).

use std::time::Duration;

use super::{
    failure::{ApiError, Operation},
    message::{ListMetadata, Message},
    selectors::Selectors,
    view::View,
    watch_event::WatchEvent,
};

/// Input of a step.
pub(super) enum Input<K> {
    /// The server has accepted the request, and shows this view.
    Accepted(View),
    /// Object or bookmark in the response.
    Received(Message<K>),
    /// Regular end of the response. For a watch, the metadata is empty.
    Ended(ListMetadata),
    /// A watch that was resumed has shown nothing for too long.
    Unconfirmed,
    /// The watch goes on with another request, on a better connection or for a bookmark.
    Moved,
    /// The subscriber wants a list.
    ListWanted,
    /// The request or its response has failed.
    Failed(ApiError),
}

/// Output of a step. The fields are carried out in order.
#[derive(Debug)]
pub(super) struct Output<K> {
    pub(super) log: Option<Log>,
    pub(super) event: Option<WatchEvent<K>>,
    pub(super) next: Next,
}

/// Action that leads to the next step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Read on in the response.
    Read,
    /// Send the request of the new state.
    Request,
    /// Send the request of the new state after a pause.
    RequestAfter(Pause),
}

/// Pause before a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pause {
    pub(super) duration: Duration,
    /// A change of the network ends the pause early, since the server may then be reachable.
    pub(super) ends_on_network_change: bool,
}

/// Log message with its level.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Log {
    Debug(String),
    Info(String),
    Warn(String),
}

/// Request for a list or watch.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) operation: Operation,
    /// Path and query.
    pub(super) target: String,
}

/// Objects that a watch follows, and their server.
#[derive(Clone, Copy)]
pub(super) struct Collection<'a> {
    /// Address of the API server, for messages.
    pub(super) server: &'a str,
    pub(super) selectors: Selectors<'a>,
}

impl Next {
    /// A request after a pause that nothing ends early.
    pub(super) fn request_after(duration: Duration) -> Self {
        Self::RequestAfter(Pause { duration, ends_on_network_change: false })
    }
}
