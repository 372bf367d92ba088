//! Decisions of the state machine, input by input.

mod comparison;

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
        status::Status,
    },
    watch::selectors::FieldSelector,
};

/// State and history of one resource.
struct Machine {
    state: Option<WatchState>,
    history: History,
    /// Numbers of the comparisons that are complete.
    compared: Vec<u64>,
}

/// Output of a step, without the events that each response, each warning and each comparison has.
#[derive(Debug)]
struct Stepped<K> {
    log: Option<Log>,
    event: Option<WatchEvent<K>>,
    next: Next,
}

impl Machine {
    fn new() -> Self {
        let policy = ListPolicy { spreads: true, after_failure: false, expires_often: false };
        Self { state: Some(WatchState::new()), history: History::new(policy), compared: Vec::new() }
    }

    fn watching(version: &str, sends_optional_fields: bool) -> Self {
        let state =
            WatchState::Watching { version: version.to_owned(), sends_optional_fields, view: ViewToken::default() };
        Self { state: Some(state), ..Self::new() }
    }

    fn step<K: WatchedResource>(&mut self, input: Input<K>) -> Stepped<K> {
        let is_accepted = matches!(input, Input::Accepted(_));
        let selectors = Selectors { labels: "", fields: FieldSelector::Optional("a=b") };
        let collection = Collection { server: "https://api:6443/", selectors };
        let (state, Output { log, mut events, next }) =
            self.state.take().unwrap().step(input, collection, &mut self.history);
        self.state = Some(state);
        let warning = events.extract_if(.., |event| matches!(event, WatchEvent::Failed(_))).next();
        assert_eq!(matches!(log, Some(Log::Warn(_))), warning.is_some(), "{log:?}");
        let origin = events.extract_if(.., |event| matches!(event, WatchEvent::Accepted(_))).next();
        assert_eq!(is_accepted, origin.is_some(), "each response shows its view at once");
        self.compared.extend(events.iter().filter_map(|event| match event {
            WatchEvent::Compared(number) => Some(*number),
            _ => None,
        }));
        events.retain(|event| !matches!(event, WatchEvent::Compared(_)));
        assert!(events.len() <= 1, "{} events", events.len());
        Stepped { log, event: events.pop(), next }
    }

    fn state(&self) -> &WatchState {
        self.state.as_ref().unwrap()
    }

    fn fail(&mut self, error: ApiError) -> Stepped<Service> {
        self.step(Input::Failed(error))
    }

