//! State machine of one resource's list and watch.
//!
//! [`WatchState::step`] makes all decisions and does no I/O. It is a pure function apart from the clock, for growing
//! pauses, and random bytes, for jitter. The loop that carries out the decisions is in `driver.rs`.

mod comparison;
mod confirmation;
mod history;

#[cfg(test)]
mod tests;

use std::time::Duration;

use tokio::time::Instant;

pub use self::comparison::BOOKMARK_WATCH_TIME;
use self::comparison::{WATCHES_MAX, WatchEnd};
pub(crate) use self::history::{History, ListPolicy};
use crate::{
    backoff::jitter,
    codec::{
        message::{ListMetadata, Message},
        resource::WatchedResource,
    },
    watch::{
        event::{ResponseOrigin, WatchEvent},
        failure::{ApiError, Failure, Operation, Recovery, RetryFrom},
        io::{Collection, Input, Log, Next, Output, Pause, Request},
        selectors::Selectors,
        subscriber::Wanted,
        view_token::ViewToken,
    },
};

/// Longest jitter that is added to a Retry-After, so that many agents with the same one do not return together.
const RETRY_AFTER_JITTER_MAX: Duration = Duration::from_secs(1);

/// Phase of a list and watch.
///
/// The optional field selector is dropped if the server lacks it. A new list after a watch begins with
/// [`WatchState::new`], which tries it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WatchState {
    /// The list is not complete.
    Listing {
        /// The requests carry the optional field selector.
        sends_optional_fields: bool,
        /// Number of objects of the list so far.
        object_count: u32,
        /// Version of the last watch. Another server, or its cache, may be behind it.
        at_least: Option<String>,
        /// View that the list shows, once it has been accepted.
        view: ViewToken,
    },
    /// The list is complete; changes follow.
    Watching {
        /// Version of the last change or bookmark, from which a new watch resumes.
        version: String,
        /// The requests carry the optional field selector.
        sends_optional_fields: bool,
        /// View that the list has shown. In another one the version means nothing.
        view: ViewToken,
    },
}

impl WatchState {
    /// Start of the first list, with all features.
    pub(crate) fn new() -> Self {
        Self::listing(None)
    }

    fn listing(at_least: Option<String>) -> Self {
        Self::Listing { sends_optional_fields: true, object_count: 0, at_least, view: ViewToken::default() }
    }

    /// Gives up the watch for a new list.
    fn relist(&mut self) {
        *self = match self {
            Self::Listing { at_least, .. } => Self::listing(at_least.take()),
            Self::Watching { version, .. } => Self::listing(Some(std::mem::take(version))),
        };
    }

    pub(crate) fn operation(&self) -> Operation {
        match self {
            Self::Listing { .. } => Operation::List,
            Self::Watching { .. } => Operation::Watch,
        }
    }

    /// Time at which [`Input::Unconfirmed`] is due, unless there is another input before; `None`: never.
    pub(crate) fn due(&self, history: &History) -> Option<Instant> {
        history.confirmation.due().filter(|_| self.operation() == Operation::Watch)
    }

    /// Request of this state. No list is a quorum read: version 0 means any version that the server's cache has, and
    /// `NotOlderThan` waits for the cache to have the version. A limit would make a quorum read of it while the server
    /// is starting (apiserver/pkg/storage/cacher/delegator.go 1.36).
    ///
    /// A watch for a comparison begins before the last version. A server that has the version shows it, by the change
    /// or by a bookmark.
    pub(crate) fn request<K: WatchedResource>(&self, selectors: Selectors<'_>, history: &History) -> Request {
        let seconds = history.watch_time().as_secs().to_string();
        let watch = [("watch", "true"), ("timeoutSeconds", &*seconds), ("allowWatchBookmarks", "true")];
        let before;
        let parameters = match self {
            Self::Listing { at_least: None, .. } => vec![("resourceVersion", "0")],
            Self::Listing { at_least: Some(version), .. } => {
                vec![("resourceVersion", version.as_str()), ("resourceVersionMatch", "NotOlderThan")]
            }
            Self::Watching { version, .. } => {
                before = version_before(version).filter(|_| history.comparison.is_requested());
                [&watch[..], &[("resourceVersion", before.as_deref().unwrap_or(version))]].concat()
            }
        };
        Request { operation: self.operation(), target: self.sent_selectors(selectors).target::<K>(&parameters) }
    }

