//! Two watches, and one of the own Node where its name is known, as one stream of events.
//!
//! Lists are streamed where the server can; where it refuses, they come from its cache, whole: paging would make it a
//! quorum read from etcd.
//!
//! The agent can do without the Node: where it may not be read, or the API has no Nodes, an empty list stands for it. A
//! server that cannot be reached says nothing of the kind: then the agent waits, as for the others.

use std::{fmt::Debug, time::Duration};

use futures_util::StreamExt;
use http::Uri;
use kube::{
    Api, Client, Resource,
    core::ObjectMeta,
    runtime::{
        WatchStreamExt,
        watcher::{self, Config, Error},
    },
};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, mpsc};

use super::{
    client::chain,
    objects::{EndpointSlice, Node, Service},
    sent::Sent,
};
use crate::model::{Event, Kind, ObjectName, object_name};

/// The status of a watch that starts before what the server still remembers: no failure, so no back-off.
const GONE: u16 = 410;
const RELIST_JITTER_MAX: Duration = Duration::from_millis(500);

const LIST_SILENCE_MAX: Duration = Duration::from_secs(60);
/// kube's own pauses between attempts, jitter included, are shorter.
const BACKOFF_MAX: Duration = Duration::from_secs(60);
const WATCH_SILENCE_MAX: Duration = Duration::from_secs(310);

/// What is refused may be granted later: it is asked for again after this, and then ever more seldom.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);
const REFUSED_PAUSE_MAX: Duration = Duration::from_secs(300);

/// A kind that is watched.
trait Watched: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static {
    const KIND: Kind;
    /// What cannot be done without it; nothing: the agent cannot do without it at all.
    const LOST_WITHOUT: Option<&'static str> = None;

    fn applied(object: Box<Self>) -> Event;
    fn deleted(meta: &ObjectMeta) -> Option<Event>;
}

impl Watched for Service {
    const KIND: Kind = Kind::Services;

    fn applied(object: Box<Self>) -> Event {
        Event::Service(object)
    }
    fn deleted(meta: &ObjectMeta) -> Option<Event> {
        namespaced(meta).map(Event::ServiceDeleted)
    }
}

impl Watched for EndpointSlice {
    const KIND: Kind = Kind::EndpointSlices;

    fn applied(object: Box<Self>) -> Event {
        Event::EndpointSlice(object)
    }
    fn deleted(meta: &ObjectMeta) -> Option<Event> {
        namespaced(meta).map(Event::EndpointSliceDeleted)
    }
}

impl Watched for Node {
    const KIND: Kind = Kind::Nodes;
    const LOST_WITHOUT: Option<&'static str> =
        Some("zone hints are not followed and, without --node-ip, node ports are not served");

    fn applied(object: Box<Self>) -> Event {
        Event::Node(object)
    }
    fn deleted(meta: &ObjectMeta) -> Option<Event> {
        meta.name.clone().map(Event::NodeDeleted)
    }
}

fn namespaced(meta: &ObjectMeta) -> Option<ObjectName> {
    Some(ObjectName::new(meta.namespace.as_deref()?, meta.name.as_deref()?))
}

/// Follows the API server for ever, with back-off; ends when nobody listens any more. Without a node's name no Node is
/// asked for.
pub async fn watch(client: Client, url: Uri, node_name: Option<String>, events: mpsc::Sender<Vec<Event>>) {
    let source = Source { client, url, events, is_in: Notify::new() };
    // The selectors of kube-proxy 1.36 (cmd/kube-proxy/app/server.go).
    let services = Config::default().labels("!service.kubernetes.io/service-proxy-name").fields("spec.clusterIP!=None");
    let slices = Config::default().labels("!service.kubernetes.io/headless");
    let node = async {
        let Some(name) = node_name else { return };
        // A server that is just starting refuses everything: who is let in elsewhere, and not here, may not read Nodes.
        source.is_in.notified().await;
        source.follow::<Node>(Config::default().fields(&format!("metadata.name={name}"))).await;
    };
    tokio::join!(source.follow::<Service>(services), source.follow::<EndpointSlice>(slices), node);
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
    can_stream: bool,
    is_listed: bool,
    /// Something is in the list so far.
    has_listed_any: bool,
    /// There are objects.
    knows: bool,
    refused_pause: Duration,
    /// What was last said of a kind that the agent can do without.
    said: Option<String>,
}

