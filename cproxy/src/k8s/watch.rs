//! Two watches, and one of the own Node where its name is known, as one stream of events.
//!
//! Lists are streamed where the server can: as the events with which a watch begins. Where it refuses, they come from its
//! cache, never as a quorum read from etcd. Either way each object is read and handed on by itself: what is held of a
//! list is its longest object.
//!
//! The agent can do without the Node: where it may not be read, or the API has no Nodes, an empty list stands for it. A
//! server that cannot be reached says nothing of the kind: then the agent waits, as for the others.

use std::{collections::BTreeMap, time::Duration};

use http::Uri;
use kube::{Client, core::Status};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::{Notify, mpsc};

use super::{
    answer::Answer,
    failure::{Cause, Failure, Verb},
    kinds::Watched,
    objects::{EndpointSlice, Node, Service},
    pause::{Backoff, jitter},
    sent::Sent,
    split::{Items, LONGEST_BYTES, Lines, Part, SplitError},
};
use crate::{
    model::{Event, object_name},
    network_changes::NetworkChanges,
};

const RELIST_JITTER_MAX: Duration = Duration::from_millis(500);

/// The server itself ends each watch after this; what is alive says something before.
const WATCH_SECONDS: &str = "290";
const WATCH_SILENCE_MAX: Duration = Duration::from_secs(310);
/// In the middle of a list, a server that is alive hardly pauses at all.
const LIST_SILENCE_MAX: Duration = Duration::from_secs(60);

/// A network that does not come to rest is no reason to ask more often than this.
const PAUSE_LEAST: Duration = Duration::from_millis(200);

/// How many objects a server that lists by pages is to send at once. Pages are not what bounds memory here, and each is
/// one more request.
const PAGE_ITEMS: &str = "500";

/// The annotation of the bookmark that ends a streamed list.
const LIST_END: &str = "k8s.io/initial-events-end";

/// What is refused may be granted later: it is asked for again after this, and then ever more seldom.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);
const REFUSED_PAUSE_MAX: Duration = Duration::from_secs(300);

/// Follows the API server for ever, with back-off; ends when nobody listens any more. Without a node's name no Node is
/// asked for.
pub async fn watch(client: Client, url: Uri, node_name: Option<String>, events: mpsc::Sender<Vec<Event>>) {
    let source = Source { client, url, events, is_in: Notify::new() };
    // The selectors of kube-proxy 1.36 (cmd/kube-proxy/app/server.go).
    let services = Selectors { labels: "!service.kubernetes.io/service-proxy-name", fields: "spec.clusterIP!=None" };
    let slices = Selectors { labels: "!service.kubernetes.io/headless", fields: "" };
    let node = async {
        let Some(name) = node_name else { return };
        // A server that is just starting refuses everything: who is let in elsewhere, and not here, may not read Nodes.
        source.is_in.notified().await;
        source.follow::<Node>(Selectors { labels: "", fields: &format!("metadata.name={name}") }).await;
    };
    tokio::select! {
        _ = async { tokio::join!(source.follow::<Service>(services), source.follow::<EndpointSlice>(slices), node) } => {}
        () = source.events.closed() => {}
    }
}

/// A server that cannot be reached may be there as soon as the VM has its network.
async fn pause_unless_network_changes(pause: Duration) {
    let changes = NetworkChanges::open();
    let least = pause.min(PAUSE_LEAST);
    tokio::time::sleep(least).await;
    let changed = async {
        match changes {
            Ok(changes) if changes.wait().await.is_ok() => {}
            // Without word of changes, time tells.
            _ => std::future::pending().await,
        }
    };
    tokio::time::timeout(pause.saturating_sub(least), changed).await.ok();
}

/// Which objects of a kind are asked for.
#[derive(Clone, Copy)]
struct Selectors<'a> {
    labels: &'a str,
    fields: &'a str,
}

