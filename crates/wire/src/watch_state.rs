//! State machine of one resource's list and watch.
//!
//! [`WatchState::step`] decides everything and does no I/O: it reads the clock, for growing pauses, and random bytes,
//! for jitter. The loop that carries out its decisions is in `follow.rs`.

use std::time::Duration;

use cproxy_core::{Event, object_name};
use http::Uri;

use super::{
    backoff::{Backoff, jitter},
    decode::Decoded,
    failure::{Cause, Failure, Operation, Remedy, RetryFrom},
    message::{ListMetadata, Message},
    resources::WatchedResource,
    selectors::Selectors,
};

/// The server ends each watch after this time; until then it sends bookmarks.
const WATCH_SECONDS: &str = "290";
const WATCH_SILENCE_MAX: Duration = Duration::from_secs(310);
/// In the middle of a list, a server that is alive hardly pauses.
const LIST_SILENCE_MAX: Duration = Duration::from_secs(60);

/// Objects per page, for servers that send lists by pages. Pages do not bound memory here, and each costs a request.
const PAGE_ITEMS: &str = "500";

/// After an error; client-go's.
const RETRY_PAUSE: Duration = Duration::from_millis(800);
/// After a watch that was too old: no error by itself, but it may repeat itself.
const EXPIRED_PAUSE: Duration = Duration::from_millis(250);

/// First pause after a refusal of a resource that the agent can do without; it doubles.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);
const REFUSED_PAUSE_MAX: Duration = Duration::from_secs(300);
const REFUSED_JITTER_MAX: Duration = Duration::from_millis(500);

/// Keeps agents with the same Retry-After from coming back together.
const RETRY_AFTER_JITTER_MAX: Duration = Duration::from_secs(1);

/// Phase of a list and watch.
///
/// A feature that the server lacks is left out until a list is complete and has been watched. The next list asks for
/// all features again, as client-go does.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum WatchState {
    /// The list is not complete.
    Listing {
        mode: ListMode,
        /// The optional field selector is sent.
        is_narrowed: bool,
        /// The list has an object so far.
        has_objects: bool,
    },
    /// The list is complete; changes follow.
    Watching {
        /// Version of the last change or bookmark, from which the watch can be resumed.
        version: String,
        /// The optional field selector is sent.
        is_narrowed: bool,
    },
}

/// Source of a list.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ListMode {
    /// The events with which a watch begins.
    Streamed,
    /// The server's cache, which may send pages.
    Cached {
        /// Continue token of the next page; `None` for the first page.
        page: Option<String>,
    },
}

/// Input of a step.
pub(super) enum Input<K> {
    /// The server has accepted the request.
    Accepted,
    /// Object or bookmark in the response.
    Received(Message<K>),
    /// Regular end of the response. A watch has no list metadata.
    Ended(ListMetadata),
    /// The request or its response has failed.
    Failed(Cause),
}

/// Output of a step, to be carried out in the order of the fields.
#[derive(Debug)]
pub(super) struct Output<K> {
    pub(super) log: Option<Log>,
    pub(super) event: Option<WatchEvent<K>>,
    pub(super) next: Next,
}

/// Move that follows a step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Read on in the response.
    Read,
    /// Send the request of the new state.
    Request,
    /// The same after a pause.
    RequestAfter(Pause),
}

/// Time without requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pause {
    pub(super) duration: Duration,
    /// The server may become reachable as soon as the VM has its network.
    pub(super) ends_on_network_change: bool,
}

/// Log message with its level.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Log {
    Debug(String),
    Info(String),
    Warn(String),
}

/// Progress of a list or watch.
#[derive(Debug)]
pub(super) enum WatchEvent<K> {
    /// A list begins.
    ListStarted,
    /// Object of a list.
    Listed(Decoded<K>),
    /// Object that was deleted while the list was under way.
    Unlisted(Decoded<K>),
    /// The list is complete.
    ListDone,
    /// Object that was added or changed.
    Applied(Decoded<K>),
    /// Object that was deleted.
    Deleted(Decoded<K>),
    /// No other changes until now.
    Bookmark,
    /// The resource is not available: an empty list stands for it.
    Unavailable,
}

/// Request of a state.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) operation: Operation,
    /// Path and query.
    pub(super) target: String,
    /// Longest silence until the response begins, and until its first object.
    pub(super) silence_max: Duration,
}