impl Source {
    async fn follow<K: Watched>(&self, selectors: Config) {
        let mut course = Course::new();
        while !self.events.is_closed() {
            self.follow_once::<K>(&selectors, &mut course).await;
        }
    }

    /// Lists and watches until it takes a new list.
    async fn follow_once<K: Watched>(&self, selectors: &Config, course: &mut Course) {
        let (api, config) = (Api::<Sent<K>>::all(self.client.clone()), config(selectors.clone(), course.can_stream));
        let mut stream = std::pin::pin!(watcher::watcher(api, config).default_backoff());
        let mut patience = LIST_SILENCE_MAX;
        loop {
            let Ok(item) = tokio::time::timeout(patience, stream.next()).await else {
                let (kind, url) = (K::plural(&()), &self.url);
                return tracing::warn!("no word about {kind} from {url} for {patience:?}; trying again");
            };
            match item {
                None => return,
                Some(Ok(event)) => {
                    patience = silence_max(&event);
                    course.note(&event);
                    if matches!(event, watcher::Event::InitDone) {
                        self.is_in.notify_one();
                        if let Some(lost) = K::LOST_WITHOUT.filter(|_| !course.knows) {
                            let selected = selectors.field_selector.as_deref().unwrap_or_default();
                            course.say(format!("there is no {} with {selected}: until there is, {lost}", K::kind(&())));
                        }
                    }
                    let Some(event) = translate(event) else { continue };
                    if self.events.send(vec![event]).await.is_err() {
                        return;
                    }
                }
                Some(Err(error)) if course.can_stream && refuses_streaming(&error) => {
                    tracing::info!(
                        "the API server does not stream lists of {}: listing from its cache",
                        K::plural(&())
                    );
                    course.can_stream = false;
                    return;
                }
                Some(Err(error)) if is_gone(&error) => {
                    tracing::info!("the watch of {} is too old to be resumed: listing anew", K::plural(&()));
                    return tokio::time::sleep(jitter()).await;
                }
                Some(Err(error)) => {
                    let message = describe::<K>(&error, &self.url);
                    if let Some(lost) = K::LOST_WITHOUT.filter(|_| is_refused(&error)) {
                        return self.do_without::<K>(course, &message, lost).await;
                    }
                    tracing::warn!("{message}; trying again");
                    patience = patience.max(LIST_SILENCE_MAX + BACKOFF_MAX);
                }
            }
        }
    }

    /// The kind is not to be had. What is known of it stays, as it does when the server goes; if nothing is, there is none.
    async fn do_without<K: Watched>(&self, course: &mut Course, message: &str, lost: &str) {
        let meanwhile = if course.knows { "what is known of them stays" } else { lost };
        course.say(format!("{message}; until then {meanwhile}"));
        if !course.is_listed {
            course.is_listed = true;
            // If nobody listens any more, the caller sees it.
            self.events.send(vec![Event::ListStarted(K::KIND), Event::ListDone(K::KIND)]).await.ok();
        }
        tokio::time::sleep(course.refused_pause + jitter()).await;
        course.refused_pause = (course.refused_pause * 2).min(REFUSED_PAUSE_MAX);
    }
}

impl Course {
    fn new() -> Self {
        Self {
            can_stream: true,
            is_listed: false,
            has_listed_any: false,
            knows: false,
            refused_pause: REFUSED_PAUSE,
            said: None,
        }
    }