impl Selectors<'_> {
    /// The path and query of a request.
    fn target<K: Watched>(self, more: &[(&str, &str)]) -> String {
        let mut target = K::url_path(&(), None);
        let selectors = [("labelSelector", self.labels), ("fieldSelector", self.fields)];
        let selectors = selectors.into_iter().filter(|(_, value)| !value.is_empty());
        for (index, (name, value)) in selectors.chain(more.iter().copied()).enumerate() {
            target.push(if index == 0 { '?' } else { '&' });
            target.push_str(name);
            target.push('=');
            push_encoded(&mut target, value);
        }
        target
    }
}

/// Percent-encodes all but what needs it nowhere.
fn push_encoded(target: &mut String, value: &str) {
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            target.push(byte.into());
        } else {
            target.push_str(&format!("%{byte:02X}"));
        }
    }
}

/// An API server.
struct Source {
    client: Client,
    url: Uri,
    events: mpsc::Sender<Vec<Event>>,
    /// Told whenever a list is complete.
    is_in: Notify,
}

/// How one kind has been doing.
struct Course {
    /// From where a watch can go on; nothing: there is no complete list yet.
    version: Option<String>,
    can_stream: bool,
    is_listed: bool,
    /// Something is in the list so far.
    has_listed_any: bool,
    /// There are objects.
    knows: bool,
    backoff: Backoff,
    refused_pause: Duration,
    /// What was last said of a kind that the agent can do without.
    said: Option<String>,
}

/// What a list or watch brings.
enum Word<K> {
    ListStarted,
    Listed(Sent<K>),
    ListDone,
    Applied(Sent<K>),
    Deleted(Sent<K>),
}

/// One line of a watch.
#[derive(Deserialize)]
struct Line<'a> {
    #[serde(rename = "type")]
    change: Change,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum Change {
    Added,
    Modified,
    Deleted,
    Bookmark,
    Error,
}