/// Objects that a watch follows.
#[derive(Clone, Copy)]
pub(super) struct Collection<'a> {
    /// Address of the API server, for messages.
    pub(super) url: &'a Uri,
    pub(super) selectors: Selectors<'a>,
}

/// Facts that outlive a phase.
pub(super) struct History {
    /// A list was published, be it an empty one for a resource that is not available.
    has_list: bool,
    /// Objects of the resource are known.
    has_objects: bool,
    /// Version from which a watch ended with an error event or unreadable data.
    bad_version: Option<String>,
    retry: Backoff,
    expired: Backoff,
    refused_pause: Duration,
    /// Last warning about a resource that the agent can do without.
    warning: Option<String>,
}

impl WatchState {
    /// Start of a list with all features.
    pub(super) fn new() -> Self {
        Self::Listing { mode: ListMode::Streamed, is_narrowed: true, has_objects: false }
    }

    pub(super) fn operation(&self) -> Operation {
        match self {
            Self::Listing { mode: ListMode::Streamed, .. } => Operation::StreamedList,
            Self::Listing { mode: ListMode::Cached { .. }, .. } => Operation::CachedList,
            Self::Watching { .. } => Operation::Watch,
        }
    }

    /// Longest silence of a server that is alive.
    pub(super) fn silence_max(&self) -> Duration {
        match self {
            Self::Listing { .. } => LIST_SILENCE_MAX,
            Self::Watching { .. } => WATCH_SILENCE_MAX,
        }
    }

    /// The request that this state calls for. None is a quorum read: a list without a version comes from the cache.
    pub(super) fn request<K: WatchedResource>(&self, selectors: Selectors<'_>) -> Request {
        let watch = [("watch", "true"), ("timeoutSeconds", WATCH_SECONDS), ("allowWatchBookmarks", "true")];
        let stream = [("sendInitialEvents", "true"), ("resourceVersionMatch", "NotOlderThan")];
        let parameters = match self {
            Self::Listing { mode: ListMode::Streamed, .. } => {
                [&watch[..], &stream, &[("resourceVersion", "0")]].concat()
            }
            Self::Listing { mode: ListMode::Cached { page: None }, .. } => {
                vec![("limit", PAGE_ITEMS), ("resourceVersion", "0")]
            }
            Self::Listing { mode: ListMode::Cached { page: Some(page) }, .. } => {
                vec![("limit", PAGE_ITEMS), ("continue", page)]
            }
            Self::Watching { version, .. } => [&watch[..], &[("resourceVersion", version)]].concat(),
        };
        Request {
            operation: self.operation(),
            target: self.narrow(selectors).target::<K>(&parameters),
            silence_max: self.silence_max(),
        }
    }

    /// Next state, with what is to be published, logged and done.
    pub(super) fn step<K: WatchedResource>(
        mut self,
        input: Input<K>,
        collection: Collection<'_>,
        history: &mut History,
    ) -> (Self, Output<K>) {
        let output = match self.advance(input, history) {
            Ok((event, next)) => Output { log: history.missing::<K>(&event, collection), event, next },
            Err(cause) => self.recover(cause, collection, history),
        };
        (self, output)
    }