    /// Next state and output for an input.
    pub(crate) fn step<K: WatchedResource>(
        mut self,
        input: Input<K>,
        collection: Collection<'_>,
        history: &mut History,
    ) -> (Self, Output<K>) {
        let mut output = match self.advance(input, collection, history) {
            Ok(output) => output,
            Err(error) => self.recover(error, collection, history),
        };
        if output.next != Next::Read {
            history.comparison.leave_response();
        }
        if let Some(Log::Warn(message)) = &output.log {
            output.events.insert(0, WatchEvent::Failed(message.clone()));
        }
        (self, output)
    }

    /// Moves on by one input. An error leaves the state unchanged.
    fn advance<K: WatchedResource>(
        &mut self,
        input: Input<K>,
        collection: Collection<'_>,
        history: &mut History,
    ) -> Result<Output<K>, ApiError> {
        match input {
            Input::Accepted(origin) => Ok(self.accept(origin, collection, history)),
            Input::Received(message) => self.receive(message, history).map(Output::read),
            Input::Ended(metadata) => self.end(metadata, collection, history),
            Input::Unconfirmed => Ok(self.doubt(collection, history)),
            Input::Superseded => Ok(Output::next(Next::Request)),
            Input::Wanted(wanted) => Ok(Output::next(self.want(wanted, history))),
            Input::Failed(error) => Err(error),
        }
    }

    /// Begins to read a response. A watch in another view than the list's is given up: its version means nothing there.
    fn accept<K: WatchedResource>(
        &mut self,
        origin: ResponseOrigin,
        collection: Collection<'_>,
        history: &mut History,
    ) -> Output<K> {
        history.wants_bookmark = false;
        let view = origin.view.clone();
        let accepted = WatchEvent::Accepted(origin);
        match self {
            Self::Watching { view: before, .. } if *before != view => {
                let (server, resource) = (collection.server, K::PLURAL);
                let reason = format!("{server} shows another view of {resource} ({view}, before: {before})");
                Output { events: vec![accepted], ..self.give_up(&reason, history) }
            }
            Self::Watching { .. } => {
                history.end_refusals();
                history.begin_watch();
                history.comparison.accept();
                Output::read(vec![accepted])
            }
            Self::Listing { object_count, view: shown, .. } => {
                (*object_count, *shown) = (0, view);
                history.comparison.accept();
                Output::read(vec![accepted, WatchEvent::ListStarted])
            }
        }
    }

    /// Events of a message.
    fn receive<K: WatchedResource>(
        &mut self,
        message: Message<K>,
        history: &mut History,
    ) -> Result<Vec<WatchEvent<K>>, ApiError> {
        match (self, message) {
            (Self::Watching { version, .. }, message) => receive_change(version, message, history),
            (Self::Listing { object_count, .. }, Message::Applied(object)) => {
                *object_count = object_count.saturating_add(1);
                Ok(vec![WatchEvent::Listed(object)])
            }
            // A list has items only.
            (Self::Listing { .. }, _) => Err(ApiError::Incomplete),
        }
    }

    /// Ends a response in an orderly way.
    fn end<K: WatchedResource>(
        &mut self,
        metadata: ListMetadata,
        collection: Collection<'_>,
        history: &mut History,
    ) -> Result<Output<K>, ApiError> {
        if let Self::Listing { .. } = self {
            let done = self.complete_list(metadata.resource_version, history)?;
            let events = [Some(done), history.comparison.complete().map(WatchEvent::Compared)];
            let log = warn_if_not_found::<K>(collection, history);
            return Ok(Output { log, events: events.into_iter().flatten().collect(), next: Next::Request });
        }
        Ok(match history.comparison.end_watch() {
            WatchEnd::Incomplete => Output::next(history.end_watch()),
            WatchEnd::Complete(number) => {
                Output { events: vec![WatchEvent::Compared(number)], ..Output::next(history.end_watch()) }
            }
            WatchEnd::Doubtful => self.doubt(collection, history),
            WatchEnd::NeedsList => self.list_to_compare(collection, history),
        })
    }