    fn note<K>(&mut self, event: &watcher::Event<K>) {
        match event {
            watcher::Event::Init => self.has_listed_any = false,
            watcher::Event::InitApply(_) => self.has_listed_any = true,
            watcher::Event::InitDone => (self.is_listed, self.knows) = (true, self.has_listed_any),
            watcher::Event::Apply(_) => self.knows = true,
            // Of what the agent can do without there is one.
            watcher::Event::Delete(_) => self.knows = false,
        }
        // After a list that was not streamed, the watch may still be refused.
        let is_watched = match event {
            watcher::Event::Init | watcher::Event::InitApply(_) => false,
            watcher::Event::InitDone => self.can_stream,
            watcher::Event::Apply(_) | watcher::Event::Delete(_) => true,
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

/// How long a server that is alive may say nothing: hardly at all in the middle of a list; after that the server itself
/// ends each watch within the timeout that kube asks for (290 s).
fn silence_max<K>(event: &watcher::Event<K>) -> Duration {
    match event {
        watcher::Event::Init | watcher::Event::InitApply(_) => LIST_SILENCE_MAX,
        watcher::Event::InitDone | watcher::Event::Apply(_) | watcher::Event::Delete(_) => WATCH_SILENCE_MAX,
    }
}

/// After an outage all agents of a cluster list at once: this spreads them without making any wait for long.
fn jitter() -> Duration {
    let mut bytes = [0; 2];
    // Without randomness (early in a boot) there is no jitter.
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK).ok();
    RELIST_JITTER_MAX * u32::from(u16::from_ne_bytes(bytes)) / (1 << 16)
}

fn config(selectors: Config, can_stream: bool) -> Config {
    if can_stream { selectors.streaming_lists() } else { Config { page_size: None, ..selectors.any_semantic() } }
}

fn translate<K: Watched>(event: watcher::Event<Sent<K>>) -> Option<Event> {
    Some(match event {
        watcher::Event::Init => Event::ListStarted(K::KIND),
        watcher::Event::InitApply(object) | watcher::Event::Apply(object) => match object {
            Sent::Read(object) => K::applied(object),
            Sent::Unreadable(metadata, message) => {
                Event::Unreadable { kind: K::KIND, name: object_name(&metadata), message }
            }
        },
        watcher::Event::InitDone => Event::ListDone(K::KIND),
        watcher::Event::Delete(object) => return K::deleted(object.meta()),
    })
}

/// A server that does not know `sendInitialEvents` calls the request invalid (400, 422) or forbids the parameter by
/// these codes; what a retry can mend (401, 403, 410, 429, 5xx) says nothing about it.
fn refuses_streaming(error: &Error) -> bool {
    matches!(error, Error::WatchStartFailed(kube::Error::Api(status)) if matches!(status.code, 400 | 405 | 422))
}

/// 410, as an event or as the answer to the request.
fn is_gone(error: &Error) -> bool {
    match error {
        Error::WatchError(status) => status.code == GONE,
        Error::WatchStartFailed(kube::Error::Api(status)) => status.code == GONE,
        _ => false,
    }
}

/// The server is there and has made up its mind: the kind may not be read (403), or the API does not have it (404).
fn is_refused(error: &Error) -> bool {
    let code = match error {
        Error::InitialListFailed(kube::Error::Api(status)) | Error::WatchStartFailed(kube::Error::Api(status)) => {
            status.code
        }
        Error::WatchError(status) => status.code,
        _ => return false,
    };
    matches!(code, 403 | 404)
}

/// One line that names the resource and, where it is a matter of rights, the verb.
fn describe<K: Watched>(error: &Error, url: &Uri) -> String {
    let (verb, cause) = match error {
        Error::InitialListFailed(cause) => ("list", cause),
        Error::WatchStartFailed(cause) | Error::WatchFailed(cause) => ("watch", cause),
        Error::WatchError(status) => return format!("watch of {} ended: {}", K::plural(&()), status.message),
        Error::NoResourceVersion => return format!("the API server sent {} without resourceVersion", K::plural(&())),
    };
    let (resource, group) = (K::plural(&()), K::group(&()));
    match cause {
        kube::Error::Api(status) if status.code == 403 => format!(
            "not permitted to {verb} {resource}: grant the verbs list and watch on resource {resource:?} of apiGroup \
             {group:?} to cproxy's identity ({})",
            status.message
        ),
        kube::Error::Api(status) if status.code == 401 => format!(
            "cannot {verb} {resource}: the API server at {url} does not accept the credentials (401); check the token or \
             certificate of the kubeconfig or ServiceAccount"
        ),
        kube::Error::Api(status) => format!("cannot {verb} {resource} at {url}: {} ({})", status.message, status.code),
        kube::Error::Service(cause) => format!("cannot {verb} {resource} at {url}: {}", chain(&**cause)),
        cause => format!("cannot {verb} {resource} at {url}: {}", chain(cause)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(code: u16) -> Box<kube::core::Status> {
        serde_json::from_value(serde_json::json!({"code": code, "message": "m", "reason": "r", "status": "Failure"}))
            .unwrap()
    }

    #[test]
    fn gone_is_understood_as_an_event_and_as_an_answer() {
        assert!(is_gone(&Error::WatchError(status(410))));
        assert!(is_gone(&Error::WatchStartFailed(kube::Error::Api(status(410)))));
        assert!(!is_gone(&Error::WatchError(status(500))));
        assert!(!is_gone(&Error::InitialListFailed(kube::Error::Api(status(410)))), "a list has nothing to be too old");
    }

    #[test]
    fn only_a_refusal_of_the_parameter_ends_streaming() {
        for (code, ends) in [
            (400, true),
            (405, true),
            (422, true),
            (401, false),
            (403, false),
            (410, false),
            (429, false),
            (503, false),
        ] {
            assert_eq!(refuses_streaming(&Error::WatchStartFailed(kube::Error::Api(status(code)))), ends, "{code}");
        }
    }

    #[test]
    fn what_is_not_permitted_is_named_with_what_to_grant() {
        let url = Uri::from_static("https://api:6443");
        let list = describe::<EndpointSlice>(&Error::InitialListFailed(kube::Error::Api(status(403))), &url);
        assert!(list.starts_with("not permitted to list endpointslices: grant the verbs list and watch"), "{list}");
        assert!(list.contains("\"discovery.k8s.io\"") && !list.contains('\n'), "{list}");
    }

    #[test]
    fn only_what_the_server_has_decided_is_done_without() {
        for (code, is) in [(403, true), (404, true), (401, false), (410, false), (429, false), (500, false)] {
            for error in [Error::InitialListFailed, Error::WatchStartFailed] {
                assert_eq!(is_refused(&error(kube::Error::Api(status(code)))), is, "{code}");
            }
        }
        assert!(!is_refused(&Error::NoResourceVersion));
    }

    #[test]
    fn what_is_said_once_is_said_again_after_it_was_mended() {
        let node = || Node::default();
        let mut course = Course::new();
        let mut after = |event| {
            course.said = Some("not permitted".to_owned());
            course.refused_pause = REFUSED_PAUSE_MAX;
            course.note::<Node>(&event);
            (course.said.is_none(), course.refused_pause == REFUSED_PAUSE)
        };
        assert_eq!(after(watcher::Event::Init), (false, false));
        assert_eq!(after(watcher::Event::InitDone), (false, true), "there is no such Node");
        assert_eq!(after(watcher::Event::Apply(node())), (true, true));
        assert_eq!(after(watcher::Event::InitApply(node())), (false, false));
        assert_eq!(after(watcher::Event::InitDone), (true, true));
        course.can_stream = false;
        course.refused_pause = REFUSED_PAUSE_MAX;
        course.note::<Node>(&watcher::Event::InitDone);
        assert_eq!(course.refused_pause, REFUSED_PAUSE_MAX, "the watch may still be refused");
    }

    #[test]
    fn a_list_may_be_silent_for_less_time_than_a_watch() {
        assert_eq!(silence_max::<Service>(&watcher::Event::Init), LIST_SILENCE_MAX);
        assert_eq!(silence_max::<Service>(&watcher::Event::InitDone), WATCH_SILENCE_MAX);
    }
}