    /// Follows a response. A failure leaves the state as it is.
    fn advance<K: WatchedResource>(
        &mut self,
        input: Input<K>,
        history: &mut History,
    ) -> Result<(Option<WatchEvent<K>>, Next), Cause> {
        let event = match (&mut *self, input) {
            (_, Input::Failed(cause)) => return Err(cause),

            (Self::Listing { mode: ListMode::Cached { page: Some(_) }, .. }, Input::Accepted) => {
                return Ok((None, Next::Read));
            }
            (Self::Listing { has_objects, .. }, Input::Accepted) => {
                *has_objects = false;
                WatchEvent::ListStarted
            }
            (Self::Listing { has_objects, .. }, Input::Received(Message::Applied(object))) => {
                *has_objects = true;
                WatchEvent::Listed(object)
            }
            (Self::Listing { has_objects, .. }, Input::Received(Message::Deleted(object))) => {
                // It only matters for the Node, of which there is one.
                *has_objects = false;
                WatchEvent::Unlisted(object)
            }
            (Self::Listing { .. }, Input::Received(Message::Bookmark { ends_list: false, .. })) => {
                return Err(Cause::NotStreamed);
            }
            (Self::Listing { .. }, Input::Received(Message::Bookmark { version, .. })) => {
                return self.complete_list(version, history).map(|event| (Some(event), Next::Read));
            }
            (Self::Listing { mode: ListMode::Streamed, .. }, Input::Ended(_)) => return Err(Cause::Incomplete),
            (Self::Listing { mode: ListMode::Cached { page }, .. }, Input::Ended(metadata)) => {
                if let Some(next) = metadata.next.filter(|next| !next.is_empty()) {
                    *page = Some(next);
                    return Ok((None, Next::Request));
                }
                return self
                    .complete_list(metadata.resource_version, history)
                    .map(|event| (Some(event), Next::Request));
            }

            (Self::Watching { .. }, Input::Accepted) => return Ok((None, Next::Read)),
            (Self::Watching { version, .. }, Input::Received(Message::Applied(object))) => {
                *version = present(object.meta().resource_version.clone())?;
                history.changed(true);
                WatchEvent::Applied(object)
            }
            (Self::Watching { version, .. }, Input::Received(Message::Deleted(object))) => {
                *version = present(object.meta().resource_version.clone())?;
                history.changed(false);
                WatchEvent::Deleted(object)
            }
            (Self::Watching { version, .. }, Input::Received(Message::Bookmark { version: now, .. })) => {
                *version = present(now)?;
                WatchEvent::Bookmark
            }
            (Self::Watching { .. }, Input::Ended(_)) => return Ok((None, Next::Request)),
        };
        Ok((Some(event), Next::Read))
    }

    fn complete_list<K>(&mut self, version: Option<String>, history: &mut History) -> Result<WatchEvent<K>, Cause> {
        let version = present(version)?;
        if let Self::Listing { mode, is_narrowed, has_objects } = self {
            history.listed(*has_objects, *mode == ListMode::Streamed);
            *self = Self::Watching { version, is_narrowed: *is_narrowed };
        }
        Ok(WatchEvent::ListDone)
    }

    /// Handles a failure: chooses the next request and the pause before it.
    fn recover<K: WatchedResource>(
        &mut self,
        cause: Cause,
        collection: Collection<'_>,
        history: &mut History,
    ) -> Output<K> {
        let failure = Failure { operation: self.operation(), cause };
        let message = failure.describe::<K>(collection.url);
        let selectors = self.narrow(collection.selectors);
        if let Self::Listing { mode: ListMode::Cached { page }, .. } = self {
            *page = None;
        }
        let (mut event, resource) = (None, K::PLURAL);
        let (log, next) = match failure.remedy(selectors.has_optional_fields(), K::LOST_WITHOUT.is_some()) {
            Remedy::Resume => (None, Next::Request),
            Remedy::DropFieldSelector => {
                self.widen();
                let fields = selectors.fields.text();
                let message =
                    format!("{message}: asking without fieldSelector {fields}, as Kubernetes before 1.31 wants it");
                (Some(Log::Info(message)), Next::Request)
            }
            Remedy::ListFromCache => {
                self.list_from_cache();
                let log = if failure.is_of_streaming() {
                    Log::Info(format!("the API server does not stream lists of {resource}: listing from its cache"))
                } else {
                    Log::Warn(format!("{message}; trying again with a list from its cache"))
                };
                (Some(log), Next::Request)
            }
            Remedy::Relist => {
                *self = Self::new();
                let message = format!("the watch of {resource} is too old to be resumed: listing anew");
                (Some(Log::Info(message)), Next::after(history.expired.next()))
            }
            Remedy::DoWithout => {
                event = history.stand_in().then_some(WatchEvent::Unavailable);
                let lost = K::LOST_WITHOUT.unwrap_or_default();
                let meanwhile = if history.has_objects { "what is known of them stays" } else { lost };
                (Some(history.warn(format!("{message}; until then {meanwhile}"))), Next::after(history.refused()))
            }
            Remedy::Retry(from) => {
                let is_relist = self.restart(from, history);
                let pause = Pause {
                    duration: history.retry.next().max(retry_after(&failure)),
                    ends_on_network_change: failure.is_of_connection(),
                };
                let what = if is_relist { "listing anew" } else { "trying again" };
                (Some(Log::Warn(format!("{message}; {what}"))), Next::RequestAfter(pause))
            }
        };
        Output { log, event, next }
    }