    /// Gives up a watch that has not shown its version: the server may have been restored to an older state.
    fn doubt<K: WatchedResource>(&mut self, collection: Collection<'_>, history: &mut History) -> Output<K> {
        history.confirmation.record_doubt();
        let (server, resource) = (collection.server, K::PLURAL);
        let reason = format!("{server} has not confirmed the {resource} since their watch was resumed");
        self.give_up(&reason, history)
    }

    /// Gives up a watch after which a list has to complete the comparison.
    fn list_to_compare<K: WatchedResource>(&mut self, collection: Collection<'_>, history: &mut History) -> Output<K> {
        let (server, resource) = (collection.server, K::PLURAL);
        let reason = format!("{WATCHES_MAX} watches of {resource} at {server} have not completed a comparison");
        self.give_up(&reason, history)
    }

    /// Gives up a watch for a list.
    fn give_up<K>(&mut self, reason: &str, history: &mut History) -> Output<K> {
        self.relist();
        let pause = history.next_expired_pause();
        let log = Some(Log::Info(format!("{reason}: listing anew")));
        Output { log, ..Output::next(Next::request_after(pause)) }
    }

    /// Turns to what the subscriber wants. A list that is under way goes on, unless another one is wanted.
    fn want(&mut self, wanted: Wanted, history: &mut History) -> Next {
        match wanted {
            Wanted::List => {
                // Another server may have other versions.
                *self = Self::new();
                return Next::request_after(history.spread());
            }
            Wanted::Bookmark => history.wants_bookmark = true,
            Wanted::Comparison(number) => history.comparison.want(number),
        }
        if self.operation() == Operation::List { Next::Read } else { Next::Request }
    }

    fn complete_list<K>(&mut self, version: Option<String>, history: &mut History) -> Result<WatchEvent<K>, ApiError> {
        let version = required_version(version)?;
        if let Self::Listing { sends_optional_fields, object_count, view, .. } = self {
            history.record_list(*object_count);
            let (view, sends_optional_fields) = (std::mem::take(view), *sends_optional_fields);
            *self = Self::Watching { version: version.clone(), sends_optional_fields, view };
        }
        Ok(WatchEvent::ListDone(version))
    }

    /// Handles a failure: chooses the next request and the pause before it.
    fn recover<K: WatchedResource>(
        &mut self,
        error: ApiError,
        collection: Collection<'_>,
        history: &mut History,
    ) -> Output<K> {
        let failure = Failure { operation: self.operation(), error };
        let needs_list = failure.operation == Operation::Watch && history.comparison.fail_watch();
        let message = failure.describe::<K>(collection.server);
        let selectors = self.sent_selectors(collection.selectors);
        let (mut events, resource) = (Vec::new(), K::PLURAL);
        let recovery = failure.recovery(selectors.has_optional_fields(), K::LOST_WITHOUT.is_some());
        let (log, next) = match recovery {
            Recovery::Resume if needs_list => return self.list_to_compare(collection, history),
            Recovery::Resume => (None, history.end_watch()),
            Recovery::DropFieldSelector => {
                self.drop_optional_fields();
                let fields = selectors.fields.text();
                let message =
                    format!("{message}; asking again without fieldSelector {fields}, for Kubernetes before 1.31");
                (Some(Log::Info(message)), Next::Request)
            }
            Recovery::Relist => {
                self.relist();
                let message = format!("the watch of {resource} is too old to be resumed: listing anew");
                (Some(Log::Info(message)), Next::request_after(history.next_expired_pause()))
            }
            Recovery::DoWithout => {
                events.extend(history.record_unavailable().then_some(WatchEvent::Unavailable));
                let lost = K::LOST_WITHOUT.unwrap_or_default();
                let meanwhile = if history.has_objects { "the last known state stays" } else { lost };
                let log = history.warn_once(format!("{message}; until that succeeds, {meanwhile}"));
                (Some(log), Next::request_after(history.next_refused_pause()))
            }
            Recovery::Retry(from) => {
                let from = if needs_list { RetryFrom::List } else { from };
                self.retry(from, &failure, &message, history)
            }
        };
        // A refusal of the selector says nothing about the version, and a list with it would be refused without end.
        let is_resumed = failure.operation == Operation::Watch && recovery != Recovery::DropFieldSelector;
        if is_resumed && history.policy.after_failure || needs_list {
            self.relist();
        }
        Output { log, events, next }
    }

