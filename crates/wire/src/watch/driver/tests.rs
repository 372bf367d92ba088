//! The loop with scripted responses: requests, pauses and events in their order.

use std::{
    collections::VecDeque,
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll},
};

use bytes::Bytes;
use cproxy_core::api::Service;
use http_body::Frame;
use serde_json::json;
use tokio::sync::watch;

use super::*;
use crate::{
    codec::decode::Decoded,
    transport::link::{Body, BoxError, Link, Received},
    watch::{event::WatchEvent, selectors::FieldSelector, subscriber::Wanted},
};

/// Response of the server to one request.
enum Response {
    Unreachable,
    Refused(u16),
    /// In this view, with this text and this end.
    Sent(&'static str, String, End),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Regular,
    Cut,
    /// Nothing follows, and the response does not end.
    Silence,
}

/// Requests, pauses and events so far, and the time of the last one.
#[derive(Clone, Default)]
struct Transcript(Arc<Mutex<(Vec<String>, Option<Instant>)>>);

impl Transcript {
    fn lock(&self) -> MutexGuard<'_, (Vec<String>, Option<Instant>)> {
        self.0.lock().unwrap()
    }

    fn add(&self, text: impl Into<String>) {
        let mut transcript = self.lock();
        transcript.0.push(text.into());
        transcript.1 = Some(Instant::now());
    }

    /// Adds a request, and the time that has passed since what came before.
    fn add_request(&self, text: String) {
        if self.lock().1.is_some_and(|last| last < Instant::now()) {
            self.add("pause");
        }
        self.add(text);
    }
}

/// Server with scripted responses.
struct Script {
    responses: Mutex<VecDeque<Response>>,
    transcript: Transcript,
    /// There is a better connection.
    is_superseded: bool,
}

impl Transport for Script {
    async fn send(&self, request: http::Request<()>) -> Result<Received, BoxError> {
        self.transcript.add_request(brief(&request.uri().to_string()));
        let response = self.responses.lock().unwrap().pop_front();
        let (code, view, text, end) = match response {
            None => return pending().await,
            Some(Response::Unreachable) => return Err("no route".into()),
            Some(Response::Refused(code)) => (code, "", json!({"message": "m"}).to_string(), End::Regular),
            Some(Response::Sent(view, text, end)) => (200, view, text, end),
        };
        let mut response = http::Response::builder().status(code);
        if !view.is_empty() {
            response = response.header("cproxy-view", view);
        }
        let body = Body::new(ScriptedBody { text: Some(text.into()), end });
        let link = Link::new("a".into(), watch::Sender::new(self.is_superseded).subscribe(), None);
        Ok(Received { response: response.body(body)?, link })
    }

    fn server(&self) -> Arc<str> {
        "https://api:6443/".into()
    }

    async fn report_failure(&self) {
        sleep(Duration::from_secs(1)).await;
        self.transcript.add("reported");
    }
}

struct ScriptedBody {
    text: Option<Bytes>,
    end: End,
}

impl http_body::Body for ScriptedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match (self.text.take(), self.end) {
            (Some(text), _) => Poll::Ready(Some(Ok(Frame::data(text)))),
            (None, End::Regular) => Poll::Ready(None),
            (None, End::Cut) => Poll::Ready(Some(Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()))),
            (None, End::Silence) => Poll::Pending,
        }
    }
}

/// Subscriber that writes events down, and wants each of these once it watches, after this time.
struct Recorder {
    transcript: Transcript,
    wanted: VecDeque<(Duration, Wanted)>,
}

impl Subscriber<Service> for Recorder {
    const SPREADS_LISTS: bool = true;
    const LISTS_AFTER_FAILURE: bool = false;

    async fn publish(&mut self, event: WatchEvent<Service>) {
        self.transcript.add(match event {
            WatchEvent::Accepted(origin) => match origin.view.token() {
                Some(view) => format!("view {view}"),
                None => return,
            },
            WatchEvent::Listed(object) => format!("listed {}", name(&object)),
            WatchEvent::Applied(object) => format!("applied {}", name(&object)),
            WatchEvent::Deleted(object) => format!("deleted {}", name(&object)),
            WatchEvent::ListDone(version) => format!("done {version}"),
            WatchEvent::Bookmark(version) => format!("bookmark {version}"),
            WatchEvent::Failed(message) => format!("failed {message}"),
            WatchEvent::ListStarted => "started".to_owned(),
            WatchEvent::Compared(number) => format!("compared {number}"),
            WatchEvent::Unavailable => "unavailable".to_owned(),
        });
    }