#[derive(Deserialize)]
struct Bookmark {
    metadata: BookmarkMetadata,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BookmarkMetadata {
    resource_version: Option<String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMetadata {
    resource_version: Option<String>,
    /// Of a list by pages, what to ask for the next one with.
    #[serde(rename = "continue")]
    next: Option<String>,
}

impl From<SplitError> for Cause {
    fn from(error: SplitError) -> Self {
        Self::Split(error)
    }
}

impl From<serde_json::Error> for Cause {
    fn from(error: serde_json::Error) -> Self {
        Self::Unreadable(error)
    }
}

/// What may be empty, and then is as good as missing.
fn some(text: Option<String>) -> Result<String, Cause> {
    text.filter(|text| !text.is_empty()).ok_or(Cause::NoVersion)
}

impl Source {
    async fn follow<K: Watched>(&self, selectors: Selectors<'_>) {
        let mut course = Course::new();
        loop {
            if let Err(failure) = self.follow_once::<K>(selectors, &mut course).await {
                self.recover::<K>(&failure, &mut course).await;
            }
        }
    }

    /// Lists, if need be, and watches until the server ends that.
    async fn follow_once<K: Watched>(&self, selectors: Selectors<'_>, course: &mut Course) -> Result<(), Failure> {
        if course.version.is_none() && !course.can_stream {
            let listed = self.list::<K>(selectors, course).await;
            listed.map_err(|cause| Failure { verb: Verb::List, cause })?;
        }
        match self.watch::<K>(selectors, course).await {
            // A watch that has begun is resumed, as if the server had ended it in good order.
            Err(Cause::Cut) if course.version.is_some() => Ok(()),
            watched => watched.map_err(|cause| Failure { verb: Verb::Watch, cause }),
        }
    }

    /// Makes sure of a pause before the next attempt, and of what that is to be.
    async fn recover<K: Watched>(&self, failure: &Failure, course: &mut Course) {
        if failure.is_gone() {
            tracing::info!("the watch of {} is too old to be resumed: listing anew", K::plural(&()));
            course.version = None;
            return tokio::time::sleep(jitter(RELIST_JITTER_MAX)).await;
        }
        if course.version.is_none() && course.can_stream && failure.refuses_streaming() {
            tracing::info!("the API server does not stream lists of {}: listing from its cache", K::plural(&()));
            course.can_stream = false;
            return;
        }
        let message = failure.describe::<K>(&self.url);
        if let Some(lost) = K::LOST_WITHOUT.filter(|_| failure.is_refused()) {
            return self.do_without::<K>(course, &message, lost).await;
        }
        tracing::warn!("{message}; trying again");
        if matches!(failure.cause, Cause::NoVersion | Cause::Silent(_)) {
            course.version = None;
        }
        match failure.cause {
            Cause::Connection(_) => pause_unless_network_changes(course.backoff.next()).await,
            _ => tokio::time::sleep(course.backoff.next()).await,
        }
    }

    /// Lists from the server's cache, which may send all at once or by pages.
    async fn list<K: Watched>(&self, selectors: Selectors<'_>, course: &mut Course) -> Result<(), Cause> {
        self.tell::<K>(Word::ListStarted, selectors, course).await;
        let mut page = self.list_page::<K>(("resourceVersion", "0"), selectors, course).await?;
        while let Some(next) = page.next.filter(|next| !next.is_empty()) {
            page = self.list_page::<K>(("continue", &next), selectors, course).await?;
        }
        course.version = Some(some(page.resource_version)?);
        self.tell::<K>(Word::ListDone, selectors, course).await;
        Ok(())
    }

    async fn list_page<K: Watched>(
        &self,
        start: (&str, &str),
        selectors: Selectors<'_>,
        course: &mut Course,
    ) -> Result<ListMetadata, Cause> {
        let target = selectors.target::<K>(&[("limit", PAGE_ITEMS), start]);
        let mut answer = Answer::get(&self.client, &target, LIST_SILENCE_MAX).await?;
        let (mut items, mut metadata) = (Items::new(LONGEST_BYTES), ListMetadata::default());
        while let Some(chunk) = answer.chunk().await? {
            let mut rest = &*chunk;
            while let Some(part) = items.next(&mut rest)? {
                match part {
                    Part::Metadata(json) => metadata = serde_json::from_slice(json)?,
                    Part::Item(json) => {
                        let json = str::from_utf8(json).map_err(|_| SplitError::NoList("it is not UTF-8"))?;
                        let word = Word::Listed(Sent::<K>::read(json)?);
                        self.tell(word, selectors, course).await;
                    }
                }
                answer.heard(LIST_SILENCE_MAX);
            }
        }
        items.finish()?;
        Ok(metadata)
    }

    /// Watches from where the course is; from nowhere, this is a streamed list first.
    async fn watch<K: Watched>(&self, selectors: Selectors<'_>, course: &mut Course) -> Result<(), Cause> {
        let begin = [("watch", "true"), ("timeoutSeconds", WATCH_SECONDS), ("allowWatchBookmarks", "true")];
        let target = match &course.version {
            Some(version) => selectors.target::<K>(&[&begin[..], &[("resourceVersion", version)]].concat()),
            None => {
                let stream = [("sendInitialEvents", "true"), ("resourceVersionMatch", "NotOlderThan")];
                selectors.target::<K>(&[&begin[..], &stream, &[("resourceVersion", "0")]].concat())
            }
        };
        let mut answer = Answer::get(&self.client, &target, course.silence_max()).await?;
        if course.version.is_none() {
            self.tell::<K>(Word::ListStarted, selectors, course).await;
        }
        let mut lines = Lines::new(LONGEST_BYTES);
        while let Some(chunk) = answer.chunk().await? {
            let mut rest = &*chunk;
            while let Some(line) = lines.next(&mut rest)? {
                self.read_line::<K>(line, selectors, course).await?;
                answer.heard(course.silence_max());
            }
        }
        self.read_line::<K>(lines.rest(), selectors, course).await?;
        if course.version.is_none() { Err(Cause::Incomplete) } else { Ok(()) }
    }

    async fn read_line<K: Watched>(
        &self,
        line: &[u8],
        selectors: Selectors<'_>,
        course: &mut Course,
    ) -> Result<(), Cause> {
        if line.trim_ascii().is_empty() {
            return Ok(());
        }
        let Line { change, object } = serde_json::from_slice(line)?;
        let word = match (change, course.version.is_some()) {
            (Change::Error, _) => return Err(Cause::Event(serde_json::from_str::<Box<Status>>(object.get())?)),
            (Change::Bookmark, is_listed) => {
                let bookmark: Bookmark = serde_json::from_str(object.get())?;
                if !is_listed && !bookmark.metadata.annotations.contains_key(LIST_END) {
                    return Err(Cause::NotStreamed);
                }
                course.version = Some(some(bookmark.metadata.resource_version)?);
                if is_listed {
                    course.backoff = Backoff::new();
                    return Ok(());
                }
                Word::ListDone
            }
            (Change::Added | Change::Modified, false) => Word::Listed(Sent::<K>::read(object.get())?),
            // There is none of these in a list.
            (Change::Deleted, false) => return Ok(()),
            (change, true) => {
                let object = Sent::<K>::read(object.get())?;
                course.version = Some(some(object.meta().resource_version.clone())?);
                if matches!(change, Change::Deleted) { Word::Deleted(object) } else { Word::Applied(object) }
            }
        };
        self.tell(word, selectors, course).await;
        Ok(())
    }

    /// Hands on what has come in.
    async fn tell<K: Watched>(&self, word: Word<K>, selectors: Selectors<'_>, course: &mut Course) {
        course.note(&word);
        if matches!(word, Word::ListDone) {
            self.is_in.notify_one();
            if let Some(lost) = K::LOST_WITHOUT.filter(|_| !course.knows) {
                course.say(format!("there is no {} with {}: until there is, {lost}", K::kind(&()), selectors.fields));
            }
        }
        if let Some(event) = translate(word) {
            self.send(vec![event]).await;
        }
    }

    /// Waits for room. If nobody listens any more, [`watch`] ends by itself.
    async fn send(&self, events: Vec<Event>) {
        self.events.send(events).await.ok();
    }

    /// The kind is not to be had. What is known of it stays, as it does when the server goes; if nothing is, there is none.
    async fn do_without<K: Watched>(&self, course: &mut Course, message: &str, lost: &str) {
        let meanwhile = if course.knows { "what is known of them stays" } else { lost };
        course.say(format!("{message}; until then {meanwhile}"));
        if !course.is_listed {
            course.is_listed = true;
            self.send(vec![Event::ListStarted(K::KIND), Event::ListDone(K::KIND)]).await;
        }
        tokio::time::sleep(course.refused_pause + jitter(RELIST_JITTER_MAX)).await;
        course.refused_pause = (course.refused_pause * 2).min(REFUSED_PAUSE_MAX);
    }
}

impl Course {
    fn new() -> Self {
        Self {
            version: None,
            can_stream: true,
            is_listed: false,
            has_listed_any: false,
            knows: false,
            backoff: Backoff::new(),
            refused_pause: REFUSED_PAUSE,
            said: None,
        }
    }

    /// How long a server that is alive may say nothing.
    fn silence_max(&self) -> Duration {
        if self.version.is_none() { LIST_SILENCE_MAX } else { WATCH_SILENCE_MAX }
    }

    fn note<K>(&mut self, word: &Word<K>) {
        match word {
            Word::ListStarted => self.has_listed_any = false,
            Word::Listed(_) => self.has_listed_any = true,
            Word::ListDone => (self.is_listed, self.knows) = (true, self.has_listed_any),
            Word::Applied(_) => self.knows = true,
            // Of what the agent can do without there is one.
            Word::Deleted(_) => self.knows = false,
        }
        if !matches!(word, Word::ListStarted | Word::Listed(_)) {
            self.backoff = Backoff::new();
        }
        // After a list that was not streamed, the watch may still be refused.
        let is_watched = match word {
            Word::ListStarted | Word::Listed(_) => false,
            Word::ListDone => self.can_stream,
            Word::Applied(_) | Word::Deleted(_) => true,
        };
        if is_watched {
            self.refused_pause = REFUSED_PAUSE;
            self.said = self.said.take().filter(|_| !self.knows);
        }
    }

    /// Says the same once.
    fn say(&mut self, message: String) {
        if self.said.as_ref() == Some(&message) {
            tracing::debug!("still {message}");
        } else {
            tracing::warn!("{message}");
            self.said = Some(message);
        }
    }
}

fn translate<K: Watched>(word: Word<K>) -> Option<Event> {
    Some(match word {
        Word::ListStarted => Event::ListStarted(K::KIND),
        Word::Listed(object) | Word::Applied(object) => match object {
            Sent::Read(object) => K::applied(object),
            Sent::Unreadable(metadata, message) => {
                Event::Unreadable { kind: K::KIND, name: object_name(&metadata), message }
            }
        },
        Word::ListDone => Event::ListDone(K::KIND),
        Word::Deleted(object) => return K::deleted(object.meta()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_once_is_said_again_after_it_was_mended() {
        let node = || Sent::Read(Box::<Node>::default());
        let mut course = Course::new();
        let mut after = |word| {
            course.said = Some("not permitted".to_owned());
            course.refused_pause = REFUSED_PAUSE_MAX;
            course.note::<Node>(&word);
            (course.said.is_none(), course.refused_pause == REFUSED_PAUSE)
        };
        assert_eq!(after(Word::ListStarted), (false, false));
        assert_eq!(after(Word::ListDone), (false, true), "there is no such Node");
        assert_eq!(after(Word::Applied(node())), (true, true));
        assert_eq!(after(Word::Listed(node())), (false, false));
        assert_eq!(after(Word::ListDone), (true, true));
        course.can_stream = false;
        course.refused_pause = REFUSED_PAUSE_MAX;
        course.note::<Node>(&Word::ListDone);
        assert_eq!(course.refused_pause, REFUSED_PAUSE_MAX, "the watch may still be refused");
    }

    #[test]
    fn pauses_grow_until_a_list_is_complete_or_something_changes() {
        let mut course = Course::new();
        let mut is_reset = |word| {
            course.backoff.next();
            course.note::<Node>(&word);
            course.backoff == Backoff::new()
        };
        assert!(!is_reset(Word::ListStarted) && !is_reset(Word::Listed(Sent::Read(Box::default()))));
        assert!(is_reset(Word::ListDone) && is_reset(Word::Deleted(Sent::Read(Box::default()))));
    }

    #[test]
    fn a_list_may_be_silent_for_less_time_than_a_watch() {
        let mut course = Course::new();
        assert_eq!(course.silence_max(), LIST_SILENCE_MAX);
        course.version = Some("7".to_owned());
        assert_eq!(course.silence_max(), WATCH_SILENCE_MAX);
    }

    #[test]
    fn what_is_asked_for_is_encoded() {
        let services = Selectors { labels: "!a/b", fields: "spec.clusterIP!=None" };
        assert_eq!(
            services.target::<Service>(&[("limit", "500"), ("continue", "e+/=&é")]),
            "/api/v1/services?labelSelector=%21a%2Fb&fieldSelector=spec.clusterIP%21%3DNone&limit=500\
             &continue=e%2B%2F%3D%26%C3%A9"
        );
        let slices = Selectors { labels: "", fields: "" };
        assert_eq!(slices.target::<EndpointSlice>(&[("a", "b")]), "/apis/discovery.k8s.io/v1/endpointslices?a=b");
    }
}