    /// Selectors that the state's request carries.
    fn sent_selectors<'a>(&self, selectors: Selectors<'a>) -> Selectors<'a> {
        let (Self::Listing { sends_optional_fields, .. } | Self::Watching { sends_optional_fields, .. }) = self;
        if *sends_optional_fields { selectors } else { selectors.without_optional_fields() }
    }

    fn drop_optional_fields(&mut self) {
        let (Self::Listing { sends_optional_fields, .. } | Self::Watching { sends_optional_fields, .. }) = self;
        *sends_optional_fields = false;
    }

    /// Retries after a pause, at the same place or with a new list.
    fn retry(
        &mut self,
        from: RetryFrom,
        failure: &Failure,
        message: &str,
        history: &mut History,
    ) -> (Option<Log>, Next) {
        if !failure.is_silence() {
            history.confirmation.record_failure();
        }
        let mut pause = history.retry.next().max(retry_after(failure));
        let mut action = "trying again";
        if let Self::Listing { at_least, .. } = self
            && failure.is_version_too_large()
        {
            // The server's data may come from a backup.
            *at_least = None;
        }
        if let Self::Watching { version, .. } = self
            && match from {
                RetryFrom::Here => false,
                RetryFrom::HereOnce => history.record_bad_watch(version),
                RetryFrom::List => true,
            }
        {
            self.relist();
            action = "listing anew";
            pause += history.spread();
        }
        let pause = Pause { duration: pause, ends_on_network_change: failure.is_connection_failure() };
        (Some(Log::Warn(format!("{message}; {action}"))), Next::RequestAfter(pause))
    }
}

/// Events of a message in a watch from this version.
fn receive_change<K: WatchedResource>(
    version: &mut String,
    message: Message<K>,
    history: &mut History,
) -> Result<Vec<WatchEvent<K>>, ApiError> {
    let event = match message {
        Message::Applied(object) => WatchEvent::Applied(object),
        Message::Deleted(object) => WatchEvent::Deleted(object),
        Message::Bookmark(shown) => WatchEvent::Bookmark(required_version(shown)?),
        Message::Error(status) => return Err(ApiError::ErrorEvent(status)),
    };
    let compared = match &event {
        // A watch for a comparison began there, so this confirms nothing.
        WatchEvent::Bookmark(shown) if Some(shown) == version_before(version).as_ref() => return Ok(Vec::new()),
        WatchEvent::Bookmark(shown) => {
            version.clone_from(shown);
            history.comparison.complete()
        }
        WatchEvent::Applied(object) | WatchEvent::Deleted(object) => {
            let shown = required_version(Some(object.meta().resource_version.clone()))?;
            history.record_change(matches!(event, WatchEvent::Applied(_)));
            history.comparison.record_change(shown == *version);
            *version = shown;
            None
        }
        _ => None,
    };
    history.confirmation.confirm();
    history.watch_since = None;
    Ok([Some(event), compared.map(WatchEvent::Compared)].into_iter().flatten().collect())
}

/// Warning about an optional resource of which a complete list has no object.
fn warn_if_not_found<K: WatchedResource>(collection: Collection<'_>, history: &mut History) -> Option<Log> {
    let lost = K::LOST_WITHOUT.filter(|_| !history.has_objects)?;
    let fields = collection.selectors.fields.text();
    Some(history.warn_once(format!("there is no {} with {fields}: until there is, {lost}", K::KIND)))
}

/// The version; an error if it is missing or empty.
fn required_version(version: Option<String>) -> Result<String, ApiError> {
    version.filter(|version| !version.is_empty()).ok_or(ApiError::NoVersion)
}

/// Version before this one; `None` if it is no number, or the first one. Versions of Services, EndpointSlices and Nodes
/// are numbers that grow by at least one with each change.
fn version_before(version: &str) -> Option<String> {
    let before = version.parse::<u64>().ok()?.checked_sub(1)?;
    // 0 means any version.
    (before > 0).then(|| before.to_string())
}

/// Pause that the server asks for, with jitter; zero if it asks for none.
fn retry_after(failure: &Failure) -> Duration {
    let pause = failure.retry_after();
    if pause.is_zero() { pause } else { pause + jitter(RETRY_AFTER_JITTER_MAX) }
}