    async fn wanted(&mut self, is_watch: bool) -> Wanted {
        let Some((time, wanted)) = self.wanted.front().copied().filter(|_| is_watch) else { return pending().await };
        sleep(time).await;
        self.wanted.pop_front();
        wanted
    }
}

/// Query of a request, without the parameters that all have.
fn brief(target: &str) -> String {
    let is_brief =
        |parameter: &&str| ["fieldSelector", "resourceVersion="].iter().any(|name| parameter.starts_with(name));
    let query = target.split_once('?').unwrap().1;
    let operation = if query.contains("watch=true") { "watch" } else { "list" };
    [operation].into_iter().chain(query.split('&').filter(is_brief)).collect::<Vec<_>>().join(" ")
}

fn name(object: &Decoded<Service>) -> &str {
    &object.meta().name
}

fn object(name: &str, version: &str) -> serde_json::Value {
    json!({"metadata": {"name": name, "resourceVersion": version}})
}

/// List of one object, at this version.
fn list_in(view: &'static str, version: &str) -> Response {
    let list = json!({"items": [object("a", "3")], "metadata": {"resourceVersion": version}});
    Response::Sent(view, list.to_string(), End::Regular)
}

fn list(version: &str) -> Response {
    list_in("", version)
}

/// Watch with these events: type, name and version.
fn watch_in(view: &'static str, events: &[(&str, &str, &str)], end: End) -> Response {
    let line = |(change, name, version): &(&str, &str, &str)| {
        format!("{}\n", json!({"type": change, "object": object(name, version)}))
    };
    Response::Sent(view, events.iter().map(line).collect(), end)
}

fn watch(events: &[(&str, &str, &str)], end: End) -> Response {
    watch_in("", events, end)
}

/// Time of a script in which no silence is too long.
const SHORTER: Duration = Duration::from_secs(200);

/// Plays the script to its end and returns the transcript.
async fn play(responses: impl IntoIterator<Item = Response>) -> Vec<String> {
    play_for(SHORTER, responses, [], false).await
}

async fn play_for(
    time: Duration,
    responses: impl IntoIterator<Item = Response>,
    wanted: impl IntoIterator<Item = (Duration, Wanted)>,
    is_superseded: bool,
) -> Vec<String> {
    let transcript = Transcript::default();
    let responses = Mutex::new(responses.into_iter().collect());
    let script = Script { responses, transcript: transcript.clone(), is_superseded };
    let mut recorder = Recorder { transcript: transcript.clone(), wanted: wanted.into_iter().collect() };
    let selectors = Selectors { labels: "", fields: FieldSelector::Optional("a=b") };
    let following = follow_resource::<Service, _>(&script, selectors, &mut recorder);
    timeout(time, following).await.unwrap_err();
    std::mem::take(&mut transcript.lock().0)
}