    /// The selectors of the request.
    fn narrow<'a>(&self, selectors: Selectors<'a>) -> Selectors<'a> {
        let (Self::Listing { is_narrowed, .. } | Self::Watching { is_narrowed, .. }) = self;
        if *is_narrowed { selectors } else { selectors.without_optional_fields() }
    }

    fn widen(&mut self) {
        let (Self::Listing { is_narrowed, .. } | Self::Watching { is_narrowed, .. }) = self;
        *is_narrowed = false;
    }

    fn list_from_cache(&mut self) {
        if let Self::Listing { mode, .. } = self {
            *mode = ListMode::Cached { page: None };
        }
    }

    /// Goes back to where a retry begins. True if that is a list instead of a watch.
    fn restart(&mut self, from: RetryFrom, history: &mut History) -> bool {
        let Self::Watching { version, .. } = self else { return false };
        let is_relist = match from {
            RetryFrom::Here => false,
            RetryFrom::HereOnce => history.is_bad_again(version),
            RetryFrom::List => true,
        };
        if is_relist {
            *self = Self::new();
        }
        is_relist
    }
}

impl History {
    pub(super) fn new() -> Self {
        Self {
            has_list: false,
            has_objects: false,
            bad_version: None,
            retry: Backoff::new(RETRY_PAUSE),
            expired: Backoff::new(EXPIRED_PAUSE),
            refused_pause: REFUSED_PAUSE,
            warning: None,
        }
    }

    /// Records a complete list. After a list that was not streamed, the watch may still be refused.
    fn listed(&mut self, has_objects: bool, is_streamed: bool) {
        (self.has_list, self.has_objects) = (true, has_objects);
        if is_streamed {
            self.settle();
        }
    }

    /// Records a change that a watch has reported.
    fn changed(&mut self, has_objects: bool) {
        self.has_objects = has_objects;
        self.settle();
    }

    /// Ends a series of refusals: the server serves watches of the resource.
    fn settle(&mut self) {
        self.refused_pause = REFUSED_PAUSE;
        if self.has_objects {
            self.warning = None;
        }
    }

    /// Records a watch that ended with an error event or unreadable data. True if the last one began at the same
    /// version.
    fn is_bad_again(&mut self, version: &str) -> bool {
        let is_again = self.bad_version.as_deref() == Some(version);
        self.bad_version = Some(version.to_owned());
        is_again
    }

    /// The pause before a refused resource is requested again.
    fn refused(&mut self) -> Duration {
        let pause = self.refused_pause + jitter(REFUSED_JITTER_MAX);
        self.refused_pause = (self.refused_pause * 2).min(REFUSED_PAUSE_MAX);
        pause
    }

    /// Lets an empty list stand for a resource that is not available. True unless there was a list before.
    fn stand_in(&mut self) -> bool {
        !std::mem::replace(&mut self.has_list, true)
    }

    /// A warning, or a debug message if it is the last warning again.
    fn warn(&mut self, message: String) -> Log {
        if self.warning.as_ref() == Some(&message) {
            return Log::Debug(format!("still {message}"));
        }
        self.warning = Some(message.clone());
        Log::Warn(message)
    }

    /// Warning about a complete list without an object that the agent could use.
    fn missing<K: WatchedResource>(
        &mut self,
        event: &Option<WatchEvent<K>>,
        collection: Collection<'_>,
    ) -> Option<Log> {
        let lost = K::LOST_WITHOUT?;
        if self.has_objects || !matches!(event, Some(WatchEvent::ListDone)) {
            return None;
        }
        let fields = collection.selectors.fields.text();
        Some(self.warn(format!("there is no {} with {fields}: until there is, {lost}", K::KIND)))
    }
}

impl Next {
    fn after(duration: Duration) -> Self {
        Self::RequestAfter(Pause { duration, ends_on_network_change: false })
    }
}

