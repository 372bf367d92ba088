//! Two watches, and one of the own Node where its name is known, as one stream of events.
//!
//! Lists are streamed where the server can: as the events with which a watch begins. Where it refuses, they come from its
//! cache, never as a quorum read from etcd. Either way each object is read and handed on by itself: what is held of a
//! list is its longest object.
//!
//! The agent can do without the Node: where it may not be read, or the API has no Nodes, an empty list stands for it. A
//! server that cannot be reached says nothing of the kind: then the agent waits, as for the others.

use std::time::Duration;

use cproxy_core::{
    Event,
    api::{EndpointSlice, Node, Service},
    object_name,
};
use http::Uri;
use kube::Client;
use serde::Deserialize;
use tokio::sync::{Notify, mpsc};

use super::{
    backoff::jitter,
    decode::Decoded,
    failure::{Cause, Failure, Remedy, Step},
    head::Head,
    last_heard::LastHeard,
    line::Line,
    resources::WatchedResource,
    response::Response,
    selectors::{Fields, Selectors},
    split::{Items, LONGEST_BYTES, Lines, Part, Piece, SplitError},
    watch_state::{LIST_SILENCE_MAX, WATCH_SECONDS, WatchEvent, WatchState},
};
use crate::network_changes::NetworkChanges;

/// A network that does not come to rest is no reason to ask more often than this.
const PAUSE_LEAST: Duration = Duration::from_millis(200);

/// Agents that were all told to wait for so long do not come back together.
const RETRY_AFTER_JITTER_MAX: Duration = Duration::from_secs(1);

/// How many objects a server that lists by pages is to send at once. Pages are not what bounds memory here, and each is
/// one more request.
const PAGE_ITEMS: &str = "500";

