//! A client of two replicas: it lists and watches, resumes where it was, and goes to the other one when one fails.

use std::{
    fmt,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use serde_json::Value;

use super::journal::{Contents, Kind, Scope, key};
use crate::client::{Client, Watching};

/// Time between two looks at a watch.
const POLL: Duration = Duration::from_millis(10);

/// A client of both replicas.
pub(super) struct Follower<'s> {
    pub(super) scope: Scope,
    pub(super) kind: Kind,
    /// The client at each replica.
    pub(super) clients: [Client<'s>; 2],
    seen: Mutex<Seen>,
    /// Replica to which the client is to go now.
    moves_to: Mutex<Option<usize>>,
}

/// States that a client has seen.
#[derive(Default)]
pub(super) struct Seen {
    /// The objects that it knows.
    pub(super) known: Contents,
    /// All states that it was shown, in order; without a content, an object that is gone.
    pub(super) shown: Vec<(String, Option<String>)>,
    pub(super) lists: usize,
    pub(super) watches: usize,
    /// Requests that failed.
    pub(super) failures: usize,
}

/// Where a client is.
#[derive(Default)]
struct Place {
    replica: usize,
    /// Last version; empty before the first list.
    version: String,
    /// View that the last list has shown. In another one, the version means nothing.
    view: String,
    has_list: bool,
    watching: Option<Watching>,
    /// Bytes of the watch that were read.
    bytes_read: usize,
}

impl<'s> Follower<'s> {
    pub(super) fn new(scope: Scope, kind: Kind, clients: [Client<'s>; 2]) -> Self {
        Self { scope, kind, clients, seen: Mutex::default(), moves_to: Mutex::default() }
    }

    pub(super) fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap()
    }

    /// Has the client lose its connection, and go to a replica, which may be the same.
    pub(super) fn disconnect(&self, replica: usize) {
        *self.moves_to.lock().unwrap() = Some(replica);
    }

    /// Follows the objects until the test is over.
    pub(super) fn follow(&self, is_over: &AtomicBool) {
        let mut place = Place::default();
        while !is_over.load(Ordering::Relaxed) {
            if let Some(replica) = self.moves_to.lock().unwrap().take() {
                (place.replica, place.watching) = (replica, None);
            }
            match place.watching.take() {
                Some(watching) => self.read(watching, &mut place),
                None if place.has_list => self.watch(&mut place),
                None => self.list(&mut place),
            }
            thread::sleep(POLL);
        }
    }

    fn watch(&self, place: &mut Place) {
        self.seen().watches += 1;
        let target =
            format!("{}?watch=true&allowWatchBookmarks=true&resourceVersion={}", self.kind.path(), place.version);
        place.bytes_read = 0;
        place.watching = Some(self.clients[place.replica].watch(&target));
    }

    /// Lists anew, not older than the last version.
    fn list(&self, place: &mut Place) {
        let mut target = self.kind.path().to_owned();
        if !place.version.is_empty() {
            target += &format!("?resourceVersion={}&resourceVersionMatch=NotOlderThan", place.version);
        }
        let response = self.clients[place.replica].try_get(&target);
        let Some(response) = response.filter(|response| response.code == 200) else { return self.leave(place) };
        let list = response.json();
        let contents = self.kind.contents(&list);
        let mut seen = self.seen();
        seen.lists += 1;
        // A slice that is missing may only be one that the client's policies no longer name.
        if self.kind == Kind::Policies {
            let known = std::mem::take(&mut seen.known);
            let gone = known.into_keys().filter(|name| !contents.contains_key(name));
            seen.shown.extend(gone.map(|name| (name, None)));
        }
        seen.shown.extend(contents.iter().map(|(name, content)| (name.clone(), Some(content.clone()))));
        seen.known = contents;
        (place.version, place.view) = (version(&list), response.header("cproxy-view").to_owned());
        place.has_list = true;
    }

    /// Reads the events of a watch since the last look.
    fn read(&self, mut watching: Watching, place: &mut Place) {
        let has_ended = watching.has_ended();
        let (events, bytes_read) = watching.events_after(place.bytes_read);
        place.bytes_read = bytes_read;
        if !has_ended && events.is_empty() {
            place.watching = Some(watching);
            return;
        }
        let Some(response) = watching.response() else { return self.leave(place) };
        match response.code {
            200 => {}
            410 => return place.has_list = false,
            429 | 503 | 504 => return self.leave(place),
            _ => panic!("{}", response.text()),
        }
        if response.header("cproxy-view") != place.view {
            place.has_list = false;
            return;
        }
        for event in events {
            if event["type"] == "ERROR" {
                assert_eq!(event["object"]["code"], 410, "{event}");
                place.has_list = false;
                return;
            }
            self.apply(&event, place);
        }
        place.watching = Some(watching).filter(|_| !has_ended);
    }

    fn apply(&self, event: &Value, place: &mut Place) {
        let object = &event["object"];
        place.version = version(object);
        let mut seen = self.seen();
        match event["type"].as_str().unwrap() {
            "BOOKMARK" => {}
            "DELETED" => {
                seen.known.remove(&key(object));
                if self.kind == Kind::Policies {
                    seen.shown.push((key(object), None));
                }
            }
            "ADDED" | "MODIFIED" => {
                let content = self.kind.content(object);
                seen.known.insert(key(object), content.clone());
                seen.shown.push((key(object), Some(content)));
            }
            other => panic!("{other}: {event}"),
        }
    }

    /// Goes to the other replica after a failure.
    fn leave(&self, place: &mut Place) {
        self.seen().failures += 1;
        place.replica = 1 - place.replica;
    }
}

fn version(object: &Value) -> String {
    object["metadata"]["resourceVersion"].as_str().unwrap().to_owned()
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shown, lists, watches, failures, .. } = self;
        write!(f, "{} states, {lists} lists, {watches} watches, {failures} failed requests", shown.len())
    }
}