    /// Path and query of the next request, without selectors.
    fn target(&self) -> String {
        let selectors = Selectors { labels: "", fields: FieldSelector::Any };
        self.state().request::<Service>(selectors, &self.history).target
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
    WatchState::Listing { sends_optional_fields: false, object_count: 0, at_least: None, view: ViewToken::default() }
}

fn without_fields(version: &str) -> WatchState {
    WatchState::Watching { version: version.to_owned(), sends_optional_fields: false, view: ViewToken::default() }
}

fn accepted<K>() -> Input<K> {
    accepted_in(ViewToken::default())
}

fn accepted_in<K>(view: ViewToken) -> Input<K> {
    Input::Accepted(ResponseOrigin { server: "a".into(), view, requested: Instant::now() })
}

fn watching(version: &str) -> WatchState {
    WatchState::Watching { version: version.to_owned(), sends_optional_fields: true, view: ViewToken::default() }
}

#[test]
fn a_list_is_followed_by_a_watch_from_its_version() {
    let mut machine = Machine::new();
    let output = machine.step::<Service>(accepted());
    assert!(matches!(output, Stepped { log: None, event: Some(WatchEvent::ListStarted), next: Next::Read }));
    let output = machine.step::<Service>(Input::Received(Message::Applied(object())));
    assert!(matches!(output, Stepped { log: None, event: Some(WatchEvent::Listed(_)), next: Next::Read }));
    let output = machine.step::<Service>(end("7"));
    assert!(matches!(output, Stepped { log: None, event: Some(WatchEvent::ListDone(_)), next: Next::Request }));
    assert_eq!((machine.history.object_count, machine.state()), (1, &watching("7")));
    let output = machine.step::<Service>(accepted());
    assert!(matches!(output, Stepped { log: None, event: None, next: Next::Read }));
    let output = machine.step::<Service>(Input::Received(Message::Applied(versioned("8"))));
    assert!(matches!(output, Stepped { event: Some(WatchEvent::Applied(_)), next: Next::Read, .. }));
    assert_eq!(*machine.state(), watching("8"));
    let output = machine.step::<Service>(Input::Received(Message::Deleted(versioned("9"))));
    assert!(matches!(output, Stepped { event: Some(WatchEvent::Deleted(_)), next: Next::Read, .. }));
    let output = machine.step::<Service>(bookmark("12"));
    assert!(matches!(output, Stepped { event: Some(WatchEvent::Bookmark(_)), next: Next::Read, .. }));
    let output = machine.step::<Service>(Input::Ended(ListMetadata::default()));
    assert!(matches!(output, Stepped { log: None, event: None, next: Next::Request }), "a watch ends regularly");
    assert_eq!(*machine.state(), watching("12"));
}

#[test]
fn a_watch_is_resumed_in_the_view_of_its_list_only() {
    let mut machine = Machine::new();
    machine.step::<Service>(accepted_in(ViewToken::named("a")));
    machine.step::<Service>(end("7"));
    let resume = |machine: &mut Machine, view| machine.step::<Service>(accepted_in(view));
    let output = resume(&mut machine, ViewToken::named("a"));
    assert!(matches!(output, Stepped { log: None, event: None, next: Next::Read }));
    for (other, text) in [(ViewToken::named("b"), "b"), (ViewToken::default(), "all")] {
        let mut machine = Machine { state: machine.state.clone(), ..Machine::new() };
        machine.history.object_count = 10_000;
        let output = resume(&mut machine, other);
        let Stepped { log: Some(Log::Info(message)), event: None, next: Next::RequestAfter(pause) } = output else {
            panic!("{output:?}")
        };
        let expected = format!("https://api:6443/ shows another view of services ({text}, before: a): listing anew");
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
    let Stepped { log: Some(Log::Info(message)), event: None, next: Next::RequestAfter(pause) } = output else {
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
        machine.step::<Service>(accepted_in(ViewToken::named(token)));
    }
    machine.step::<Service>(end("7"));
    let output = machine.step::<Service>(accepted_in(ViewToken::named("b")));
    assert!(matches!(output, Stepped { log: None, event: None, next: Next::Read }));
}

#[tokio::test(start_paused = true)]
async fn a_server_with_a_view_for_each_request_is_listed_ever_more_rarely() {
    let mut machine = Machine::new();
    let pauses: Vec<_> = (0..9)
        .map(|_| {
            machine.state = Some(watching("7"));
            let Next::RequestAfter(pause) = machine.step::<Service>(accepted_in(ViewToken::named("a"))).next else {
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
    assert!(matches!(output, Stepped { log: Some(Log::Warn(_)), event: None, next: Next::RequestAfter(_) }));
    let output = machine.step::<Service>(accepted());
    assert!(matches!(output.event, Some(WatchEvent::ListStarted)));
    assert_eq!(*machine.state(), listing(), "the list has no objects yet");
}

#[tokio::test(start_paused = true)]
async fn a_missing_version_leaves_the_state_and_publishes_nothing() {
    for input in
        [Input::Received(Message::Applied(object())), Input::Received(Message::Deleted(versioned(""))), bookmark("")]
    {
        let mut machine = Machine::watching("7", true);
        let Stepped { log: Some(Log::Warn(message)), event: None, next: Next::RequestAfter(_) } =
            machine.step::<Service>(input)
        else {
            panic!("no failure")
        };
        assert_eq!(message, "the API server sent services without resourceVersion; listing anew");
        assert_eq!(*machine.state(), relisting("7"));
    }
    let mut machine = Machine::new();
    let Stepped { log: Some(Log::Warn(message)), event: None, .. } = machine.step::<Service>(end("")) else {
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
        machine.state().request::<Service>(selectors, &machine.history).target.contains("fieldSelector=a%3Db")
    };
    assert!(fields(&machine));
    let output = machine.fail(ApiError::Refused(status(400)));
    let Stepped { log: Some(Log::Info(message)), event: None, next: Next::Request } = output else {
        panic!("{output:?}")
    };
    let expected = "cannot watch services at https://api:6443/: m (400); asking again without fieldSelector a=b, for \
                    Kubernetes before 1.31";
    assert_eq!(message, expected);
    assert_eq!(*machine.state(), without_fields("7"));
    assert!(!fields(&machine));
}

#[tokio::test(start_paused = true)]
async fn with_lists_after_failures_a_watch_that_broke_is_not_resumed_and_a_list_drops_its_selector() {
    let policy = ListPolicy { spreads: false, after_failure: true, expires_often: false };
    let machine = |state| Machine { state: Some(state), history: History::new(policy), compared: Vec::new() };
    for error in [ApiError::Cut, ApiError::Refused(status(503)), ApiError::Connection("refused".into())] {
        let mut machine = machine(watching("7"));
        machine.fail(error);
        assert_eq!(*machine.state(), relisting("7"));
    }
    for (state, without) in [(listing(), listing_without_fields()), (watching("7"), without_fields("7"))] {
        let mut machine = machine(state);
        assert_eq!(machine.fail(ApiError::Refused(status(400))).next, Next::Request);
        assert_eq!(*machine.state(), without, "the same request again would not end");
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_cut_is_resumed_and_one_that_is_too_old_becomes_a_list() {
    let mut machine = Machine::watching("7", false);
    let output = machine.fail(ApiError::Cut);
    assert!(matches!(output, Stepped { log: None, event: None, next: Next::Request }));
    assert_eq!(*machine.state(), without_fields("7"));
    let output = machine.fail(ApiError::ErrorEvent(status(410)));
    let Stepped { log: Some(Log::Info(message)), event: None, next: Next::RequestAfter(pause) } = output else {
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
    assert_eq!(machine.target(), "/api/v1/services?resourceVersion=7&resourceVersionMatch=NotOlderThan");
    machine.fail(too_large());
    assert_eq!(*machine.state(), listing(), "its data may come from a backup");
    assert_eq!(machine.target(), "/api/v1/services?resourceVersion=0");
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
    let Stepped { log: Some(Log::Warn(message)), event: Some(WatchEvent::Unavailable), .. } = first else {
        panic!("{first:?}")
    };
    assert!(message.contains("; until that succeeds, zone hints are not followed"), "{message}");
    assert_eq!(*machine.state(), listing());
    let second = refuse(&mut machine);
    let Stepped { log: Some(Log::Debug(again)), event: None, next: Next::RequestAfter(pause) } = second else {
        panic!("{second:?}")
    };
    assert_eq!(again, format!("still {message}"));
    assert!((REFUSED_PAUSE * 2..REFUSED_PAUSE * 2 + REFUSED_JITTER_MAX).contains(&pause.duration));
    machine.step::<Node>(accepted());
    machine.step::<Node>(Input::Received(Message::Applied(object())));
    machine.step::<Node>(end("7"));
    machine.step::<Node>(accepted());
    let Stepped { log: Some(Log::Warn(message)), event: None, .. } = refuse(&mut machine) else {
        panic!("no new warning")
    };
    assert!(message.ends_with("; until that succeeds, the last known state stays"), "{message}");
}

#[test]
fn a_complete_list_without_the_node_logs_a_warning() {
    let mut machine = Machine::new();
    machine.step::<Node>(accepted());
    let Stepped { log: Some(Log::Warn(message)), event: Some(WatchEvent::ListDone(_)), next: Next::Request } =
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
fn a_watch_for_a_comparison_is_short_and_begins_before_the_last_version_if_there_is_a_version_before() {
    for (version, before) in [("7", "6"), ("1000", "999"), ("1", "1"), ("a7", "a7")] {
        let mut machine = Machine::watching(version, true);
        let target = machine.target();
        assert!(target.ends_with(&format!("&resourceVersion={version}")), "{target}");
        assert_eq!(machine.step::<Service>(Input::Wanted(Wanted::Comparison(1))).next, Next::Request);
        let target = machine.target();
        assert!(target.contains("timeoutSeconds=3&"), "{target}");
        assert!(target.ends_with(&format!("&resourceVersion={before}")), "{target}");
        machine.state = Some(relisting("7"));
        assert!(machine.target().contains("resourceVersion=7"), "{}", machine.target());
    }
}

#[test]
fn a_watch_that_is_opened_for_its_bookmark_is_short_and_the_next_one_is_not() {
    let mut machine = Machine::watching("7", true);
    assert_eq!(machine.step::<Service>(Input::Wanted(Wanted::Bookmark)).next, Next::Request);
    machine.fail(ApiError::Refused(status(503)));
    assert!(machine.target().ends_with("timeoutSeconds=3&allowWatchBookmarks=true&resourceVersion=7"));
    machine.step::<Service>(accepted());
    assert!(!machine.target().contains("timeoutSeconds=3&"), "{}", machine.target());
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
        let target = Machine::watching("7", true).target();
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
    for error in [unreadable(), unreadable(), ApiError::NoVersion, ApiError::Silent(Operation::List.silence_max())] {
        machine.fail(error);
        let without = listing_without_fields();
        assert_eq!(*machine.state(), without, "features return with the next complete list");
    }
}

#[tokio::test(start_paused = true)]
async fn watches_that_end_at_once_become_rare_and_others_are_resumed_at_once() {
    let mut machine = Machine::watching("7", true);
    let watch = |machine: &mut Machine| drop(machine.step::<Service>(accepted()));
    let ends: [fn() -> Input<Service>; 2] = [|| Input::Ended(ListMetadata::default()), || Input::Failed(ApiError::Cut)];
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
    assert_eq!(machine.step::<Service>(Input::Superseded).next, Next::Request);
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