impl<K: WatchedResource> WatchEvent<K> {
    /// The server has confirmed the present state: an event, a bookmark, the end of a list.
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
            Self::Unlisted(object) | Self::Deleted(object) => {
                object_name(object.meta()).map(|name| Event::Deleted(K::RESOURCE, name)).into_iter().collect()
            }
            Self::Bookmark => Vec::new(),
            Self::Unavailable => vec![Event::ListStarted(K::RESOURCE), Event::ListDone(K::RESOURCE)],
        }
    }
}

/// A version; one that is empty counts as missing.
fn present(version: Option<String>) -> Result<String, Cause> {
    version.filter(|version| !version.is_empty()).ok_or(Cause::NoVersion)
}

/// The pause that the server asks for, with jitter.
fn retry_after(failure: &Failure) -> Duration {
    let pause = failure.retry_after();
    if pause.is_zero() { pause } else { pause + jitter(RETRY_AFTER_JITTER_MAX) }
}

#[cfg(test)]
mod tests {
    use cproxy_core::api::{Metadata, Node, Service};
    use kube::core::Status;

    use super::*;
    use crate::selectors::Fields;

    /// State and history of one resource.
    struct Machine {
        url: Uri,
        state: Option<WatchState>,
        history: History,
    }

    impl Machine {
        fn new() -> Self {
            Self { url: Uri::from_static("https://api:6443"), state: Some(WatchState::new()), history: History::new() }
        }

        fn watching(version: &str, is_narrowed: bool) -> Self {
            let state = WatchState::Watching { version: version.to_owned(), is_narrowed };
            Self { state: Some(state), ..Self::new() }
        }

        fn step<K: WatchedResource>(&mut self, input: Input<K>) -> Output<K> {
            let selectors = Selectors { labels: "", fields: Fields::Optional("a=b") };
            let collection = Collection { url: &self.url, selectors };
            let (state, output) = self.state.take().unwrap().step(input, collection, &mut self.history);
            self.state = Some(state);
            output
        }

        fn state(&self) -> &WatchState {
            self.state.as_ref().unwrap()
        }

        fn fail(&mut self, cause: Cause) -> Output<Service> {
            self.step(Input::Failed(cause))
        }
    }

    fn object<K: Default>() -> Decoded<K> {
        Decoded::Object(Box::default())
    }

    /// An object of this version that cannot be decoded: its metadata can be set for every resource.
    fn versioned<K>(version: &str) -> Decoded<K> {
        let metadata = Metadata { resource_version: Some(version.to_owned()), ..Metadata::default() };
        Decoded::Unreadable(Box::new(metadata), "wrong".to_owned())
    }

    fn bookmark<K>(version: &str, ends_list: bool) -> Input<K> {
        Input::Received(Message::Bookmark { version: Some(version.to_owned()), ends_list })
    }

    fn page<K>(version: &str, next: &str) -> Input<K> {
        Input::Ended(ListMetadata { resource_version: Some(version.to_owned()), next: Some(next.to_owned()) })
    }

    fn status(code: u16) -> Box<Status> {
        Box::new(Status::failure("m", "r").with_code(code))
    }

    fn unreadable() -> Cause {
        Cause::Unreadable(serde_json::from_str::<u8>("x").unwrap_err(), None)
    }

    fn streamed() -> WatchState {
        WatchState::new()
    }

    fn cached(page: Option<&str>, is_narrowed: bool, has_objects: bool) -> WatchState {
        WatchState::Listing { mode: ListMode::Cached { page: page.map(str::to_owned) }, is_narrowed, has_objects }
    }

    fn watching(version: &str) -> WatchState {
        WatchState::Watching { version: version.to_owned(), is_narrowed: true }
    }