#[tokio::test(start_paused = true)]
async fn a_list_is_followed_by_watches_that_are_resumed_where_they_ended() {
    let first = watch(&[("ADDED", "b", "6")], End::Regular);
    let second = watch(&[("DELETED", "b", "7"), ("BOOKMARK", "", "9")], End::Cut);
    assert_eq!(
        play([list("5"), first, second]).await,
        [
            "list fieldSelector=a%3Db resourceVersion=0",
            "started",
            "listed a",
            "done 5",
            "watch fieldSelector=a%3Db resourceVersion=5",
            "applied b",
            "watch fieldSelector=a%3Db resourceVersion=6",
            "deleted b",
            "bookmark 9",
            "watch fieldSelector=a%3Db resourceVersion=9",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn an_older_server_is_asked_without_the_optional_selector() {
    assert_eq!(
        play([Response::Refused(400), list("5")]).await,
        [
            "list fieldSelector=a%3Db resourceVersion=0",
            "list resourceVersion=0",
            "started",
            "listed a",
            "done 5",
            "watch resourceVersion=5",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_published_before_the_pause_and_a_list_begins_anew() {
    let cut = Response::Sent("", format!(r#"{{"items":[{}"#, object("a", "3")), End::Cut);
    assert_eq!(
        play_for(Operation::List.silence_max(), [Response::Unreachable, cut, Response::Refused(503)], [], false).await,
        [
            "list fieldSelector=a%3Db resourceVersion=0",
            "failed cannot list services at https://api:6443/: no route; trying again",
            "pause",
            "list fieldSelector=a%3Db resourceVersion=0",
            "started",
            "listed a",
            "failed cannot list services at https://api:6443/: the connection was closed in the middle of the \
             response; trying again",
            "pause",
            "list fieldSelector=a%3Db resourceVersion=0",
            "failed cannot list services at https://api:6443/: m (503); trying again",
            "pause",
            "list fieldSelector=a%3Db resourceVersion=0",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn after_a_watch_that_is_too_old_comes_a_list() {
    assert_eq!(
        play([list("5"), Response::Refused(410), list("6")]).await,
        [
            "list fieldSelector=a%3Db resourceVersion=0",
            "started",
            "listed a",
            "done 5",
            "watch fieldSelector=a%3Db resourceVersion=5",
            "pause",
            "list fieldSelector=a%3Db resourceVersion=5",
            "started",
            "listed a",
            "done 6",
            "watch fieldSelector=a%3Db resourceVersion=6",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_another_view_accepts_becomes_a_list() {
    // The response in the other view is not read.
    let other = watch_in("x", &[("ADDED", "b", "6")], End::Regular);
    let last = watch_in("x", &[("BOOKMARK", "", "9")], End::Regular);
    assert_eq!(
        play([list("5"), other, list_in("x", "7"), last]).await,
        [
            "list fieldSelector=a%3Db resourceVersion=0",
            "started",
            "listed a",
            "done 5",
            "watch fieldSelector=a%3Db resourceVersion=5",
            "view x",
            "pause",
            "list fieldSelector=a%3Db resourceVersion=5",
            "view x",
            "started",
            "listed a",
            "done 7",
            "watch fieldSelector=a%3Db resourceVersion=7",
            "view x",
            "bookmark 9",
            "watch fieldSelector=a%3Db resourceVersion=9",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_resumed_watch_that_shows_nothing_becomes_a_list() {
    let (ended, silent) = (watch(&[], End::Regular), watch(&[], End::Silence));
    assert_eq!(
        play([list("5"), ended, silent, Response::Refused(504), list("4")]).await,
        [
            "list fieldSelector=a%3Db resourceVersion=0",
            "started",
            "listed a",
            "done 5",
            "watch fieldSelector=a%3Db resourceVersion=5",
            "pause",
            "watch fieldSelector=a%3Db resourceVersion=5",
            "pause",
            "list fieldSelector=a%3Db resourceVersion=5",
            "failed cannot list services at https://api:6443/: m (504); trying again",
            "pause",
            "list fieldSelector=a%3Db resourceVersion=0",
            "started",
            "listed a",
            "done 4",
            "watch fieldSelector=a%3Db resourceVersion=4",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_wanted_does_not_wait_for_a_watch_on_a_better_connection() {
    let wanted = (Duration::ZERO, Wanted::List);
    let transcript = play_for(SHORTER, [list("5"), watch(&[], End::Silence)], [wanted], true).await;
    assert_eq!(transcript.last().map(String::as_str), Some("list fieldSelector=a%3Db resourceVersion=0"));
    let watches = transcript.iter().filter(|line| line.starts_with("watch")).count();
    assert_eq!(watches, 1, "{transcript:?}");
}

#[tokio::test(start_paused = true)]
async fn the_report_of_a_silent_server_is_complete_whatever_is_wanted_meanwhile() {
    let silence = Operation::Watch.silence_max();
    let wanted = [Wanted::List, Wanted::Comparison(1)].map(|wanted| (silence + Duration::from_millis(500), wanted));
    for wanted in wanted {
        let transcript = play_for(2 * silence, [list("5"), watch(&[], End::Silence)], [wanted], false).await;
        assert_eq!(transcript.iter().filter(|line| *line == "reported").count(), 1, "{transcript:?}");
    }
}