/// Follows the API server for ever, with back-off; ends when nobody listens any more. Without a node's name no Node is
/// asked for.
pub async fn watch(
    client: Client,
    url: Uri,
    node_name: Option<String>,
    heard: LastHeard,
    events: mpsc::Sender<Vec<Event>>,
) {
    let watcher = ApiWatcher { client, url, heard, events, is_in: Notify::new() };
    // The selectors of kube-proxy 1.36 (cmd/kube-proxy/app/server.go). Headless Services have no frontends anyway, and
    // Kubernetes before 1.31 cannot leave them out.
    let services = Selectors {
        labels: "!service.kubernetes.io/service-proxy-name",
        fields: Fields::Sparing("spec.clusterIP!=None"),
    };
    let slices = Selectors { labels: "!service.kubernetes.io/headless", fields: Fields::Any };
    let node = async {
        let Some(name) = node_name else { return };
        // A server that is just starting refuses everything: who is let in elsewhere, and not here, may not read Nodes.
        watcher.is_in.notified().await;
        let own = Selectors { labels: "", fields: Fields::Only(&format!("metadata.name={name}")) };
        watcher.follow::<Node>(own).await;
    };
    tokio::select! {
        _ = async { tokio::join!(watcher.follow::<Service>(services), watcher.follow::<EndpointSlice>(slices), node) } => {}
        () = watcher.events.closed() => {}
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

/// An API server.
struct ApiWatcher {
    client: Client,
    url: Uri,
    heard: LastHeard,
    events: mpsc::Sender<Vec<Event>>,
    /// Told whenever a list is complete.
    is_in: Notify,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMetadata {
    resource_version: Option<String>,
    /// Of a list by pages, what to ask for the next one with.
    #[serde(rename = "continue")]
    next: Option<String>,
}

/// What may be empty, and then is as good as missing.
fn some(text: Option<String>) -> Result<String, Cause> {
    text.filter(|text| !text.is_empty()).ok_or(Cause::NoVersion)
}

impl ApiWatcher {
    async fn follow<K: WatchedResource>(&self, selectors: Selectors<'_>) {
        let mut state = WatchState::new();
        loop {
            let followed = match state.step() {
                Step::List => self.list::<K>(selectors, &mut state).await,
                Step::Stream | Step::Watch => self.watch::<K>(selectors, &mut state).await,
            };
            if let Err(cause) = followed {
                // A streamed list that is complete has become a watch.
                let failure = Failure { step: state.step(), cause };
                self.recover::<K>(&failure, selectors, &mut state).await;
            }
        }
    }

    /// Makes sure of what the next attempt is to be, and of a pause before it.
    async fn recover<K: WatchedResource>(&self, failure: &Failure, selectors: Selectors<'_>, state: &mut WatchState) {
        let kinds = K::PLURAL;
        let message = failure.describe::<K>(&self.url);
        match failure.remedy(state.narrow(selectors).is_sparing(), K::LOST_WITHOUT.is_some()) {
            Remedy::Resume => {}
            Remedy::AskForAllFields => {
                let fields = selectors.fields.text();
                tracing::info!("{message}: asking without fieldSelector {fields}, as Kubernetes before 1.31 wants it");
                state.asks.is_sparing = false;
            }
            Remedy::ListCached => {
                if failure.is_of_streaming() {
                    tracing::info!("the API server does not stream lists of {kinds}: listing from its cache");
                } else {
                    tracing::warn!("{message}; trying again with a list from its cache");
                }
                state.asks.is_streamed = false;
            }
            Remedy::Expire => {
                tracing::info!("the watch of {kinds} is too old to be resumed: listing anew");
                tokio::time::sleep(state.expire()).await;
            }
            Remedy::DoWithout => self.do_without::<K>(state, &message).await,
            Remedy::Retry(again) => {
                let pause = state.retry(again).max(patience(failure));
                let is_relist = failure.step == Step::Watch && state.step() != Step::Watch;
                tracing::warn!("{message}; {}", if is_relist { "listing anew" } else { "trying again" });
                if failure.is_of_connection() {
                    pause_unless_network_changes(pause).await;
                } else {
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    /// Lists from the server's cache, which may send all at once or by pages.
    async fn list<K: WatchedResource>(&self, selectors: Selectors<'_>, state: &mut WatchState) -> Result<(), Cause> {
        self.tell::<K>(WatchEvent::ListStarted, selectors, state).await;
        let mut page = self.list_page::<K>(("resourceVersion", "0"), selectors, state).await?;
        while let Some(next) = page.next.filter(|next| !next.is_empty()) {
            page = self.list_page::<K>(("continue", &next), selectors, state).await?;
        }
        state.version = Some(some(page.resource_version)?);
        self.tell::<K>(WatchEvent::ListDone, selectors, state).await;
        Ok(())
    }

    async fn list_page<K: WatchedResource>(
        &self,
        start: (&str, &str),
        selectors: Selectors<'_>,
        state: &mut WatchState,
    ) -> Result<ListMetadata, Cause> {
        let target = state.narrow(selectors).target::<K>(&[("limit", PAGE_ITEMS), start]);
        let mut answer = Response::get(&self.client, &target, LIST_SILENCE_MAX).await?;
        let (mut items, mut metadata) = (Items::new(LONGEST_BYTES), ListMetadata::default());
        while let Some(chunk) = answer.chunk().await? {
            let mut rest = &*chunk;
            while let Some(part) = items.next(&mut rest)? {
                match part {
                    Part::Metadata(piece) => metadata = list_metadata::<K>(piece)?,
                    Part::Item(piece) => self.tell(WatchEvent::Listed(item::<K>(piece)?), selectors, state).await,
                }
                answer.heard(LIST_SILENCE_MAX);
            }
        }
        items.finish()?;
        Ok(metadata)
    }

    /// Watches from where the state is; from nowhere, this is a streamed list first.
    async fn watch<K: WatchedResource>(&self, selectors: Selectors<'_>, state: &mut WatchState) -> Result<(), Cause> {
        let begin = [("watch", "true"), ("timeoutSeconds", WATCH_SECONDS), ("allowWatchBookmarks", "true")];
        let target = match &state.version {
            Some(version) => {
                state.narrow(selectors).target::<K>(&[&begin[..], &[("resourceVersion", version)]].concat())
            }
            None => {
                let stream = [("sendInitialEvents", "true"), ("resourceVersionMatch", "NotOlderThan")];
                state.narrow(selectors).target::<K>(&[&begin[..], &stream, &[("resourceVersion", "0")]].concat())
            }
        };
        let mut answer = Response::get(&self.client, &target, state.silence_max()).await?;
        if state.version.is_none() {
            self.tell::<K>(WatchEvent::ListStarted, selectors, state).await;
        }
        let mut lines = Lines::new(LONGEST_BYTES);
        while let Some(chunk) = answer.chunk().await? {
            let mut rest = &*chunk;
            while let Some(line) = lines.next(&mut rest)? {
                self.read_line::<K>(line, selectors, state).await?;
                answer.heard(state.silence_max());
            }
        }
        self.read_line::<K>(lines.rest(), selectors, state).await?;
        if state.version.is_none() { Err(Cause::Incomplete) } else { Ok(()) }
    }

    async fn read_line<K: WatchedResource>(
        &self,
        line: Piece<'_>,
        selectors: Selectors<'_>,
        state: &mut WatchState,
    ) -> Result<(), Cause> {
        let Some(line) = Line::<K>::read(line)? else { return Ok(()) };
        let word = match (line, state.version.is_some()) {
            (Line::Bookmark { ends_list: false, .. }, false) => return Err(Cause::NotStreamed),
            (Line::Bookmark { version, .. }, is_listed) => {
                state.version = Some(some(version)?);
                if is_listed {
                    self.heard.record(K::RESOURCE);
                    return Ok(());
                }
                WatchEvent::ListDone
            }
            (Line::Put(object), false) => WatchEvent::Listed(object),
            (Line::Gone(object), false) => WatchEvent::Unlisted(object),
            (Line::Put(object), true) => {
                state.version = Some(some(object.meta().resource_version.clone())?);
                WatchEvent::Applied(object)
            }
            (Line::Gone(object), true) => {
                state.version = Some(some(object.meta().resource_version.clone())?);
                WatchEvent::Deleted(object)
            }
        };
        self.tell(word, selectors, state).await;
        Ok(())
    }

    /// Hands on what has come in.
    async fn tell<K: WatchedResource>(&self, word: WatchEvent<K>, selectors: Selectors<'_>, state: &mut WatchState) {
        state.note(&word);
        if matches!(word, WatchEvent::ListDone | WatchEvent::Applied(_) | WatchEvent::Deleted(_)) {
            self.heard.record(K::RESOURCE);
        }
        if matches!(word, WatchEvent::ListDone) {
            self.is_in.notify_one();
            if let Some(lost) = K::LOST_WITHOUT.filter(|_| !state.knows) {
                let own = selectors.fields.text();
                state.say(format!("there is no {} with {own}: until there is, {lost}", K::KIND));
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
    async fn do_without<K: WatchedResource>(&self, state: &mut WatchState, message: &str) {
        let lost = K::LOST_WITHOUT.unwrap_or_default();
        let meanwhile = if state.knows { "what is known of them stays" } else { lost };
        state.say(format!("{message}; until then {meanwhile}"));
        if state.stand_in() {
            self.send(vec![Event::ListStarted(K::RESOURCE), Event::ListDone(K::RESOURCE)]).await;
        }
        tokio::time::sleep(state.refused()).await;
    }
}

/// How long a server that asks for it is left alone.
fn patience(failure: &Failure) -> Duration {
    let asked = failure.retry_after();
    if asked.is_zero() { asked } else { asked + jitter(RETRY_AFTER_JITTER_MAX) }
}

fn list_metadata<K: WatchedResource>(piece: Piece<'_>) -> Result<ListMetadata, Cause> {
    let Piece::Whole(json) = piece else { return Err(Cause::too_long(LONGEST_BYTES)) };
    serde_json::from_slice(json).map_err(|error| Cause::unreadable::<K>(error, &<_>::default()))
}

fn item<K: WatchedResource>(piece: Piece<'_>) -> Result<Decoded<K>, Cause> {
    match piece {
        Piece::Whole(json) => {
            let json = str::from_utf8(json).map_err(|_| SplitError::NoList("it is not UTF-8"))?;
            Decoded::read(json).map_err(|error| Cause::unreadable::<K>(error, &Head::of_object(json.as_bytes()).names))
        }
        Piece::Head(json) => Decoded::too_long(Head::of_object(json).names, json.len()),
    }
}

fn translate<K: WatchedResource>(word: WatchEvent<K>) -> Option<Event> {
    Some(match word {
        WatchEvent::ListStarted => Event::ListStarted(K::RESOURCE),
        WatchEvent::Listed(object) | WatchEvent::Applied(object) => match object {
            Decoded::Read(object) => K::applied(object),
            Decoded::Unreadable(metadata, message) => {
                Event::Unreadable { kind: K::RESOURCE, name: object_name(&metadata), message }
            }
        },
        WatchEvent::ListDone => Event::ListDone(K::RESOURCE),
        WatchEvent::Unlisted(object) | WatchEvent::Deleted(object) => return K::deleted(object.meta()),
    })
}