    #[test]
    fn a_streamed_list_becomes_a_watch_in_the_same_response() {
        let mut machine = Machine::new();
        let output = machine.step::<Service>(Input::Accepted);
        assert!(matches!(output, Output { log: None, event: Some(WatchEvent::ListStarted), next: Next::Read }));
        let output = machine.step::<Service>(Input::Received(Message::Applied(object())));
        assert!(matches!(output, Output { log: None, event: Some(WatchEvent::Listed(_)), next: Next::Read }));
        let output = machine.step::<Service>(Input::Received(Message::Deleted(object())));
        assert!(matches!(output.event, Some(WatchEvent::Unlisted(_))));
        let output = machine.step::<Service>(bookmark("7", true));
        assert!(matches!(output, Output { log: None, event: Some(WatchEvent::ListDone), next: Next::Read }));
        assert_eq!(*machine.state(), watching("7"));
        let output = machine.step::<Service>(Input::Received(Message::Applied(versioned("8"))));
        assert!(matches!(output, Output { event: Some(WatchEvent::Applied(_)), next: Next::Read, .. }));
        assert_eq!(*machine.state(), watching("8"));
        let output = machine.step::<Service>(Input::Received(Message::Deleted(versioned("9"))));
        assert!(matches!(output, Output { event: Some(WatchEvent::Deleted(_)), next: Next::Read, .. }));
        let output = machine.step::<Service>(bookmark("12", false));
        assert!(matches!(output, Output { event: Some(WatchEvent::Bookmark), next: Next::Read, .. }));
        let output = machine.step::<Service>(Input::Ended(ListMetadata::default()));
        assert!(matches!(output, Output { log: None, event: None, next: Next::Request }), "a watch ends regularly");
        assert_eq!(*machine.state(), watching("12"));
    }

    #[test]
    fn a_cached_list_is_read_page_by_page_and_begins_once() {
        let mut machine = Machine { state: Some(cached(None, true, false)), ..Machine::new() };
        let output = machine.step::<Service>(Input::Accepted);
        assert!(matches!(output, Output { event: Some(WatchEvent::ListStarted), next: Next::Read, .. }));
        machine.step::<Service>(Input::Received(Message::Applied(object())));
        let output = machine.step::<Service>(page("7", "c"));
        assert!(matches!(output, Output { log: None, event: None, next: Next::Request }));
        assert_eq!(*machine.state(), cached(Some("c"), true, true));
        let output = machine.step::<Service>(Input::Accepted);
        assert!(
            matches!(output, Output { log: None, event: None, next: Next::Read }),
            "the second page starts no list"
        );
        let output = machine.step::<Service>(page("8", ""));
        assert!(matches!(output, Output { event: Some(WatchEvent::ListDone), next: Next::Request, .. }));
        assert_eq!(*machine.state(), watching("8"));
        assert!(machine.history.has_objects);
    }

    #[tokio::test(start_paused = true)]
    async fn a_page_that_fails_is_followed_by_the_first_page() {
        let mut machine = Machine { state: Some(cached(Some("c"), true, true)), ..Machine::new() };
        let output = machine.fail(Cause::Cut);
        assert!(matches!(output, Output { log: Some(Log::Warn(_)), event: None, next: Next::RequestAfter(_) }));
        assert_eq!(*machine.state(), cached(None, true, true));
        let output = machine.step::<Service>(Input::Accepted);
        assert!(matches!(output.event, Some(WatchEvent::ListStarted)));
        assert_eq!(*machine.state(), cached(None, true, false), "the list has no objects yet");
    }

    #[tokio::test(start_paused = true)]
    async fn a_missing_version_leaves_the_state_and_publishes_nothing() {
        for input in [
            Input::Received(Message::Applied(object())),
            Input::Received(Message::Deleted(versioned(""))),
            bookmark("", false),
        ] {
            let mut machine = Machine::watching("7", true);
            let Output { log: Some(Log::Warn(message)), event: None, next: Next::RequestAfter(_) } =
                machine.step::<Service>(input)
            else {
                panic!("no failure")
            };
            assert_eq!(message, "the API server sent services without resourceVersion; listing anew");
            assert_eq!(*machine.state(), streamed());
        }
        let mut machine = Machine { state: Some(cached(None, false, true)), ..Machine::new() };
        let Output { log: Some(Log::Warn(message)), event: None, .. } = machine.step::<Service>(page("", "")) else {
            panic!("no failure")
        };
        assert_eq!(message, "the API server sent services without resourceVersion; trying again");
        assert_eq!(*machine.state(), cached(None, false, true));
    }

