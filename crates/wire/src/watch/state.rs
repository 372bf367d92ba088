//! State machine of one resource's list and watch.
//!
//! [`WatchState::step`] makes all decisions and does no I/O. It is a pure function apart from the clock, for growing
//! pauses, and random bytes, for jitter. The loop that carries out the decisions is in `follow.rs`.

mod confirmation;
mod history;

use std::time::Duration;

use tokio::time::Instant;

pub(crate) use self::history::History;
use crate::{
    backoff::jitter,
    codec::{message::Message, resource::WatchedResource},
    watch::{
        event::WatchEvent,
        failure::{ApiError, Failure, Operation, Recovery, RetryFrom},
        io::{Collection, Input, Log, Next, Output, Pause, Request},
        selectors::Selectors,
        view_token::ViewToken,
    },
};

/// Time after which the server ends a watch: this and up to as much again, as in client-go, so that the watches of many
/// agents do not end together.
const WATCH_MIN: Duration = Duration::from_secs(300);

/// Random time for a watch, from [`WATCH_MIN`] to twice that.
pub(crate) fn watch_time() -> Duration {
    WATCH_MIN + jitter(WATCH_MIN)
}

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
    pub(crate) fn relist(&mut self) {
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
    /// `watch_time` is the time after which the server ends a watch. A watch that `repeats_last_version` begins before
    /// that version. A server that has the version shows it, by the change or by a bookmark.
    pub(crate) fn request<K: WatchedResource>(
        &self,
        selectors: Selectors<'_>,
        watch_time: Duration,
        repeats_last_version: bool,
    ) -> Request {
        let seconds = watch_time.as_secs().to_string();
        let watch = [("watch", "true"), ("timeoutSeconds", &*seconds), ("allowWatchBookmarks", "true")];
        let before;
        let parameters = match self {
            Self::Listing { at_least: None, .. } => vec![("resourceVersion", "0")],
            Self::Listing { at_least: Some(version), .. } => {
                vec![("resourceVersion", version.as_str()), ("resourceVersionMatch", "NotOlderThan")]
            }
            Self::Watching { version, .. } => {
                before = version_before(version).filter(|_| repeats_last_version);
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
        if let Some(log) = self.give_up::<K>(&input, collection.server, history) {
            let pause = history.expired.next() + history.spread();
            return (self, Output { log: Some(log), event: None, next: Next::request_after(pause) });
        }
        if matches!(input, Input::ListWanted) {
            // Another server may have other versions.
            return (Self::new(), Output { log: None, event: None, next: Next::request_after(history.spread()) });
        }
        let output = match self.advance(input, history) {
            Ok((event, next)) => {
                let log = warn_if_not_found(event.as_ref(), collection, history);
                Output { log, event, next }
            }
            Err(error) => self.recover(error, collection, history),
        };
        (self, output)
    }

    /// Gives up a watch whose version may mean nothing: in another view than the list's, or after a restored backup.
    fn give_up<K: WatchedResource>(&mut self, input: &Input<K>, server: &str, history: &mut History) -> Option<Log> {
        let (Self::Watching { view: before, .. }, resource) = (&*self, K::PLURAL) else { return None };
        let reason = match input {
            Input::Accepted(view) if before != view => {
                format!("{server} shows another view of {resource} ({view}, before: {before})")
            }
            Input::Unconfirmed => {
                history.confirmation.record_doubt();
                format!("{server} has not confirmed the {resource} since their watch was resumed")
            }
            _ => return None,
        };
        self.relist();
        Some(Log::Info(format!("{reason}: listing anew")))
    }

    /// Moves on by one input. An error leaves the state unchanged.
    fn advance<K: WatchedResource>(
        &mut self,
        input: Input<K>,
        history: &mut History,
    ) -> Result<(Option<WatchEvent<K>>, Next), ApiError> {
        match self {
            Self::Listing { object_count, view, .. } => match advance_list(object_count, view, input)? {
                ListProgress::Incomplete(event) => Ok((Some(event), Next::Read)),
                ListProgress::Complete(version) => Ok((Some(self.complete_list(version, history)?), Next::Request)),
            },
            Self::Watching { version, .. } => advance_watch(version, input, history),
        }
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
        let message = failure.describe::<K>(collection.server);
        let selectors = self.sent_selectors(collection.selectors);
        let (mut event, resource) = (None, K::PLURAL);
        let (log, next) = match failure.recovery(selectors.has_optional_fields(), K::LOST_WITHOUT.is_some()) {
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
                (Some(Log::Info(message)), Next::request_after(history.expired.next() + history.spread()))
            }
            Recovery::DoWithout => {
                event = history.record_unavailable().then_some(WatchEvent::Unavailable);
                let lost = K::LOST_WITHOUT.unwrap_or_default();
                let meanwhile = if history.has_objects { "the last known state stays" } else { lost };
                let log = history.warn_once(format!("{message}; until that succeeds, {meanwhile}"));
                (Some(log), Next::request_after(history.next_refused_pause()))
            }
            Recovery::Retry(from) => self.retry(from, &failure, &message, history),
        };
        Output { log, event, next }
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

/// Progress of a list that one input makes.
enum ListProgress<K> {
    /// The list goes on.
    Incomplete(WatchEvent<K>),
    /// The list is complete, at this version.
    Complete(Option<String>),
}

fn advance_list<K: WatchedResource>(
    object_count: &mut u32,
    view: &mut ViewToken,
    input: Input<K>,
) -> Result<ListProgress<K>, ApiError> {
    Ok(ListProgress::Incomplete(match input {
        Input::Failed(error) => return Err(error),
        Input::Accepted(accepted) => {
            (*object_count, *view) = (0, accepted);
            WatchEvent::ListStarted
        }
        Input::Received(Message::Applied(object)) => {
            *object_count = object_count.saturating_add(1);
            WatchEvent::Listed(object)
        }
        // A list has items only.
        Input::Received(Message::Deleted(_) | Message::Bookmark(_) | Message::Error(_)) => {
            return Err(ApiError::Incomplete);
        }
        Input::Ended(metadata) => return Ok(ListProgress::Complete(metadata.resource_version)),
        Input::Unconfirmed | Input::ListWanted | Input::Moved => return Err(ApiError::Incomplete),
    }))
}

fn advance_watch<K: WatchedResource>(
    version: &mut String,
    input: Input<K>,
    history: &mut History,
) -> Result<(Option<WatchEvent<K>>, Next), ApiError> {
    let event = match input {
        Input::Failed(error) => return Err(error),
        Input::Accepted(_) => {
            history.end_refusals();
            history.begin_watch();
            return Ok((None, Next::Read));
        }
        Input::Received(Message::Applied(object)) => {
            *version = required_version(Some(object.meta().resource_version.clone()))?;
            history.record_change(true);
            WatchEvent::Applied(object)
        }
        Input::Received(Message::Deleted(object)) => {
            *version = required_version(Some(object.meta().resource_version.clone()))?;
            history.record_change(false);
            WatchEvent::Deleted(object)
        }
        // A watch that repeats the version began there, so this confirms nothing.
        Input::Received(Message::Bookmark(Some(now))) if Some(&now) == version_before(version).as_ref() => {
            return Ok((None, Next::Read));
        }
        Input::Received(Message::Bookmark(now)) => {
            *version = required_version(now)?;
            WatchEvent::Bookmark(version.clone())
        }
        Input::Received(Message::Error(status)) => return Err(ApiError::ErrorEvent(status)),
        Input::Ended(_) => return Ok((None, history.end_watch())),
        Input::Unconfirmed | Input::ListWanted | Input::Moved => return Ok((None, Next::Request)),
    };
    history.confirmation.confirm();
    history.watch_since = None;
    Ok((Some(event), Next::Read))
}

/// Warning about a complete list of an optional resource that has no object.
fn warn_if_not_found<K: WatchedResource>(
    event: Option<&WatchEvent<K>>,
    collection: Collection<'_>,
    history: &mut History,
) -> Option<Log> {
    let lost = K::LOST_WITHOUT?;
    if history.has_objects || !matches!(event, Some(WatchEvent::ListDone(_))) {
        return None;
    }
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

#[cfg(test)]
mod tests {
    use cproxy_core::api::{Metadata, Node, Service};

    use super::{
        confirmation::CONFIRMED_WITHIN,
        history::{EXPIRED_PAUSE, REFUSED_JITTER_MAX, REFUSED_PAUSE, REFUSED_PAUSE_MAX, RETRY_PAUSE},
        *,
    };
    use crate::{
        codec::{
            decode::Decoded,
            error::{CodecError, DecodeError},
            message::ListMetadata,
            status::Status,
        },
        watch::selectors::FieldSelector,
    };

    /// State and history of one resource.
    struct Machine {
        state: Option<WatchState>,
        history: History,
    }

    impl Machine {
        fn new() -> Self {
            Self { state: Some(WatchState::new()), history: History::new(true) }
        }

        fn watching(version: &str, sends_optional_fields: bool) -> Self {
            let state =
                WatchState::Watching { version: version.to_owned(), sends_optional_fields, view: ViewToken::default() };
            Self { state: Some(state), ..Self::new() }
        }

        fn step<K: WatchedResource>(&mut self, input: Input<K>) -> Output<K> {
            let selectors = Selectors { labels: "", fields: FieldSelector::Optional("a=b") };
            let collection = Collection { server: "https://api:6443/", selectors };
            let (state, output) = self.state.take().unwrap().step(input, collection, &mut self.history);
            self.state = Some(state);
            output
        }

        fn state(&self) -> &WatchState {
            self.state.as_ref().unwrap()
        }

        fn fail(&mut self, error: ApiError) -> Output<Service> {
            self.step(Input::Failed(error))
        }
    }

    fn object<K: Default>() -> Decoded<K> {
        Decoded::Object(Box::default())
    }

    /// Unreadable object of this version. It is the only variant whose version can be set for any resource type.
    fn versioned<K>(version: &str) -> Decoded<K> {
        let metadata = Metadata { resource_version: version.to_owned(), ..Metadata::default() };
        Decoded::Unreadable(Box::new(metadata), "wrong".to_owned())
    }

    fn bookmark<K>(version: &str) -> Input<K> {
        Input::Received(Message::Bookmark(Some(version.to_owned())))
    }

    /// End of a list.
    fn end<K>(version: &str) -> Input<K> {
        Input::Ended(ListMetadata { resource_version: Some(version.to_owned()) })
    }

    fn status(code: i32) -> Box<Status> {
        Box::new(Status { message: "m".to_owned(), code, details: None })
    }

    fn unreadable() -> ApiError {
        CodecError::Unreadable { name: None, error: DecodeError::NoMagic }.into()
    }

    fn listing() -> WatchState {
        WatchState::new()
    }

    /// List that must not be older than this version.
    fn relisting(version: &str) -> WatchState {
        WatchState::listing(Some(version.to_owned()))
    }

    fn listing_without_fields() -> WatchState {
        WatchState::Listing {
            sends_optional_fields: false,
            object_count: 0,
            at_least: None,
            view: ViewToken::default(),
        }
    }

    fn without_fields(version: &str) -> WatchState {
        WatchState::Watching { version: version.to_owned(), sends_optional_fields: false, view: ViewToken::default() }
    }

    fn accepted<K>() -> Input<K> {
        Input::Accepted(ViewToken::default())
    }

    fn watching(version: &str) -> WatchState {
        WatchState::Watching { version: version.to_owned(), sends_optional_fields: true, view: ViewToken::default() }
    }

    #[test]
    fn a_list_is_followed_by_a_watch_from_its_version() {
        let mut machine = Machine::new();
        let output = machine.step::<Service>(accepted());
        assert!(matches!(output, Output { log: None, event: Some(WatchEvent::ListStarted), next: Next::Read }));
        let output = machine.step::<Service>(Input::Received(Message::Applied(object())));
        assert!(matches!(output, Output { log: None, event: Some(WatchEvent::Listed(_)), next: Next::Read }));
        let output = machine.step::<Service>(end("7"));
        assert!(matches!(output, Output { log: None, event: Some(WatchEvent::ListDone(_)), next: Next::Request }));
        assert_eq!((machine.history.object_count, machine.state()), (1, &watching("7")));
        let output = machine.step::<Service>(accepted());
        assert!(matches!(output, Output { log: None, event: None, next: Next::Read }));
        let output = machine.step::<Service>(Input::Received(Message::Applied(versioned("8"))));
        assert!(matches!(output, Output { event: Some(WatchEvent::Applied(_)), next: Next::Read, .. }));
        assert_eq!(*machine.state(), watching("8"));
        let output = machine.step::<Service>(Input::Received(Message::Deleted(versioned("9"))));
        assert!(matches!(output, Output { event: Some(WatchEvent::Deleted(_)), next: Next::Read, .. }));
        let output = machine.step::<Service>(bookmark("12"));
        assert!(matches!(output, Output { event: Some(WatchEvent::Bookmark(_)), next: Next::Read, .. }));
        let output = machine.step::<Service>(Input::Ended(ListMetadata::default()));
        assert!(matches!(output, Output { log: None, event: None, next: Next::Request }), "a watch ends regularly");
        assert_eq!(*machine.state(), watching("12"));
    }

    #[test]
    fn a_watch_is_resumed_in_the_view_of_its_list_only() {
        let mut machine = Machine::new();
        machine.step::<Service>(Input::Accepted(ViewToken::named("a")));
        machine.step::<Service>(end("7"));
        let resume = |machine: &mut Machine, view| machine.step::<Service>(Input::Accepted(view));
        let output = resume(&mut machine, ViewToken::named("a"));
        assert!(matches!(output, Output { log: None, event: None, next: Next::Read }));
        for (other, text) in [(ViewToken::named("b"), "b"), (ViewToken::default(), "all")] {
            let mut machine = Machine { state: machine.state.clone(), ..Machine::new() };
            machine.history.object_count = 10_000;
            let output = resume(&mut machine, other);
            let Output { log: Some(Log::Info(message)), event: None, next: Next::RequestAfter(pause) } = output else {
                panic!("{output:?}")
            };
            let expected =
                format!("https://api:6443/ shows another view of services ({text}, before: a): listing anew");
            assert_eq!(message, expected);
            assert!(!pause.ends_on_network_change);
            assert_eq!(*machine.state(), relisting("7"), "not older than what is known");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_resumed_watch_that_is_not_confirmed_becomes_a_list() {
        let mut machine = Machine::new();
        let due = |machine: &Machine| machine.state().due(&machine.history).map(|due| due - Instant::now());
        machine.step::<Service>(accepted());
        machine.step::<Service>(end("7"));
        machine.step::<Service>(accepted());
        assert_eq!(due(&machine), None, "the list has shown the version");
        machine.fail(ApiError::Cut);
        machine.step::<Service>(accepted());
        assert_eq!(due(&machine), Some(CONFIRMED_WITHIN));
        machine.step::<Service>(bookmark("8"));
        assert_eq!(due(&machine), None);
        machine.step::<Service>(Input::Ended(ListMetadata::default()));
        machine.step::<Service>(accepted());
        let output = machine.step::<Service>(Input::Unconfirmed);
        let Output { log: Some(Log::Info(message)), event: None, next: Next::RequestAfter(pause) } = output else {
            panic!("{output:?}")
        };
        let expected = "https://api:6443/ has not confirmed the services since their watch was resumed: listing anew";
        assert_eq!(message, expected);
        assert!(pause.duration < EXPIRED_PAUSE * 2 + Duration::from_millis(1));
        assert_eq!((machine.state(), due(&machine)), (&relisting("8"), None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_after_a_failure_of_the_server_has_to_be_confirmed_even_if_none_came_before() {
        for (error, is_due) in [
            (ApiError::Connection("refused".into()), true),
            (ApiError::Refused(status(503)), true),
            (ApiError::Silent(Operation::Watch.silence_max()), false),
        ] {
            let mut machine = Machine::new();
            machine.step::<Service>(accepted());
            machine.step::<Service>(end("7"));
            machine.fail(error);
            machine.step::<Service>(accepted());
            assert_eq!(machine.state().due(&machine.history).is_some(), is_due);
        }
    }

    #[test]
    fn a_list_that_is_repeated_takes_the_view_of_the_last_response() {
        let mut machine = Machine::new();
        for token in ["a", "b"] {
            machine.step::<Service>(Input::Accepted(ViewToken::named(token)));
        }
        machine.step::<Service>(end("7"));
        let output = machine.step::<Service>(Input::Accepted(ViewToken::named("b")));
        assert!(matches!(output, Output { log: None, event: None, next: Next::Read }));
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_with_a_view_for_each_request_is_listed_ever_more_rarely() {
        let mut machine = Machine::new();
        let pauses: Vec<_> = (0..9)
            .map(|_| {
                machine.state = Some(watching("7"));
                let Next::RequestAfter(pause) = machine.step::<Service>(Input::Accepted(ViewToken::named("a"))).next
                else {
                    panic!("no pause")
                };
                pause.duration
            })
            .collect();
        assert!(pauses[0] < EXPIRED_PAUSE * 2 && pauses[8] >= Duration::from_secs(30), "{pauses:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_that_fails_begins_anew() {
        let mut machine = Machine::new();
        machine.step::<Service>(accepted());
        machine.step::<Service>(Input::Received(Message::Applied(object())));
        let output = machine.fail(ApiError::Cut);
        assert!(matches!(output, Output { log: Some(Log::Warn(_)), event: None, next: Next::RequestAfter(_) }));
        let output = machine.step::<Service>(accepted());
        assert!(matches!(output.event, Some(WatchEvent::ListStarted)));
        assert_eq!(*machine.state(), listing(), "the list has no objects yet");
    }

    #[tokio::test(start_paused = true)]
    async fn a_missing_version_leaves_the_state_and_publishes_nothing() {
        for input in [
            Input::Received(Message::Applied(object())),
            Input::Received(Message::Deleted(versioned(""))),
            bookmark(""),
        ] {
            let mut machine = Machine::watching("7", true);
            let Output { log: Some(Log::Warn(message)), event: None, next: Next::RequestAfter(_) } =
                machine.step::<Service>(input)
            else {
                panic!("no failure")
            };
            assert_eq!(message, "the API server sent services without resourceVersion; listing anew");
            assert_eq!(*machine.state(), relisting("7"));
        }
        let mut machine = Machine::new();
        let Output { log: Some(Log::Warn(message)), event: None, .. } = machine.step::<Service>(end("")) else {
            panic!("no failure")
        };
        assert_eq!(message, "the API server sent services without resourceVersion; trying again");
        assert_eq!(*machine.state(), listing());
    }

    #[test]
    fn an_invalid_request_is_repeated_without_the_optional_selector() {
        let mut machine = Machine::watching("7", true);
        let fields = |machine: &Machine| {
            let selectors = Selectors { labels: "", fields: FieldSelector::Optional("a=b") };
            machine.state().request::<Service>(selectors, WATCH_MIN, false).target.contains("fieldSelector=a%3Db")
        };
        assert!(fields(&machine));
        let output = machine.fail(ApiError::Refused(status(400)));
        assert!(matches!(output, Output { log: Some(Log::Info(_)), event: None, next: Next::Request }));
        assert_eq!(*machine.state(), without_fields("7"));
        assert!(!fields(&machine));
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_is_cut_is_resumed_and_one_that_is_too_old_becomes_a_list() {
        let mut machine = Machine::watching("7", false);
        let output = machine.fail(ApiError::Cut);
        assert!(matches!(output, Output { log: None, event: None, next: Next::Request }));
        assert_eq!(*machine.state(), without_fields("7"));
        let output = machine.fail(ApiError::ErrorEvent(status(410)));
        let Output { log: Some(Log::Info(message)), event: None, next: Next::RequestAfter(pause) } = output else {
            panic!("no pause")
        };
        assert_eq!(message, "the watch of services is too old to be resumed: listing anew");
        assert!(pause.duration < EXPIRED_PAUSE * 2 && !pause.ends_on_network_change);
        assert_eq!(*machine.state(), relisting("7"), "all features are asked for again");
    }

    #[tokio::test(start_paused = true)]
    async fn a_version_that_the_server_does_not_have_is_given_up_step_by_step() {
        let mut machine = Machine::watching("7", true);
        let too_large = || ApiError::Refused(status(504));
        machine.fail(too_large());
        assert_eq!(*machine.state(), watching("7"), "its cache may be behind");
        machine.fail(too_large());
        assert_eq!(*machine.state(), relisting("7"));
        let selectors = Selectors { labels: "", fields: FieldSelector::Any };
        let target = |machine: &Machine| machine.state().request::<Service>(selectors, WATCH_MIN, false).target;
        assert_eq!(target(&machine), "/api/v1/services?resourceVersion=7&resourceVersionMatch=NotOlderThan");
        machine.fail(too_large());
        assert_eq!(*machine.state(), listing(), "its data may come from a backup");
        assert_eq!(target(&machine), "/api/v1/services?resourceVersion=0");
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_failed_connection_waits_for_the_network() {
        let no_route = || "no route".into();
        for (error, expected) in [
            (ApiError::Connection(no_route()), true),
            (ApiError::Interrupted(no_route()), true),
            (ApiError::Refused(status(503)), false),
        ] {
            let Next::RequestAfter(pause) = Machine::watching("7", true).fail(error).next else { panic!("no pause") };
            assert_eq!(pause.ends_on_network_change, expected);
            assert!(pause.duration >= RETRY_PAUSE);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_resource_is_published_once_as_an_empty_list() {
        let mut machine = Machine::new();
        let refuse = |machine: &mut Machine| machine.step::<Node>(Input::Failed(ApiError::Refused(status(403))));
        let first = refuse(&mut machine);
        let Output { log: Some(Log::Warn(message)), event: Some(WatchEvent::Unavailable), .. } = first else {
            panic!("{first:?}")
        };
        assert!(message.contains("; until that succeeds, zone hints are not followed"), "{message}");
        assert_eq!(*machine.state(), listing());
        let second = refuse(&mut machine);
        let Output { log: Some(Log::Debug(again)), event: None, next: Next::RequestAfter(pause) } = second else {
            panic!("{second:?}")
        };
        assert_eq!(again, format!("still {message}"));
        assert!((REFUSED_PAUSE * 2..REFUSED_PAUSE * 2 + REFUSED_JITTER_MAX).contains(&pause.duration));
        machine.step::<Node>(accepted());
        machine.step::<Node>(Input::Received(Message::Applied(object())));
        machine.step::<Node>(end("7"));
        machine.step::<Node>(accepted());
        let Output { log: Some(Log::Warn(message)), event: None, .. } = refuse(&mut machine) else {
            panic!("no new warning")
        };
        assert!(message.ends_with("; until that succeeds, the last known state stays"), "{message}");
    }

    #[test]
    fn a_complete_list_without_the_node_logs_a_warning() {
        let mut machine = Machine::new();
        machine.step::<Node>(accepted());
        let Output { log: Some(Log::Warn(message)), event: Some(WatchEvent::ListDone(_)), next: Next::Request } =
            machine.step::<Node>(end("7"))
        else {
            panic!("no warning")
        };
        assert!(message.starts_with("there is no Node with a=b: until there is, zone hints"), "{message}");
    }

    #[test]
    fn a_refusal_is_a_warning_again_once_the_resource_was_served() {
        let mut machine = Machine::new();
        let after = |machine: &mut Machine, input| {
            machine.history.warning = Some("not permitted".to_owned());
            machine.history.refused_pause = REFUSED_PAUSE_MAX;
            machine.step::<Node>(input);
            (machine.history.warning.is_none(), machine.history.refused_pause == REFUSED_PAUSE)
        };
        let applied = |object| Input::Received(Message::Applied(object));
        let deleted = |object| Input::Received(Message::Deleted(object));
        let listed = |machine: &mut Machine, objects| {
            machine.state = Some(listing());
            machine.step::<Node>(accepted());
            (0..objects).for_each(|_| drop(machine.step::<Node>(applied(object()))));
        };
        listed(&mut machine, 0);
        assert_eq!(after(&mut machine, end("7")), (false, false), "the watch may still be refused");
        assert_eq!(after(&mut machine, accepted()), (false, true), "there is no such Node");
        assert_eq!(after(&mut machine, applied(versioned("8"))), (true, true));
        listed(&mut machine, 1);
        assert_eq!(after(&mut machine, end("10")), (false, false));
        assert_eq!(after(&mut machine, accepted()), (true, true));
        assert_eq!(after(&mut machine, deleted(versioned("13"))), (false, true));
    }

    #[test]
    fn a_watch_that_repeats_the_last_version_begins_before_it_if_there_is_a_version_before() {
        let selectors = Selectors { labels: "", fields: FieldSelector::Any };
        for (version, repeated) in [("7", "6"), ("1000", "999"), ("1", "1"), ("a7", "a7")] {
            for (repeats, expected) in [(true, repeated), (false, version)] {
                let target = watching(version).request::<Service>(selectors, WATCH_MIN, repeats).target;
                assert!(target.ends_with(&format!("&resourceVersion={expected}")), "{target}");
            }
        }
        let target = relisting("7").request::<Service>(selectors, WATCH_MIN, true).target;
        assert!(target.contains("resourceVersion=7"), "{target}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_bookmark_of_the_version_before_confirms_nothing() {
        let mut machine = Machine::watching("7", true);
        machine.step::<Service>(accepted());
        for (version, event) in [("6", false), ("7", true), ("8", true)] {
            let output = machine.step::<Service>(bookmark(version));
            assert_eq!((output.event.is_some(), output.next), (event, Next::Read), "{version}");
            let is_due = machine.state().due(&machine.history).is_some();
            assert_eq!(is_due, !event, "{version}");
        }
        assert_eq!(*machine.state(), watching("8"));
    }

    #[test]
    fn watches_of_many_agents_end_at_different_times() {
        let seconds = |_| {
            let selectors = Selectors { labels: "", fields: FieldSelector::Any };
            let target = watching("7").request::<Service>(selectors, watch_time(), false).target;
            let (_, rest) = target.split_once("timeoutSeconds=").unwrap();
            rest.split('&').next().unwrap().parse::<u64>().unwrap()
        };
        let seconds: Vec<_> = (0..100).map(seconds).collect();
        assert!(seconds.iter().all(|seconds| (300..=600).contains(seconds)), "{seconds:?}");
        assert!(seconds.iter().any(|&seconds| seconds < 400) && seconds.iter().any(|&seconds| seconds > 500));
    }

    #[tokio::test(start_paused = true)]
    async fn lists_of_many_objects_are_spread_over_a_longer_time() {
        let pauses = |object_count| {
            let pause = move |_| {
                let mut machine = Machine::watching("7", true);
                machine.history.object_count = object_count;
                let Next::RequestAfter(pause) = machine.fail(ApiError::Refused(status(410))).next else {
                    panic!("no pause")
                };
                pause.duration
            };
            (0..100).map(pause).max().unwrap()
        };
        assert!(pauses(10) < EXPIRED_PAUSE * 2 + Duration::from_millis(10));
        assert!((Duration::from_secs(5)..Duration::from_secs(11)).contains(&pauses(10_000)));
        assert!((Duration::from_secs(15)..Duration::from_secs(31)).contains(&pauses(u32::MAX)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_failure_at_the_same_version_leads_to_a_list_with_all_features() {
        let less = without_fields;
        let mut machine = Machine::watching("7", false);
        machine.fail(unreadable());
        assert_eq!(*machine.state(), less("7"));
        machine.step::<Service>(bookmark("8"));
        machine.fail(unreadable());
        assert_eq!(*machine.state(), less("8"), "the watch has made progress");
        machine.fail(ApiError::Refused(status(503)));
        assert_eq!(*machine.state(), less("8"));
        machine.fail(unreadable());
        assert_eq!(*machine.state(), relisting("8"));
        machine.step::<Service>(accepted());
        machine.step::<Service>(end("8"));
        machine.fail(unreadable());
        assert_eq!(*machine.state(), relisting("8"), "a list that ends at the same place has not helped");
        machine.state = Some(listing_without_fields());
        for error in [unreadable(), unreadable(), ApiError::NoVersion, ApiError::Silent(Operation::List.silence_max())]
        {
            machine.fail(error);
            let without = listing_without_fields();
            assert_eq!(*machine.state(), without, "features return with the next complete list");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn watches_that_end_at_once_become_rare_and_others_are_resumed_at_once() {
        let mut machine = Machine::watching("7", true);
        let watch = |machine: &mut Machine| drop(machine.step::<Service>(accepted()));
        let ends: [fn() -> Input<Service>; 2] =
            [|| Input::Ended(ListMetadata::default()), || Input::Failed(ApiError::Cut)];
        let pauses: Vec<_> = (0..8)
            .map(|round| {
                watch(&mut machine);
                let Next::RequestAfter(pause) = machine.step(ends[round % 2]()).next else { panic!("no pause") };
                pause.duration
            })
            .collect();
        assert!(pauses.first().is_some_and(|pause| *pause < RETRY_PAUSE * 2), "{pauses:?}");
        assert!(pauses.last().is_some_and(|pause| *pause >= Duration::from_secs(30)), "{pauses:?}");
        for input in [bookmark("7"), Input::Received(Message::Applied(versioned("8")))] {
            watch(&mut machine);
            machine.step::<Service>(input);
            assert_eq!(machine.step::<Service>(Input::Ended(ListMetadata::default())).next, Next::Request);
        }
        watch(&mut machine);
        assert_eq!(machine.step::<Service>(Input::Moved).next, Next::Request);
        watch(&mut machine);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(machine.step::<Service>(Input::Ended(ListMetadata::default())).next, Next::Request);
    }

    #[tokio::test(start_paused = true)]
    async fn lists_after_watches_that_are_always_too_old_become_rare() {
        let mut machine = Machine::new();
        let pauses: Vec<_> = (0..9)
            .map(|_| {
                machine.state = Some(watching("7"));
                let Next::RequestAfter(pause) = machine.fail(ApiError::Refused(status(410))).next else {
                    panic!("no pause")
                };
                pause.duration
            })
            .collect();
        assert!(pauses.first().is_some_and(|pause| *pause < EXPIRED_PAUSE * 2), "once is nothing unusual");
        assert!(pauses.last().is_some_and(|pause| *pause >= Duration::from_secs(30)), "{pauses:?}");
    }
}
