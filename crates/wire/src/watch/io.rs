//! Input and output of one step of a watch ([`WatchState::step`](super::state::WatchState::step)).

use std::time::Duration;

use crate::{
    codec::message::{ListMetadata, Message},
    watch::{
        event::{ResponseOrigin, WatchEvent},
        failure::{ApiError, Operation},
        selectors::Selectors,
        subscriber::Wanted,
    },
};

/// Input of a step.
pub(crate) enum Input<K> {
    /// The server has accepted the request.
    Accepted(ResponseOrigin),
    /// Message in the response.
    Received(Message<K>),
    /// Regular end of the response. For a watch, the metadata is empty.
    Ended(ListMetadata),
    /// A watch that was resumed has shown nothing for too long.
    Unconfirmed,
    /// The watch goes on with another request, on a better connection.
    Superseded,
    /// The subscriber wants a response soon.
    Wanted(Wanted),
    /// The request or its response has failed.
    Failed(ApiError),
}

/// Output of a step. The fields are carried out in order.
#[derive(Debug)]
pub(crate) struct Output<K> {
    pub(crate) log: Option<Log>,
    pub(crate) events: Vec<WatchEvent<K>>,
    pub(crate) next: Next,
}

/// Action that leads to the next step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Read on in the response.
    Read,
    /// Send the request of the new state.
    Request,
    /// Send the request of the new state after a pause.
    RequestAfter(Pause),
}

/// Pause before a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pause {
    pub(crate) duration: Duration,
    /// A change of the network ends the pause early, since the server may then be reachable.
    pub(crate) ends_on_network_change: bool,
}

/// Log message with its level.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Log {
    Debug(String),
    Info(String),
    Warn(String),
}

/// Request for a list or watch.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) operation: Operation,
    /// Path and query.
    pub(crate) target: String,
}

/// Objects that a watch follows, and their server.
#[derive(Clone, Copy)]
pub(crate) struct Collection<'a> {
    /// Address of the API server, for messages.
    pub(crate) server: &'a str,
    pub(crate) selectors: Selectors<'a>,
}

impl<K> Output<K> {
    /// The events of a response that is read further.
    pub(crate) fn read(events: Vec<WatchEvent<K>>) -> Self {
        Self { log: None, events, next: Next::Read }
    }

    /// No event, and this action.
    pub(crate) fn next(next: Next) -> Self {
        Self { log: None, events: Vec::new(), next }
    }
}

impl Next {
    /// A request after a pause that nothing ends early.
    pub(crate) fn request_after(duration: Duration) -> Self {
        Self::RequestAfter(Pause { duration, ends_on_network_change: false })
    }
}