    #[test]
    fn a_stream_that_is_none_is_followed_by_a_list_from_the_cache() {
        for (input, level) in [
            (bookmark("7", false), "info"),
            (bookmark("", true), "warn"),
            (Input::Ended(ListMetadata::default()), "warn"),
            (Input::Failed(Cause::Refused(status(422))), "info"),
            (Input::Failed(Cause::Silent(LIST_SILENCE_MAX)), "info"),
            (Input::Failed(Cause::ErrorEvent(status(500))), "warn"),
        ] {
            let mut machine = Machine::new();
            let Output { log: Some(log), event: None, next: Next::Request } = machine.step::<Service>(input) else {
                panic!("no request at once")
            };
            match log {
                Log::Info(message) => {
                    assert_eq!(message, "the API server does not stream lists of services: listing from its cache");
                    assert_eq!(level, "info");
                }
                Log::Warn(message) => {
                    assert!(message.ends_with("; trying again with a list from its cache"), "{message}");
                    assert_eq!(level, "warn");
                }
                Log::Debug(message) => panic!("{message}"),
            }
            assert_eq!(*machine.state(), cached(None, true, false));
        }
    }

    #[test]
    fn an_invalid_request_is_repeated_without_the_optional_selector() {
        let mut machine = Machine::watching("7", true);
        let fields = |machine: &Machine| {
            let selectors = Selectors { labels: "", fields: Fields::Optional("a=b") };
            machine.state().request::<Service>(selectors).target.contains("fieldSelector=a%3Db")
        };
        assert!(fields(&machine));
        let output = machine.fail(Cause::Refused(status(400)));
        assert!(matches!(output, Output { log: Some(Log::Info(_)), event: None, next: Next::Request }));
        assert_eq!(*machine.state(), WatchState::Watching { version: "7".to_owned(), is_narrowed: false });
        assert!(!fields(&machine));
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_is_cut_is_resumed_and_one_that_is_too_old_is_listed() {
        let mut machine = Machine::watching("7", false);
        let output = machine.fail(Cause::Cut);
        assert!(matches!(output, Output { log: None, event: None, next: Next::Request }));
        assert_eq!(*machine.state(), WatchState::Watching { version: "7".to_owned(), is_narrowed: false });
        let output = machine.fail(Cause::ErrorEvent(status(410)));
        let Output { log: Some(Log::Info(message)), event: None, next: Next::RequestAfter(pause) } = output else {
            panic!("no pause")
        };
        assert_eq!(message, "the watch of services is too old to be resumed: listing anew");
        assert!(pause.duration < EXPIRED_PAUSE * 2 && !pause.ends_on_network_change);
        assert_eq!(*machine.state(), streamed(), "all features are asked for again");
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_failed_connection_waits_for_the_network() {
        let no_route = || kube::Error::Service("no route".into());
        for (cause, expected) in [
            (Cause::Connection(no_route()), true),
            (Cause::Interrupted(no_route()), true),
            (Cause::Refused(status(503)), false),
        ] {
            let Next::RequestAfter(pause) = Machine::watching("7", true).fail(cause).next else { panic!("no pause") };
            assert_eq!(pause.ends_on_network_change, expected);
            assert!(pause.duration >= RETRY_PAUSE);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_empty_list_stands_once_for_a_refused_resource() {
        let mut machine = Machine::new();
        let refuse = |machine: &mut Machine| machine.step::<Node>(Input::Failed(Cause::Refused(status(403))));
        let first = refuse(&mut machine);
        let Output { log: Some(Log::Warn(message)), event: Some(WatchEvent::Unavailable), .. } = first else {
            panic!("{first:?}")
        };
        assert!(message.contains("; until then zone hints are not followed"), "{message}");
        assert_eq!(*machine.state(), streamed());
        let second = refuse(&mut machine);
        let Output { log: Some(Log::Debug(again)), event: None, next: Next::RequestAfter(pause) } = second else {
            panic!("{second:?}")
        };
        assert_eq!(again, format!("still {message}"));
        assert!((REFUSED_PAUSE * 2..REFUSED_PAUSE * 2 + REFUSED_JITTER_MAX).contains(&pause.duration));
        machine.step::<Node>(Input::Accepted);
        machine.step::<Node>(Input::Received(Message::Applied(object())));
        machine.step::<Node>(bookmark("7", true));
        let Output { log: Some(Log::Warn(message)), event: None, .. } = refuse(&mut machine) else {
            panic!("no new warning")
        };
        assert!(message.ends_with("; until then what is known of them stays"), "{message}");
    }

    #[test]
    fn a_complete_list_without_the_node_is_a_warning() {
        let mut machine = Machine::new();
        machine.step::<Node>(Input::Accepted);
        let Output { log: Some(Log::Warn(message)), event: Some(WatchEvent::ListDone), next: Next::Read } =
            machine.step::<Node>(bookmark("7", true))
        else {
            panic!("no warning")
        };
        assert!(message.starts_with("there is no Node with a=b: until there is, zone hints"), "{message}");
    }

    #[test]
    fn a_warning_is_new_again_after_the_resource_was_there() {
        let mut machine = Machine::new();
        let after = |machine: &mut Machine, input| {
            machine.history.warning = Some("not permitted".to_owned());
            machine.history.refused_pause = REFUSED_PAUSE_MAX;
            machine.step::<Node>(input);
            (machine.history.warning.is_none(), machine.history.refused_pause == REFUSED_PAUSE)
        };
        let applied = |object| Input::Received(Message::Applied(object));
        let deleted = |object| Input::Received(Message::Deleted(object));
        assert_eq!(after(&mut machine, Input::Accepted), (false, false));
        machine.step::<Node>(bookmark("7", true));
        assert_eq!(machine.history.refused_pause, REFUSED_PAUSE);
        assert!(machine.history.warning.is_some(), "there is no such Node");
        assert_eq!(after(&mut machine, applied(versioned("8"))), (true, true));
        machine.state = Some(streamed());
        assert_eq!(after(&mut machine, applied(object())), (false, false));
        assert_eq!(after(&mut machine, bookmark("10", true)), (true, true));
        machine.state = Some(streamed());
        assert_eq!(after(&mut machine, applied(object())), (false, false));
        assert_eq!(after(&mut machine, deleted(object())), (false, false));
        assert_eq!(after(&mut machine, bookmark("11", true)), (false, true), "it was deleted while it was listed");
        machine.step::<Node>(applied(versioned("12")));
        assert_eq!(after(&mut machine, deleted(versioned("13"))), (false, true));
        machine.state = Some(cached(None, true, false));
        assert_eq!(after(&mut machine, page("14", "")), (false, false), "the watch may still be refused");
    }

    #[test]
    fn a_list_may_be_silent_for_less_time_than_a_watch() {
        assert_eq!(streamed().silence_max(), LIST_SILENCE_MAX);
        assert_eq!(cached(None, true, true).silence_max(), LIST_SILENCE_MAX);
        assert_eq!(watching("7").silence_max(), WATCH_SILENCE_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn the_second_failure_at_the_same_place_is_listed_anew_with_all_features() {
        let less = |version: &str| WatchState::Watching { version: version.to_owned(), is_narrowed: false };
        let mut machine = Machine::watching("7", false);
        machine.fail(unreadable());
        assert_eq!(*machine.state(), less("7"));
        machine.step::<Service>(bookmark("8", false));
        machine.fail(unreadable());
        assert_eq!(*machine.state(), less("8"), "the watch has made progress");
        machine.fail(Cause::Refused(status(503)));
        assert_eq!(*machine.state(), less("8"));
        machine.fail(unreadable());
        assert_eq!(*machine.state(), streamed());
        machine.step::<Service>(Input::Accepted);
        machine.step::<Service>(bookmark("8", true));
        machine.fail(unreadable());
        assert_eq!(*machine.state(), streamed(), "a list that ends at the same place has not helped");
        machine.state = Some(cached(None, false, true));
        for cause in [unreadable(), unreadable(), Cause::NoVersion, Cause::Silent(LIST_SILENCE_MAX)] {
            machine.fail(cause);
            assert_eq!(*machine.state(), cached(None, false, true), "features return with the next complete list");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn watches_that_are_always_too_old_are_listed_ever_more_seldom() {
        let mut machine = Machine::new();
        let pauses: Vec<_> = (0..9)
            .map(|_| {
                machine.state = Some(watching("7"));
                let Next::RequestAfter(pause) = machine.fail(Cause::Refused(status(410))).next else {
                    panic!("no pause")
                };
                pause.duration
            })
            .collect();
        assert!(pauses.first().is_some_and(|pause| *pause < EXPIRED_PAUSE * 2), "once is nothing unusual");
        assert!(pauses.last().is_some_and(|pause| *pause >= Duration::from_secs(30)), "{pauses:?}");
    }
}
